"""What a model folder or GGUF file says about its vocabulary besides the tokenizer: sizes, rows, special ids.

Works from config.json, generation_config.json and tensor headers. Absent is `None` or an empty list, never a default.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.gguf_header import GgufHeader
from specdoctor.formats.json_file import load_json
from specdoctor.formats.tensor_headers import TensorPlace, folder_places, gguf_places

_NESTED = ("", "text_config", "transformer_layer_config", "llm_config", "language_config")
# Tensor names of each role; a longer name that ends in one of them counts too (a prefix such as `model.`).
_ROLE_NAMES = {
    "embedding": (
        "embed_tokens.weight",
        "wte.weight",
        "tok_embeddings.weight",
        "word_embeddings.weight",
        "token_embd.weight",
    ),
    "head": ("lm_head.weight", "output.weight", "embed_out.weight"),
    "markov_w1": ("markov_head.markov_w1.weight", "markov_w1.weight"),
    "markov_w2": ("markov_head.markov_w2.weight", "markov_w2.weight"),
    "d2t": ("d2t",),
    "t2d": ("t2d",),
    "mask_embedding": ("mask_embedding", "mask_embedding.weight"),
}
_MASK_KEYS = ("mask_token_id", "dflash_config.mask_token_id", "eagle_config.mask_token_id", "dspark_noise_token_id")
_BLOCK_SPECULATORS = ("dflash", "dflash2", "dspark", "xpress", "peagle")
_BLOCK_CLASSES = ("DSpark", "DFlash", "XPress", "PEagle")


@dataclass(frozen=True)
class Declared:
    """A value, and the file and key that declare it."""

    value: Any
    file: str
    key: str


@dataclass
class ModelFacts:
    """Sizes and ids that a model declares."""

    architecture: str | None = None
    vocab_size: Declared | None = None
    draft_vocab_size: Declared | None = None
    tensors: dict[str, TensorPlace] = field(default_factory=dict)  # role of _ROLE_NAMES -> place
    mask_ids: list[Declared] = field(default_factory=list)
    special_ids: dict[str, list[Declared]] = field(default_factory=dict)  # bos, eos, pad -> one entry an id
    drafts_blocks: bool = False  # a DFlash-like drafter, which cannot work without a mask id
    absolute_map: bool = False  # d2t holds absolute ids here (GGUF), else offsets
    unread: list[str] = field(default_factory=list)  # weight files that hold pickles

    def rows(self, role: str) -> int | None:
        """Rows of a tensor, or None when the file is not there."""
        place = self.tensors.get(role)
        return None if place is None else place.rows

    @property
    def is_empty(self) -> bool:
        return self.vocab_size is None and not self.tensors


def facts_of_folder(folder: Path) -> ModelFacts:
    """Facts from a Hugging Face folder. Raises SpecdoctorError on broken JSON, a wrong type or a cut-off file."""
    facts = ModelFacts()
    places, facts.unread = folder_places(folder)
    facts.tensors = _by_role(places)
    config = _object(folder / "config.json")
    if config is not None:
        _read_config(facts, config, folder / "config.json")
    generation = _object(folder / "generation_config.json")
    if generation is not None:
        _read_special_ids(facts, generation, folder / "generation_config.json", "")
    return facts


def facts_of_gguf(header: GgufHeader) -> ModelFacts:
    """Facts from a GGUF file."""
    facts = ModelFacts(architecture=header.architecture, absolute_map=True)
    facts.tensors = _by_role(gguf_places(header))
    name, size_key, mask_key = header.path.name, f"{header.architecture}.vocab_size", "tokenizer.ggml.mask_token_id"
    if isinstance(size := header.get(size_key), int):
        facts.vocab_size = Declared(size, name, size_key)
    for role, key in (("bos", "bos"), ("eos", "eos"), ("eos", "eot"), ("eos", "eom"), ("pad", "padding")):
        full = f"tokenizer.ggml.{key}_token_id"
        if isinstance(value := header.get(full), int):
            facts.special_ids.setdefault(role, []).append(Declared(value, name, full))
    if header.architecture.startswith("dflash"):
        facts.drafts_blocks = True
        if (value := header.get(mask_key)) is not None:
            facts.mask_ids.append(Declared(value, name, mask_key))
    return facts


def _read_config(facts: ModelFacts, config: Mapping[str, Any], path: Path) -> None:
    architectures = config.get("architectures")
    facts.architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    for parent in _NESTED:
        inner = config if not parent else config.get(parent)
        if isinstance(inner, Mapping):
            facts.vocab_size = facts.vocab_size or _size(inner, "vocab_size", path, parent)
            facts.draft_vocab_size = facts.draft_vocab_size or _size(inner, "draft_vocab_size", path, parent)
            _read_special_ids(facts, inner, path, parent)
    for key in _MASK_KEYS:
        holder, _, name = key.rpartition(".")
        inner = config.get(holder) if holder else config
        if isinstance(inner, Mapping) and inner.get(name) is not None:
            facts.mask_ids.append(Declared(inner[name], path.name, key))
    named_so = any(word in (facts.architecture or "") for word in _BLOCK_CLASSES)
    facts.drafts_blocks = named_so or config.get("speculators_model_type") in _BLOCK_SPECULATORS


def _read_special_ids(facts: ModelFacts, config: Mapping[str, Any], path: Path, parent: str) -> None:
    for role in ("bos", "eos", "pad"):
        key = f"{role}_token_id"
        value = config.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in values:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise SpecdoctorError(
                    f"{path}: key {_dotted(parent, key)} is {value!r}, expected an id or a list of ids."
                )
            facts.special_ids.setdefault(role, []).append(Declared(token_id, path.name, _dotted(parent, key)))


def _size(config: Mapping[str, Any], key: str, path: Path, parent: str) -> Declared | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecdoctorError(f"{path}: key {_dotted(parent, key)} is {value!r}, expected a whole number of 1 or more.")
    return Declared(value, path.name, _dotted(parent, key))


def _dotted(parent: str, key: str) -> str:
    return f"{parent}.{key}" if parent else key


def _object(path: Path) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    values = load_json(path)
    if not isinstance(values, dict):
        raise SpecdoctorError(f"{path}: holds a {type(values).__name__}, expected a JSON object.")
    return values


def _by_role(places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    found = ((role, list(_candidates(places, names))) for role, names in _ROLE_NAMES.items())
    return {
        role: min(matches, key=lambda place: (place.name.count("."), place.name)) for role, matches in found if matches
    }


def _candidates(places: Mapping[str, TensorPlace], names: tuple[str, ...]) -> Iterator[TensorPlace]:
    for name, place in places.items():
        wanted = next((w for w in names if name == w or name.endswith(f".{w}")), None)
        # A numbered part means a layer's own tensor: MTP layers carry copies of the embedding and the head.
        if wanted and not any(part.isdigit() for part in name.removesuffix(wanted).split(".")):
            yield place
