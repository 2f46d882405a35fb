"""The checks there are, found by file name and loaded one by one.

Contract: a file `sd<number>_<name>.py` in this package holds one check, `CHECK`, whose code is SD<number> and whose
documentation is the docstring of the file, with the headings of HEADINGS. A check never prints and never exits; if it
raises, that becomes a `crash` finding and the other checks go on.
"""

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from specdoctor.checks.finding import Finding, Severity
from specdoctor.errors import SpecdoctorError

HEADINGS = ("What it checks", "Why it matters", "How it is measured", "Fix", "References")
Cost = Literal["static", "tokens", "forward", "bench", "server"]
_FILE_NAME = re.compile(r"(sd\d{3})_\w+\.py")


@dataclass(frozen=True)
class Check:
    """One check. `run` takes the context of its family and returns what it found, an empty list when all is well."""

    code: str
    title: str
    cost: Cost  # what it needs: files only, encoded text, forward passes, a bench run, a running server
    run: Callable[[Any], list[Finding]]

    @property
    def documentation(self) -> str:
        """The docstring of the check's file."""
        return (import_module(self.run.__module__).__doc__ or "").strip()


def modules() -> dict[str, str]:
    """Code -> module name of every check, without importing any."""
    names = sorted(path.name for path in Path(__file__).parent.iterdir())
    matches = (_FILE_NAME.fullmatch(name) for name in names)
    return {m[1].upper(): f"{__package__}.{m[0].removesuffix('.py')}" for m in matches if m}


def load(code: str) -> Check:
    """The check of a code. Raises SpecdoctorError for a code that does not exist."""
    known = modules()
    wanted = code.strip().upper()
    if wanted not in known:
        raise SpecdoctorError(f"{code}: no such check; expected one of {', '.join(known)}")
    check: Check = import_module(known[wanted]).CHECK
    return check


def family(prefix: str) -> list[Check]:
    """All checks whose code starts with `prefix`, by code: `SD1` for tokenizer, vocabulary and prompt."""
    return [load(code) for code in modules() if code.startswith(prefix.upper())]


def run_checks(checks: Iterable[Check], context: Any) -> Iterator[Finding]:
    """Findings of all checks, as they come. Raises nothing but KeyboardInterrupt and the like."""
    for check in checks:
        try:
            yield from check.run(context)
        except Exception as error:
            yield _crash(check, error)


def _crash(check: Check, error: Exception) -> Finding:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Finding(
        code=check.code,
        severity=Severity.CRASH,
        title=f"the check crashed: {type(error).__name__}: {error}",
        evidence={"exception": type(error).__name__, "line": last.lineno},
        where={"file": Path(last.filename).name, "function": last.name},
        fix="A bug in specdoctor, please report it with the output of --debug; the other checks are not affected.",
    )
