"""Prompts in, token ids out: the bundled sets, a user's JSONL, and the target's own template.

Contract: `load_bundled` and `load_jsonl` (format: `specdoctor.measure.prompt_file`) read `RawPrompt`s and touch no
model; `render` turns them into `Prompt`s, the ids that an engine decodes, by the rule that `template_record` reports.
Of a prompt with `turns` only the first turn is decoded. What cannot be used is refused with one line that names file
and line; nothing is dropped or repaired in silence.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.measure.prompt_file import RawPrompt, did_you_mean, parse_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLED_CATEGORIES = ("code", "chat", "math", "summarize")
TEMPLATES = ("auto", "none", "bytes")
# A folder with a model configuration alone still loads as an empty tokenizer of that model's class, so look first.
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
# Passed to a chat template that mentions the name: drafters are trained on answers without thinking, and a template
# that writes today's date would make the same prompt another one tomorrow.
TEMPLATE_OPTIONS: dict[str, Any] = {"enable_thinking": False, "date_string": "26 Jul 2024"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine decodes. `text_hash` identifies the rendered text (or the raw ids) without revealing it."""

    id: str
    category: str
    ids: list[int]
    text_hash: str  # first 16 hex digits of SHA-256
    source: str = ""


@dataclass(frozen=True, slots=True)
class TemplateRecord:
    """How text becomes ids; belongs into every result, since another template means another workload."""

    kind: str  # chat | plain | bytes | ids (no tokenizer: raw ids only)
    name: str | None = None  # name of the chat template among the tokenizer's
    sha256: str | None = None  # of the chat template's text
    options: dict[str, Any] = field(default_factory=dict)  # variables passed to it


def load_bundled(categories: Sequence[str] | None = None, limit: int | None = None) -> list[RawPrompt]:
    """The prompts that ship with specdoctor, the categories (default: all) taken in turn, `limit` of them at most.

    Raises:
        SpecdoctorError: unknown category, or a limit below 1.
    """
    prompts: list[RawPrompt] = []
    for category in dict.fromkeys(BUNDLED_CATEGORIES if categories is None else categories):
        if category not in BUNDLED_CATEGORIES:
            raise SpecdoctorError(
                f"no bundled prompts for category {category!r}, expected one of {', '.join(BUNDLED_CATEGORIES)}"
                f"{did_you_mean(category, BUNDLED_CATEGORIES)}; give a JSONL file for prompts of your own"
            )
        data = (files("specdoctor.data") / "prompts" / f"{category}.jsonl").read_bytes()
        prompts += parse_jsonl(data, f"{category}.jsonl")
    if not prompts:
        raise SpecdoctorError("no prompt category given; name at least one", ExitCode.NOTHING)
    return interleave(prompts, limit)


