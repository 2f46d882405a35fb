"""The settings of our own JSON, under the names that results are compared by."""

import json
from collections.abc import Mapping
from typing import Any

from specdoctor.formats.results.result_set import present

# Taken as they are, from the first of: the arm's own entry, the file's settings, its environment.
PLAIN = (
    "temperature",
    "draft_temperature",
    "confidence_threshold",
    "max_new_tokens",
    "seed",
    "device",
    "dtype",
    "processor",
    "threads",
)


def settings_of(document: Mapping[str, Any], arm: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Canonical settings of the arm called `name`; unknown ones are left out."""
    layers = [arm, _mapping(document.get("settings")), _mapping(document.get("environment")), document]
    found = {key: _first(layers[:3], key) for key in PLAIN}
    found["target"] = _model(_first(layers[1:], "target"))
    drafts = _mapping(layers[1].get("drafts"))
    draft = arm.get("draft", document.get("draft"))
    found["draft"] = _model(drafts.get(name) or layers[1].get("draft") or draft)
    found["template"] = _template(_first(layers[1:], "template"))
    lengths = layers[1].get("draft_tokens", layers[1].get("K"))
    length = lengths.get(name) if isinstance(lengths, Mapping) else lengths
    found["K"] = _mapping(draft).get("draft_tokens", arm.get("K", length))
    if "tree" in _mapping(draft):
        found["tree"] = json.dumps(draft["tree"], sort_keys=True) if draft["tree"] else "chain"
    found["acceptance"] = _mapping(_first(layers[1:2], "acceptance")).get("rule")
    found["algorithm"], found["block_size"] = (_mapping(draft).get(key) for key in ("algorithm", "block_size"))
    return present(**found)


def prompt_hashes(document: Mapping[str, Any]) -> dict[str, str]:
    """Prompt id -> hash of what was asked, where the file states it."""
    hashes = _mapping(_mapping(document.get("settings")).get("prompt_hashes"))
    return {str(prompt): str(value) for prompt, value in hashes.items()}


def _first(layers: list[Mapping[str, Any]], key: str) -> Any:
    return next((layer[key] for layer in layers if layer.get(key) is not None), None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _model(value: Any) -> str | None:
    """A model by the last two parts of its path or id: where it lay on a disk is nobody's business."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("id", "path", "name") if value.get(key)), None)
    if not isinstance(value, str):
        return None
    parts = [part for part in value.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-2:]) or None


def _template(value: Any) -> str | None:
    """`chat default 1a2b3c` - kind, name, hash, and the options if there are any."""
    if not isinstance(value, Mapping):
        return None if value is None else str(value)
    words = [str(value[key])[:16] for key in ("kind", "name", "sha256") if value.get(key)]
    options = value.get("options")
    return " ".join([*words, *([json.dumps(options, sort_keys=True)] if options else [])]) or None
