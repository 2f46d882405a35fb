"""Chat templates rendered without a tokenizer: the Jinja dialect of Hugging Face, sandboxed, with a fixed clock.

Contract: two templates rendered here differ only where they really differ; a template that refuses a conversation
(`raise_exception`) gives a `Refusal` as its result, which is compared like any text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_GENERATION_MARK = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # marks the trained part; prints nothing
_FIXED_TIME = datetime(2025, 1, 31, 12, 0, 0)


@dataclass(frozen=True)
class Refusal:
    """Why a template did not render a conversation."""

    reason: str


class _RefusedError(Exception):
    pass


def render_all(
    template: str, conversations: Sequence[Mapping[str, Any]], tokens: Mapping[str, str]
) -> list[str | Refusal]:
    """Text of each conversation (`messages` and the template's options), or why there is none.

    `tokens` holds bos_token, eos_token, ... as the tokenizer's files name them. `name` is a label of ours and not
    handed to the template.
    """
    import jinja2

    try:
        compiled = _environment().from_string(_GENERATION_MARK.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        return [Refusal(f"line {error.lineno}: {error.message}")] * len(conversations)
    return [_render(compiled, {**tokens, "tools": None, "documents": None, **c}) for c in conversations]


def _render(compiled: Any, variables: Mapping[str, Any]) -> str | Refusal:
    try:
        return str(compiled.render({key: value for key, value in variables.items() if key != "name"}))
    except _RefusedError as refused:
        return Refusal(str(refused))
    except Exception as error:  # templates are programs of others: whatever they raise is a fact about the template
        return Refusal(f"{type(error).__name__}: {error}")


def _environment() -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _FIXED_TIME.strftime
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(reason: str) -> None:
    raise _RefusedError(reason)
