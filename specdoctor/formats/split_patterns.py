"""Pre-tokenizers that a GGUF file or a slow tokenizer class names instead of spelling out.

Only names whose output was compared with the model's own tokenizer.json are here; for any other name the caller must
say that the pre-tokenizer is unknown rather than guess.
"""

from typing import Any

from specdoctor.formats.tokenizer_json import BYTE_LEVEL, byte_level_pre_tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERN_OF = {
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "gpt-4o": GPT_4O,
    "o200k": GPT_4O,
}
# Names whose tokenizers take a whole word that is a token as it is, whatever the merges say.
WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})
_DIGITS_APART = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
_CLASS_PATTERNS = {"Qwen2Tokenizer": QWEN2}


def pre_tokenizer_of(name: str | None) -> dict[str, Any] | None:
    """Pre-tokenizer for a `tokenizer.ggml.pre` name, or None when it is not known here."""
    if name in ("gpt-2", "gpt2"):
        return BYTE_LEVEL
    if name in ("smollm", "starcoder"):
        return _DIGITS_APART
    pattern = _PATTERN_OF.get(name or "")
    return None if pattern is None else byte_level_pre_tokenizer(pattern)


def pattern_of_class(tokenizer_class: str | None) -> str | None:
    """Split expression of a slow byte-level tokenizer class; None means GPT-2's own."""
    return _CLASS_PATTERNS.get((tokenizer_class or "").removesuffix("Fast"))
