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


def render(
    template: str, conversation: Mapping[str, Any], tokens: Mapping[str, str], default_name: str = "chat template"
) -> str | Refusal:
    """Text of one conversation (`messages` and the template's options), or why there is none.

    `tokens` holds bos_token, eos_token, ... as the tokenizer's files name them.
    """
    import jinja2

    try:
        compiled = _environment().from_string(_GENERATION_MARK.sub("", template))
        return str(compiled.render(**{**tokens, "tools": None, "documents": None, **conversation}))
    except _RefusedError as refused:
        return Refusal(str(refused))
    except jinja2.TemplateSyntaxError as error:
        return Refusal(f"{default_name}, line {error.lineno}: {error.message}")
    except Exception as error:  # templates are programs of others: whatever they raise is a fact about the template
        return Refusal(f"{default_name}: {type(error).__name__}: {error}")


def render_all(
    template: str, conversations: Sequence[Mapping[str, Any]], tokens: Mapping[str, str]
) -> list[str | Refusal]:
    """`render` for each conversation; `name` is a label of ours and not handed to the template."""
    return [render(template, {k: v for k, v in c.items() if k != "name"}, tokens) for c in conversations]


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
