"""One side of a target and drafter pair: whatever the user points at, as vocabulary, special ids, template and facts.

Accepted: a Hugging Face folder, a GGUF file, a tokenizer.json, a tekken.json, a tiktoken rank file, a SentencePiece
model. No weights are read. Raises SpecdoctorError with one line on anything missing, empty or broken.
"""

import filecmp
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.gguf_header import MAGIC, GgufHeader
from specdoctor.formats.gguf_vocab import gguf_roles, read_gguf_vocabulary
from specdoctor.formats.json_file import load_json
from specdoctor.formats.merges_text import load_tokenizer_json
from specdoctor.formats.model_facts import ModelFacts, facts_of_folder, facts_of_gguf
from specdoctor.formats.sentencepiece_model import read_sentencepiece, sentencepiece_roles
from specdoctor.formats.sources import HUB_ID, is_known, resolve_model
from specdoctor.formats.split_patterns import pattern_of_class
from specdoctor.formats.tiktoken_ranks import looks_like_ranks, read_tekken, read_tiktoken
from specdoctor.formats.tokenizer_json import added_token, read_vocab_and_merges, vocabulary_from_data
from specdoctor.formats.vocabulary import HIGHEST_ID, Vocabulary, copy_of, show

ROLES = ("bos", "eos", "pad", "unk", "mask")
_ACCEPTED = "a model folder, a GGUF file, a tokenizer.json, a tekken.json, a tiktoken or a SentencePiece file"


@dataclass(frozen=True)
class SpecialRole:
    """A token that the tokenizer's files give a role; `id` is None when the vocabulary has no such token."""

    id: int | None
    text: str | None
    file: str
    key: str


@dataclass
class TokenizerSide:
    """All that one side's files say about tokens."""

    path: Path
    vocabulary: Vocabulary | None
    facts: ModelFacts = field(default_factory=ModelFacts)
    roles: dict[str, SpecialRole] = field(default_factory=dict)
    chat_template: str | None = None
    template_file: str | None = None
    parsed: tuple[Path, Vocabulary] | None = None  # a folder's tokenizer file as it was read, before its settings

    def role_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... for a chat template."""
        return {f"{role}_token": found.text for role, found in self.roles.items() if found.text is not None}

    def eos_ids(self) -> set[int]:
        """Every id that ends a text: the tokenizer's and those of the configuration files."""
        declared = {entry.value for entry in self.facts.special_ids.get("eos", [])}
        own = self.roles.get("eos")
        return declared | ({own.id} if own and own.id is not None else set())


def read_side(path: Path, like: TokenizerSide | None = None) -> TokenizerSide:
    """Read one side. Raises SpecdoctorError when nothing there can be read as a tokenizer or as a model.

    `like`: the other side, whose parsed tokenizer.json serves for both when the files are equal byte for byte.
    """
    if path.is_dir():
        return _read_folder(path, like)
    if path.is_file():
        return _read_file(path)
    if is_known(str(path)):
        return _read_folder(resolve_model(str(path)))
    hint = f". For a model of the hub: specdoctor fetch {path}" if HUB_ID.fullmatch(str(path)) else ""
    raise SpecdoctorError(f"{path}: no such file or folder; expected {_ACCEPTED}{hint}")


def _read_file(path: Path) -> TokenizerSide:
    with path.open("rb") as file:
        head = file.read(4096)
    if not head:
        raise SpecdoctorError(f"{path}: the file is empty (0 bytes); expected {_ACCEPTED}. Download it again.")
    if head.startswith(MAGIC):
        return _read_gguf(path)
    if head.lstrip()[:1] in (b"{", b"["):
        return TokenizerSide(path, _read_json_tokenizer(path))
    if looks_like_ranks(head):
        return TokenizerSide(path, read_tiktoken(path))
    side = TokenizerSide(path, read_sentencepiece(path))
    assert side.vocabulary is not None
    side.roles = _roles_from_ids(side.vocabulary, sentencepiece_roles(path), path.name)
    return side


def _read_json_tokenizer(path: Path) -> Vocabulary:
    data = load_tokenizer_json(path)
    if isinstance(data, dict) and "vocab" in data and "config" in data:
        return read_tekken(data, path)
    if isinstance(data, dict) and "model" not in data and data and all(isinstance(i, int) for i in data.values()):
        return read_vocab_and_merges(path, None, None)
    return vocabulary_from_data(data, path, "tokenizer.json")


def _read_gguf(path: Path) -> TokenizerSide:
    header = GgufHeader(path)
    vocabulary = read_gguf_vocabulary(header)
    side = TokenizerSide(path, vocabulary, facts_of_gguf(header))
    template = header.get("tokenizer.chat_template")
    if isinstance(template, str):
        side.chat_template, side.template_file = template, path.name
    if vocabulary is not None:
        side.roles = _roles_from_ids(vocabulary, gguf_roles(header), path.name, "tokenizer.ggml.{}_token_id")
    elif side.facts.is_empty:
        raise SpecdoctorError(f"{path}: holds neither a vocabulary (tokenizer.ggml.tokens) nor an embedding tensor.")
    return side


