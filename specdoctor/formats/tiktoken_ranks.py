"""Rank files: `*.tiktoken` (base64 and rank, a line each) and Mistral's tekken.json, to a canonical `Vocabulary`."""

import base64
import binascii
import re
from functools import partial
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.text_encoder import GENERIC_PATTERN, encoder_from_ranks
from specdoctor.formats.vocabulary import AddedToken, Segmentation, Vocabulary, table_of

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")
# Special tokens of tekken files that do not list their own, in id order; the rest up to the count are numbered slots.
_TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def looks_like_ranks(head: bytes) -> bool:
    """Whether the first line of a file is a base64 token and its rank."""
    return _RANK_LINE.fullmatch(head.split(b"\n", 1)[0].strip()) is not None


def read_tiktoken(path: Path) -> Vocabulary:
    """Vocabulary of a rank file. It names no added token and no pre-tokenizer. Raises SpecdoctorError on a bad line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise SpecdoctorError(
                f"{path}: line {number} is {line[:40]!r}, expected a base64 token and its rank: broken or cut off."
            ) from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise SpecdoctorError(
            f"{path}: {len(ranks):,} ranks, and {len(missing)} of the 256 single bytes have none: broken or cut off."
        )
    return Vocabulary(
        kind="tiktoken",
        file=path.name,
        family="byte-level BPE",
        tokens=table_of({rank: token for token, rank in ranks.items()}, path),
        lists_added=False,
        encoder_for=partial(encoder_from_ranks, ranks, GENERIC_PATTERN),
        encoder_is_exact=False,
    )


def read_tekken(data: dict[str, Any], path: Path) -> Vocabulary:
    """Vocabulary of a parsed tekken.json: special tokens first, then the ranks, up to `default_vocab_size`."""
    try:
        config = data["config"]
        specials = int(config["default_num_special_tokens"])
        wanted = int(config["default_vocab_size"]) - specials
        ranks = {
            base64.b64decode(entry["token_bytes"]): int(entry["rank"]) + specials for entry in data["vocab"][:wanted]
        }
        listed = data.get("special_tokens") or [
            {"rank": i, "token_str": text} for i, text in enumerate(_TEKKEN_SPECIALS)
        ]
        added = {int(e["rank"]): AddedToken(int(e["rank"]), e["token_str"], special=True) for e in listed}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise SpecdoctorError(f"{path}: not laid out as a tekken.json ({type(error).__name__}: {error}).") from None
    table = {rank: token for token, rank in ranks.items()} | {i: token.text.encode() for i, token in added.items()}
    return Vocabulary(
        kind="tekken",
        file=path.name,
        family="byte-level BPE",
        tokens=table_of(table, path),
        added=added,
        segmentation=Segmentation(
            names_normalizer=False, pre_tokenizer={"pattern": config.get("pattern")}, merges=sorted(ranks.items())
        ),
        encoder_for=partial(encoder_from_ranks, ranks, config.get("pattern") or GENERIC_PATTERN),
        encoder_is_exact=bool(config.get("pattern")),
    )
