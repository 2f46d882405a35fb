"""The JSONL format of prompts, read and refused line by line.

Contract: pure text in, `RawPrompt`s out; no tokenizer, no model. A line holds exactly one of
- `prompt`: text of the user,
- `messages`: `[{"role": ..., "content": ...}, ...]`, the last one not by the assistant,
- `turns`: the user's side of a conversation. Only the first turn is decoded: the later ones need the model's own
  answers in between. They are kept in `later_turns`. DeepSpec's evaluation and the DSpark paper use the first turn too,
- `prompt_ids`: token ids, used as they are, without template or special tokens,
and optionally `id` (default: the line number; unique) and `category`. Other fields are ignored. Blank lines, a
byte-order mark and CRLF are fine. Anything else is refused with one line that names file, line and key.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specdoctor.errors import ExitCode, SpecdoctorError

FIELDS = ("prompt", "messages", "turns", "prompt_ids")

Message = dict[str, str]  # role, content


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt as read: either `messages` or `prompt_ids` is filled."""

    id: str
    category: str  # "" if the line names none
    source: str  # file:line, for error messages
    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    later_turns: tuple[str, ...] = ()  # user turns after the first one, not decoded


def parse_jsonl(data: bytes, name: str) -> list[RawPrompt]:
    """Read the bytes of a JSONL file; `name` stands for the file in messages.

    Raises:
        SpecdoctorError: bad line or duplicate id; exit code NOTHING if there is no prompt.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = data.count(b"\n", 0, error.start) + 1
        raise SpecdoctorError(f"{name}:{line_number}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    prompts: dict[str, RawPrompt] = {}
    # Not splitlines(): U+2028 and its like may stand unescaped inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        prompt = _parse_line(line, number, f"{name}:{number}")
        if prompt.id in prompts:
            raise SpecdoctorError(
                f"{prompt.source}: id is {prompt.id!r}, which {prompts[prompt.id].source} has already, expected unique "
                "ids (a line without id takes its line number); rename one of them"
            )
        prompts[prompt.id] = prompt
    if not prompts:
        raise SpecdoctorError(f"{name}: no prompts in the file; write one JSON object a line", ExitCode.NOTHING)
    return list(prompts.values())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing if no known word is near; upper and lower case count as equal."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def _parse_line(line: str, number: int, where: str) -> RawPrompt:
    row = _parse_object(line, where)
    key = _only_field(row, where)
    messages: list[Message] = []
    prompt_ids: list[int] = []
    later_turns: list[str] = []
    if key == "prompt":
        messages = [{"role": "user", "content": _filled_text(row[key], where, key)}]
    elif key == "turns":
        turns = _filled_list(row[key], where, key)
        first, *later_turns = [_filled_text(turn, where, f"turns[{i}]") for i, turn in enumerate(turns)]
        messages = [{"role": "user", "content": first}]
    elif key == "messages":
        messages = _parse_messages(_filled_list(row[key], where, key), where)
    else:
        prompt_ids = _parse_ids(_filled_list(row[key], where, key), where)
    category = row.get("category")
    return RawPrompt(
        id=_parse_id(row.get("id"), number, where),
        category="" if category is None else _filled_text(category, where, "category"),
        source=where,
        messages=tuple(messages),
        prompt_ids=tuple(prompt_ids),
        later_turns=tuple(later_turns),
    )


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at column {error.colno}"
        raise SpecdoctorError(f"{where}: not JSON: {problem}; write one JSON object a line") from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond what Python reads
        raise SpecdoctorError(f"{where}: unreadable JSON: {error}; write one JSON object a line") from None
    if not isinstance(row, dict):
        raise SpecdoctorError(f"{where}: found {_shown(row)}, expected an object; write one JSON object a line")
    return row


def _only_field(row: dict[str, Any], where: str) -> str:
    present = [name for name in FIELDS if row.get(name) is not None]
    if len(present) > 1:
        raise SpecdoctorError(f"{where}: found {' and '.join(present)}, expected only one of them; remove the others")
    if not present:
        hint = next((hint for key in row if (hint := did_you_mean(key, FIELDS))), "")
        found = _shown(", ".join(row)) if row else "no fields"
        raise SpecdoctorError(f"{where}: found {found}, expected one of {', '.join(FIELDS)}{hint}; rename the field")
    return present[0]


def _parse_id(value: Any, number: int, where: str) -> str:
    if value is None:
        return str(number)
    return str(value) if type(value) is int else _filled_text(value, where, "id")


def _parse_messages(entries: list[Any], where: str) -> list[Message]:
    messages: list[Message] = []
    for index, entry in enumerate(entries):
        key = f"messages[{index}]"
        if not isinstance(entry, dict) or not {"role", "content"} <= entry.keys():
            raise SpecdoctorError(f"{where}: {key} is {_shown(entry)}, expected role and content; add what is missing")
        # An empty system message is how one switches off a template's default; only the last one must say something.
        read_content = _filled_text if index == len(entries) - 1 else _text
        role = _filled_text(entry["role"], where, f"{key}.role")
        messages.append({"role": role, "content": read_content(entry["content"], where, f"{key}.content")})
    if messages[-1]["role"] == "assistant":
        raise SpecdoctorError(
            f"{where}: messages ends with role 'assistant', expected 'user'; remove the answer, the target writes it"
        )
    return messages


def _parse_ids(entries: list[Any], where: str) -> list[int]:
    for index, entry in enumerate(entries):
        if type(entry) is not int or entry < 0:  # bool is an int to isinstance
            raise SpecdoctorError(
                f"{where}: prompt_ids[{index}] is {_shown(entry)}, expected a whole number, 0 or more; write token ids"
            )
    return entries


def _filled_list(value: Any, where: str, key: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise SpecdoctorError(f"{where}: {key} is {_shown(value)}, expected a list with entries; fill or remove it")
    return value


def _filled_text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SpecdoctorError(f"{where}: {key} is {_shown(value)}, expected text, not empty; fill or remove it")
    return _text(value, where, key)


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise SpecdoctorError(f"{where}: {key} is {_shown(value)}, expected text; write a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # an escape such as \ud83d without its second half
        raise SpecdoctorError(
            f"{where}: {key} has half a surrogate pair at character {error.start}, expected Unicode text; "
            "write the character itself"
        ) from None
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