def _read_folder(folder: Path, like: TokenizerSide | None = None) -> TokenizerSide:
    facts = facts_of_folder(folder)
    vocabulary, tokenizer_path = _folder_vocabulary(folder, like)
    if vocabulary is None and not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _read_gguf(ggufs[0])
        many = (
            f"{len(ggufs)} GGUF files, name one of them" if ggufs else "no tokenizer.json, tokenizer.model, *.tiktoken"
        )
        raise SpecdoctorError(f"{folder}: no tokenizer files and no config.json ({many}); expected {_ACCEPTED}.")
    side = TokenizerSide(folder, vocabulary, facts)
    settings = _settings(folder)
    if vocabulary is not None and tokenizer_path is not None:
        side.parsed = tokenizer_path, copy_of(vocabulary)
        _add_declared_tokens(vocabulary, settings)
        side.roles = _roles_from_settings(folder, vocabulary, settings)
        if vocabulary.kind == "sentencepiece" and not side.roles:
            side.roles = _roles_from_ids(vocabulary, sentencepiece_roles(tokenizer_path), tokenizer_path.name)
    side.chat_template, side.template_file = _chat_template(folder, settings)
    return side


def _folder_vocabulary(folder: Path, like: TokenizerSide | None) -> tuple[Vocabulary | None, Path | None]:
    for name in ("tokenizer.json", "tekken.json"):
        if (path := folder / name).is_file():
            return _shared(path, like) or _read_json_tokenizer(path), path
    for pattern in ("tokenizer.model", "*.tiktoken", "spiece.model", "sentencepiece.bpe.model"):
        if found := sorted(folder.glob(pattern)):
            return _read_file(found[0]).vocabulary, found[0]
    if (path := folder / "vocab.json").is_file():
        added = folder / "added_tokens.json"
        split = pattern_of_class(_settings(folder).get("tokenizer_class"))
        return read_vocab_and_merges(path, added if added.is_file() else None, split), path
    return None, None


def _shared(path: Path, like: TokenizerSide | None) -> Vocabulary | None:
    """The other side's vocabulary, as it was read, if it came from a file of the same bytes."""
    if like is None or like.parsed is None or not filecmp.cmp(path, like.parsed[0], shallow=False):
        return None
    return copy_of(like.parsed[1])


def _settings(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    values = load_json(path)
    if not isinstance(values, dict):
        raise SpecdoctorError(f"{path}: holds a {type(values).__name__}, expected a JSON object.")
    return values


def _add_declared_tokens(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows; a disagreement with the tokenizer file is kept as a conflict."""
    for key, entry in (settings.get("added_tokens_decoder") or {}).items():
        if not str(key).isdigit() or not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            continue
        token = added_token(int(key), entry)
        if token.id > HIGHEST_ID:
            raise SpecdoctorError(f"tokenizer_config.json: token id {token.id}, expected 0 to {HIGHEST_ID:,}.")
        if token.id >= len(vocabulary.tokens):
            vocabulary.tokens += [None] * (token.id + 1 - len(vocabulary.tokens))
        known = vocabulary.tokens[token.id]
        if known is None:
            vocabulary.tokens[token.id] = token.text.encode()
            vocabulary.added[token.id] = token
        elif known not in (token.text.encode(), token.text.replace("\u2581", " ").encode()):
            vocabulary.conflicts.append(
                f"id {token.id} is {show(known)!r} in {vocabulary.file} and {token.text!r} in tokenizer_config.json"
            )
    vocabulary.lists_added = vocabulary.lists_added or bool(settings.get("added_tokens_decoder"))


def _roles_from_settings(folder: Path, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> dict[str, SpecialRole]:
    roles: dict[str, SpecialRole] = {}
    added = {token.text: token.id for token in vocabulary.added.values()}
    special_map = folder / "special_tokens_map.json"
    sources = [("tokenizer_config.json", settings)]
    if special_map.is_file() and isinstance(values := load_json(special_map), dict):
        sources.append((special_map.name, values))
    for file, values in sources:
        for role in ROLES:
            text = values.get(f"{role}_token")
            text = text.get("content") if isinstance(text, Mapping) else text
            if isinstance(text, str) and role not in roles:
                # Nearly always an added token: the table of all tokens need not be built for it.
                token_id = added[text] if text in added else vocabulary.id_of.get(text.encode())
                roles[role] = SpecialRole(token_id, text, file, f"{role}_token")
    return roles


def _roles_from_ids(
    vocabulary: Vocabulary, ids: Mapping[str, int], file: str, key: str = "{}_id"
) -> dict[str, SpecialRole]:
    return {
        role: SpecialRole(token_id, vocabulary.text_of(token_id), file, key.format(role))
        for role, token_id in ids.items()
    }


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8"), path.name
    path = folder / "chat_template.json"
    holder = load_json(path) if path.is_file() else settings
    template = holder.get("chat_template") if isinstance(holder, Mapping) else None
    if isinstance(template, list):  # named templates: [{"name": "default", "template": ...}, ...]
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default") or next(iter(named.values()), None)
    if not isinstance(template, str):
        return None, None
    return template, path.name if path.is_file() else "tokenizer_config.json"
