"""Prompts with the data set and the domain that each belongs to: the columns of an evaluation table.

Contract: of a JSONL line the data set is its key `dataset`, else `source`, else the file's name; the domain is its
`category`, else what the well-known sets are about. Bundled prompts are a data set a category. With several files, ids
are made unique by the file's name.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdoctor.errors import SpecdoctorError
from specdoctor.measure.prompt_file import RawPrompt
from specdoctor.measure.prompts import load_bundled, load_jsonl

BUNDLED = ("code", "chat", "math")
NO_DOMAIN = "other"
# The nine sets of the DSpark paper, by the beginning of their names without signs.
DOMAINS = {
    **dict.fromkeys(("gsm8k", "math", "aime"), "math"),
    **dict.fromkeys(("mbpp", "humaneval", "livecodebench", "lcb"), "code"),
    **dict.fromkeys(("mtbench", "alpaca", "arena"), "chat"),
}


@dataclass(frozen=True, slots=True)
class DataSet:
    """A column: prompts of one origin, in one domain."""

    name: str
    domain: str


@dataclass(slots=True)
class EvaluationPrompts:
    """Prompts in the order to be run, sets in turn, and the set of each by prompt id."""

    prompts: list[RawPrompt]
    sets: dict[str, DataSet]

    def columns(self) -> list[DataSet]:
        """The data sets, those of a domain next to each other, otherwise in order of appearance."""
        found = list(dict.fromkeys(self.sets.values()))
        domains = list(dict.fromkeys(one.domain for one in found))
        return sorted(found, key=lambda one: domains.index(one.domain))


def load_data_sets(
    files: Sequence[Path], categories: Sequence[str] = (), max_prompts: int | None = None
) -> EvaluationPrompts:
    """Read JSONL files, or the bundled prompts where none is given; at most `max_prompts` of each data set.

    Raises `SpecdoctorError` as `load_jsonl` does, and for two files of one name.
    """
    if files and categories:
        raise SpecdoctorError("--prompts and --categories: give one of them; a file brings its own categories")
    if not files:
        bundled = load_bundled(list(categories) or list(BUNDLED))
        return _in_turn([(prompt, DataSet(prompt.category, prompt.category)) for prompt in bundled], max_prompts)
    if len({path.stem for path in files}) < len(files):
        raise SpecdoctorError("--prompts: two files of one name; rename one, the name is the data set's")
    rows = []
    for path in files:
        lines = path.read_text(encoding="utf-8-sig").split("\n") if path.is_file() else []
        for prompt in load_jsonl(path):
            line = json.loads(lines[int(prompt.source.rpartition(":")[2]) - 1])
            one = _data_set(line, prompt.category, path.stem)
            unique = prompt.id if len(files) == 1 else f"{path.stem}/{prompt.id}"
            rows.append((replace(prompt, id=unique, category=one.domain), one))
    return _in_turn(rows, max_prompts)


def _data_set(line: dict[str, object], category: str, file: str) -> DataSet:
    named = (line.get(key) for key in ("dataset", "source"))
    name = next((value for value in named if isinstance(value, str) and value), file)
    plain = "".join(sign for sign in name.lower() if sign.isalnum())
    known = (domain for start, domain in DOMAINS.items() if plain.startswith(start))
    return DataSet(name, category or next(known, NO_DOMAIN))


def _in_turn(rows: Sequence[tuple[RawPrompt, DataSet]], most: int | None) -> EvaluationPrompts:
    """One of each set after the other: an interrupted run has seen them all alike."""
    rank: dict[DataSet, int] = {}
    ranked = []
    for prompt, one in rows:
        place = rank[one] = rank.get(one, -1) + 1
        if most is None or place < most:
            ranked.append((place, prompt, one))
    ranked.sort(key=lambda entry: entry[0])
    return EvaluationPrompts([p for _, p, _ in ranked], {p.id: one for _, p, one in ranked})
