"""The bundled sample: texts to encode and conversations to render, the same for every pair."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class TextSample:
    """Texts by line, their categories, and chats for templates."""

    texts: tuple[str, ...]
    names: tuple[str, ...]  # one per text
    categories: tuple[str, ...]  # one per text
    conversations: tuple[Mapping[str, Any], ...]


def bundled_sample() -> TextSample:
    """The sample that ships with specdoctor (own texts, Apache-2.0)."""
    folder = files("specdoctor.data") / "samples"
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text("utf-8").splitlines()]
    return TextSample(
        texts=tuple(row["text"] for row in rows),
        names=tuple(row["id"] for row in rows),
        categories=tuple(row["category"] for row in rows),
        conversations=tuple(json.loads((folder / "conversations.json").read_text("utf-8"))),
    )
