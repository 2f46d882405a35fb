"""DeepSpec's evaluation table, as its `eval.py` prints it: boxed or tab-separated, one line a dataset.

Columns: `#propose` (mean effective proposal, "2.67+1"), `accept_len`, `verify_rate` = committed / (proposed + rounds),
`samples`, `out_tokens` (prefill token in), `tok/s`, `verify/s`, `accept_rate@k`. Rounds are not printed; they follow
from out_tokens * (verify/s) / (tok/s), as both rates share one clock. Lengths are cut at EOS but keep what overshoots
the length cap. Source read: deepspec/eval/base_evaluator.py.
"""

import re

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.results.result_set import ResultSet, present
from specdoctor.formats.results.source import ResultSource
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.sums import Sums, total

NAME = "DeepSpec table (text)"
CONVENTION = (
    "committed tokens / rounds, pooled per dataset, two decimals: bonus in, prefill token out, cut at EOS, not at the "
    "length cap; drafts after an accepted EOS are no part of the proposal"
)
NEEDED = ("dataset", "accept_len", "samples", "out_tokens", "tok/s", "verify/s")


def recognises(source: ResultSource) -> bool:
    return (
        not source.first and "accept_len" in source.text and "verify_rate" in source.text and "dataset" in source.text
    )


def read(source: ResultSource) -> list[ResultSet]:
    path = str(source.path)
    rows = _table(source.text, path)
    pooled = total(_sums(row, path) for row in rows)
    first = rows[0]
    per_dataset = ", ".join(f"{row['dataset']} {row['accept_len']}" for row in rows)
    values = {}
    if len(rows) == 1:
        values["tau_step"] = Estimate(_number(first["accept_len"], path, "accept_len"), reason="printed, no interval")
    return [
        ResultSet(
            tool="DeepSpec table",
            path=path,
            arm=first.get("draft_model", ""),
            convention=CONVENTION,
            pooled=pooled,
            settings=present(
                target=first.get("target_model"),
                draft=first.get("draft_model"),
                prompts=" ".join(f"{row['dataset']}:{row['samples']}" for row in rows),
            ),
            values=values,
            absent={
                "vllm_mean_acceptance_length": "drafts after an accepted EOS are not counted",
                "alpha_draft": "accepted drafts are not printed, and drafts after an accepted EOS are not counted",
            },
            notes=(f"accept_len by dataset: {per_dataset}", "pooled over requests: no interval between prompts"),
        )
    ]


def _sums(row: dict[str, str], path: str) -> Sums:
    numbers = {key: _number(row[key], path, key) for key in NEEDED[1:]}
    if not numbers["tok/s"]:
        raise SpecdoctorError(
            f"{path}: dataset {row['dataset']}: tok/s is 0, so the rounds cannot be told; run it again"
        )
    rounds = round(numbers["out_tokens"] * numbers["verify/s"] / numbers["tok/s"])
    # Both factors were printed with few decimals; the product is a count.
    committed = round(numbers["accept_len"] * rounds)
    proposal = row.get("#propose", "").partition("+")[0]
    return Sums(
        requests=numbers["samples"],
        rounds=rounds,
        committed=committed,
        drafted=round(_number(proposal, path, "#propose") * rounds) if proposal else None,
        completion=numbers["out_tokens"],
    )


def _table(text: str, path: str) -> list[dict[str, str]]:
    """The last table with a header; the lines printed after each dataset before it have none."""
    header: list[str] = []
    rows: list[dict[str, str]] = []
    for line in text.splitlines():
        cells = _cells(line)
        if "dataset" in cells and "accept_len" in cells:
            header, rows = cells, []
        elif header and len(cells) == len(header):
            rows.append(dict(zip(header, cells, strict=True)))
    missing = [key for key in NEEDED if key not in header]
    if missing or not rows:
        found = f"no column {', '.join(missing)}" if missing else "no line under the header"
        raise SpecdoctorError(f"{path}: DeepSpec table with {found}; keep the whole output of eval.py")
    return rows


def _cells(line: str) -> list[str]:
    if "|" in line:
        return [cell.strip() for cell in line.strip().strip("|").split("|")]
    return [cell.strip() for cell in line.split("\t")]


def _number(text: str, path: str, key: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise SpecdoctorError(f"{path}: column {key} is {text!r}, expected a number of 0 or more")
    return float(text)
