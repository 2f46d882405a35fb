"""One line per decode round: the only source of every number that specdoctor prints.

Contract: a record is plain data (JSON in, JSON out). Metrics are pure functions of lists of records.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError

Outcome = str  # "accepted" | "rejected" | "unreached" (below or after a rejected node) | "trimmed" (never verified)


@dataclass(slots=True)
class RoundRecord:
    """What happened in one round of one request.

    `accepted` is the verdict of the acceptance rule, before the cut at a stop token or at the length cap;
    `committed_ids` is what really entered the text, bonus or correction token included, after that cut.
    """

    arm: str
    prompt_id: str
    round: int  # 0-based; the prefill is not a round
    drafted: int  # draft tokens proposed
    verified: int  # draft tokens sent to the target, after scheduling
    accepted: int  # draft tokens accepted
    committed_ids: list[int]
    outcomes: list[Outcome] = field(default_factory=list)  # [drafted], one per draft node
    confidence: list[float] | None = None  # [drafted], conditional acceptance predicted by the drafter
    depth: int | None = None  # levels of the verified draft; None: a chain, so `verified`
    stop: str | None = None  # why the request ended in this round: stop, length, context; None: it went on
    context: int = 0  # tokens before the anchor when the round began
    times: dict[str, float] = field(default_factory=dict)  # seconds by phase (see `Engine`); `round` is all of them
    category: str = ""
    repeat: int = 0

    @property
    def committed(self) -> int:
        return len(self.committed_ids)


def write_jsonl(records: Iterable[RoundRecord], path: Path) -> None:
    """Write records, one JSON object a line; the file appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(asdict(record), separators=(",", ":")) + "\n")
    part.replace(path)


def read_jsonl(path: Path) -> Iterator[RoundRecord]:
    """Read records back; raises `SpecdoctorError` with file and line on the first bad one."""
    known = {f.name for f in fields(RoundRecord)}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row: dict[str, Any] = json.loads(line)
                yield RoundRecord(**{key: value for key, value in row.items() if key in known})
            except (ValueError, TypeError, AttributeError) as error:
                raise SpecdoctorError(f"{path}:{number}: not a round record ({error})") from None