def load_jsonl(path: Path | str) -> list[RawPrompt]:
    """Read prompts from a JSONL file (format: `specdoctor.measure.prompt_file`), in file order.

    Raises:
        SpecdoctorError: unreadable file, bad line, duplicate id; exit code NOTHING if the file holds no prompt.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SpecdoctorError(f"{path}: {error.strerror}; give a JSONL file, one prompt a line") from None
    return parse_jsonl(data, str(path))


def interleave(prompts: Iterable[RawPrompt], limit: int | None = None) -> list[RawPrompt]:
    """Take the categories in turn, so that the first `limit` prompts are as balanced as the set allows."""
    if limit is not None and limit < 1:
        raise SpecdoctorError(f"prompt limit is {limit}, expected at least 1; leave it out to take all prompts")
    by_category: dict[str, list[RawPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    ranked = [(rank, group, p) for group, ps in enumerate(by_category.values()) for rank, p in enumerate(ps)]
    return [prompt for _, _, prompt in sorted(ranked, key=lambda entry: entry[:2])][:limit]


def load_tokenizer(folder: Path | str) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a local model folder, or None if the folder has no tokenizer files. Never runs remote code.

    Raises:
        SpecdoctorError: no such folder, or its tokenizer files do not make a tokenizer.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SpecdoctorError(f"{folder}: not a folder; give the folder of the target model")
    if not any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        return None
    from transformers import AutoTokenizer

    advice = "copy all tokenizer files of the target model into the folder"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the many tokenizer classes raise
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise SpecdoctorError(
            f"{folder}: cannot load the tokenizer: {type(error).__name__}: {reason}; {advice}"
        ) from None
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise SpecdoctorError(
            f"{folder}: the tokenizer has no vocabulary beyond {len(tokenizer)} special tokens; {advice}"
        )
    return tokenizer


def template_record(tokenizer: "PreTrainedTokenizerBase | None", template: str = "auto") -> TemplateRecord:
    """Decide how text becomes ids: `auto` = the target's chat template if it has one, else plain text; `none` = plain
    text; `bytes` = UTF-8 bytes, for a byte-level target (vocabulary 256) without tokenizer.

    Raises:
        SpecdoctorError: unknown `template`, `bytes` beside a tokenizer, or several chat templates without a default.
    """
    if template not in TEMPLATES:
        raise SpecdoctorError(
            f"template is {template!r}, expected one of {', '.join(TEMPLATES)}{did_you_mean(template, TEMPLATES)}"
        )
    if template == "bytes":
        if tokenizer is not None:
            raise SpecdoctorError("template is 'bytes', but the target has a tokenizer; use 'auto' or 'none'")
        return TemplateRecord("bytes")
    if tokenizer is None:
        return TemplateRecord("ids")
    templates = getattr(tokenizer, "chat_template", None)
    if template == "none" or not templates:
        return TemplateRecord("plain")
    if isinstance(templates, str):
        templates = {"default": templates}
    if "default" not in templates:
        raise SpecdoctorError(
            f"the target's tokenizer has the chat templates {', '.join(sorted(templates))}, expected one called "
            "'default'; rename one of them or use template 'none'"
        )
    text: str = templates["default"]
    options = {name: value for name, value in TEMPLATE_OPTIONS.items() if name in text}
    return TemplateRecord("chat", "default", hashlib.sha256(text.encode()).hexdigest(), options)


def render(
    raw_prompts: Iterable[RawPrompt], tokenizer: "PreTrainedTokenizerBase | None", template: str = "auto"
) -> list[Prompt]:
    """Turn raw prompts into ids by the rule of `template_record`; `prompt_ids` pass through untouched.

    With a chat template, `prompt` and the first of `turns` are a user message, and the text ends where the answer
    begins. As plain text, the contents of messages are joined by blank lines, and the tokenizer adds the
    special tokens that it adds to any text.

    Raises:
        SpecdoctorError: text without a tokenizer, a template that refuses the messages, a prompt of no tokens.
    """
    record = template_record(tokenizer, template)
    return [_render_one(raw, tokenizer, record) for raw in raw_prompts]


def check_ids(prompts: Iterable[Prompt], vocab_size: int) -> None:
    """Refuse ids outside `[0, vocab_size)`: they would read beyond the embedding.

    Raises:
        SpecdoctorError: names the first such prompt, position and id.
    """
    for prompt in prompts:
        for position, token in enumerate(prompt.ids):
            if not 0 <= token < vocab_size:
                raise SpecdoctorError(
                    f"{prompt.source or prompt.id}: token {position} of prompt {prompt.id!r} has id {token}, expected "
                    f"0 to {vocab_size - 1} (vocab_size of the target is {vocab_size}); use ids of this target, or put "
                    "its own tokenizer into its folder"
                )


def _render_one(raw: RawPrompt, tokenizer: Any, record: TemplateRecord) -> Prompt:
    if raw.prompt_ids:
        text = ",".join(map(str, raw.prompt_ids))
        ids = list(raw.prompt_ids)
    elif record.kind == "ids":
        raise SpecdoctorError(
            f"{raw.source}: prompt {raw.id!r} is text, but the target has no tokenizer files, expected prompt_ids; add "
            "the tokenizer to the target's folder, or use template 'bytes' for a byte-level target"
        )
    elif record.kind == "chat":
        text = _apply_chat_template(raw, tokenizer, record)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
    else:
        text = "\n\n".join(message["content"] for message in raw.messages if message["content"])
        ids = list(text.encode()) if record.kind == "bytes" else tokenizer.encode(text)
    if not ids:
        raise SpecdoctorError(f"{raw.source}: prompt {raw.id!r} gives no token, expected at least one; change its text")
    return Prompt(raw.id, raw.category, ids, hashlib.sha256(text.encode()).hexdigest()[:16], raw.source)


def _apply_chat_template(raw: RawPrompt, tokenizer: Any, record: TemplateRecord) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(raw.messages), tokenize=False, add_generation_prompt=True, **record.options
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in raw.messages)
        raise SpecdoctorError(
            f"{raw.source}: the target's chat template refuses prompt {raw.id!r} with the roles {roles}: {error}; "
            "change messages, or use template 'none'"
        ) from None
