"""The framework of checks: discovery, documentation, crashes, fingerprints, and `specdoctor rule`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdoctor.checks.finding import Finding, Severity, by_severity, counted
from specdoctor.checks.registry import HEADINGS, Check, family, load, modules, run_checks
from specdoctor.cli.app import app
from specdoctor.errors import SpecdoctorError

CHECKS_FOLDER = Path(__file__).parents[1] / "checks"


@pytest.mark.parametrize("code", modules())
def test_each_check_documents_itself(code: str) -> None:
    documentation = load(code).documentation
    positions = [documentation.find(f"\n## {heading}\n") for heading in HEADINGS]
    assert -1 not in positions and positions == sorted(positions), documentation
    sections = re.split(r"\n## [^\n]+\n", documentation)
    assert all(section.strip() for section in sections)
    assert documentation.splitlines()[0].endswith(".")
    assert re.search(r"https://\S+", sections[-1])


@pytest.mark.parametrize("code", modules())
def test_code_is_that_of_the_file(code: str) -> None:
    check = load(code)
    assert check.code == code and check.cost in ("static", "tokens", "forward", "bench", "server") and check.title
    # A finding under another check's code would be explained by the wrong documentation.
    source = (CHECKS_FOLDER / f"{modules()[code].rpartition('.')[2]}.py").read_text()
    assert set(re.findall(r'"(SD\d{3})"', source)) == {code}


def test_titles_are_unique_and_each_file_is_found() -> None:
    checks = family("SD")
    assert len({check.title for check in checks}) == len(checks) == len(list(CHECKS_FOLDER.glob("sd*.py")))
    assert {check.code for check in family("sd1")} >= {f"SD1{n:02}" for n in range(1, 11)}


def test_checks_neither_print_nor_exit() -> None:
    for path in CHECKS_FOLDER.glob("*.py"):
        assert not re.search(r"\bprint\(|sys\.exit|raise SystemExit|typer", path.read_text()), path.name


def test_unknown_code_is_a_usage_error() -> None:
    assert load("sd101").code == "SD101"
    with pytest.raises(SpecdoctorError, match=r"SD777: no such check; expected one of SD101"):
        load("SD777")


def explode(context: Any) -> list[Finding]:
    raise RuntimeError(f"planted {context}")


def find(context: Any) -> list[Finding]:
    return [Finding("SD999", Severity.INFO, "seen", {"value": context})]


def test_crash_becomes_a_finding_and_the_rest_runs() -> None:
    checks = [Check("SD998", "broken", "static", explode), Check("SD999", "fine", "static", find)]
    crash, seen = run_checks(checks, 5)
    assert crash.severity is Severity.CRASH and "RuntimeError: planted 5" in crash.title
    assert crash.where == {"file": "test_checks_registry.py", "function": "explode"}
    assert seen.evidence == {"value": 5}


def test_interrupt_is_not_swallowed() -> None:
    def interrupt(context: Any) -> list[Finding]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_checks([Check("SD998", "slow", "static", interrupt)], None))


def test_fingerprint_depends_on_place_not_on_numbers() -> None:
    def made(**changes: Any) -> str:
        base = {
            "code": "SD101",
            "severity": Severity.ERROR,
            "title": "2 ids",
            "evidence": {"n": 2},
            "where": {"file": "a"},
        }
        return Finding(**{**base, **changes}).fingerprint

    assert made() == made(title="3 ids", evidence={"n": 3}, severity=Severity.WARNING)
    assert len({made(), made(code="SD102"), made(where={"file": "b"}), made(subject="x")}) == 4
    assert re.fullmatch("[0-9a-f]{16}", made())


def test_finding_is_json_and_sorts_by_severity() -> None:
    findings = [
        Finding("SD1", severity, "t") for severity in (Severity.INFO, Severity.CRASH, Severity.ERROR, Severity.WARNING)
    ]
    assert [f.severity for f in by_severity(findings)] == ["error", "warning", "crash", "info"]
    written = json.loads(json.dumps(findings[0].as_json()))
    assert written["severity"] == "info" and written["fingerprint"] == findings[0].fingerprint
    assert [f.needs_action for f in by_severity(findings)] == [True, True, False, False]


def test_counted() -> None:
    assert [counted(n, "id") for n in (0, 1, 2304)] == ["0 ids", "1 id", "2,304 ids"]


# specdoctor rule


def test_rule_prints_the_documentation() -> None:
    result = CliRunner().invoke(app, ["rule", "SD108"])
    assert result.exit_code == 0 and result.stdout.startswith("# SD108 Mask token of block drafters\n")
    assert all(f"## {heading}" in result.stdout for heading in HEADINGS)
    assert load("SD108").documentation in result.stdout  # piped: as it is, not wrapped again


def test_rule_lists_all_codes() -> None:
    result = CliRunner().invoke(app, ["rule"])
    assert result.exit_code == 0
    assert all(re.search(rf"^{code} ", result.stdout, re.M) for code in modules())


def test_rule_as_json_and_unknown_code() -> None:
    result = CliRunner().invoke(app, ["rule", "SD101", "--json", "-"])
    (rule,) = json.loads(result.stdout)["rules"]
    assert rule["code"] == "SD101" and "## Fix" in rule["documentation"]
    result = CliRunner().invoke(app, ["rule", "SD777"])
    assert result.exit_code == 2 and result.stderr.startswith("specdoctor: SD777: no such check")


def test_listing_rules_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom specdoctor.cli.app import app\ntry: app(['rule'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'jinja2', 'scipy'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("LOADED []")
