"""Any results file -> its arms. Which tool wrote it is seen from its content, never from its name."""

from pathlib import Path
from typing import Any

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.results import (
    aiperf,
    baseline,
    deepspec,
    llamacpp,
    model_optimizer,
    sglang,
    specdoctor_accept,
    specdoctor_bench,
    specdoctor_records,
    vllm,
)
from specdoctor.formats.results.result_set import ResultSet
from specdoctor.formats.results.source import ResultSource

READERS: tuple[Any, ...] = (
    specdoctor_records,
    baseline,
    specdoctor_accept,
    specdoctor_bench,
    model_optimizer,
    aiperf,
    vllm,
    sglang,
    llamacpp,
    deepspec,
)
PLAIN_ARMS = ("ar", "hf")  # measured beside the drafters; not what a gate is about


def read_results(path: Path) -> list[ResultSet]:
    """All arms of a file (or of an AIPerf artifact folder), in the order of the file.

    Raises `SpecdoctorError` for a file that no reader knows, one that is damaged, and (exit code 5) one without data.
    """
    if path.is_dir():
        path = aiperf.inside(path)
    source = ResultSource(path)
    for reader in READERS:
        if reader.recognises(source):
            results: list[ResultSet] = reader.read(source)
            if not results:
                raise SpecdoctorError(f"{path}: {reader.NAME} without any measured arm", ExitCode.NOTHING)
            return results
    known = "; ".join(reader.NAME for reader in READERS)
    raise SpecdoctorError(f"{path}: {_shape(source)}, which is no results file known here; expected one of: {known}")


def select_arm(results: list[ResultSet], arm: str | None, also: str | None = None) -> ResultSet:
    """The arm called `arm`; without a name the only one with a drafter, or the one called `also` (as in a baseline)."""
    names = [result.arm for result in results]
    if arm is not None:
        found = [result for result in results if result.arm == arm]
        if not found:
            raise SpecdoctorError(f"{results[0].path}: has no arm {arm!r}, found {', '.join(names)}")
        return found[0]
    drafted = [result for result in results if result.arm not in PLAIN_ARMS] or results
    if len(drafted) > 1 and also is not None:
        drafted = [result for result in drafted if result.arm == also] or drafted
    if len(drafted) > 1:
        choices = ", ".join(result.arm for result in drafted)
        raise SpecdoctorError(f"{results[0].path}: has {len(drafted)} arms ({choices}); choose one with --arm NAME")
    return drafted[0]


def _shape(source: ResultSource) -> str:
    if source.document:
        return f"a JSON object with keys {', '.join(sorted(source.document)[:6])}"
    if source.rows:
        return f"rows of JSON with keys {', '.join(sorted(source.rows[0].values)[:6])}"
    return "text" if source.text.strip() else "an empty file"
