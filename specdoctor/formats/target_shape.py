"""A target's sizes from its config.json or GGUF header alone: no weights, no torch."""

from pathlib import Path

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.pair import TargetShape
from specdoctor.formats.gguf_header import GgufHeader
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.tensor_headers import gguf_places

_NESTED = ("text_config", "llm_config", "language_config")


def read_target_shape(path: Path) -> TargetShape:
    """Sizes of the target in a folder or GGUF file. Raises `SpecdoctorError` when a size is not there."""
    if path.is_file():
        return _of_gguf(GgufHeader(path))
    return target_shape(JsonConfig.read(path), path.name)


def target_shape(config: JsonConfig, name: str) -> TargetShape:
    """Sizes in a config.json, at the top or in the text part of a multimodal one."""
    holder = next((key for key in _NESTED if isinstance(config.find(key), dict)), None)
    text = config if holder is None or config.has("num_hidden_layers") else config.view(holder)
    rows = text.positive("vocab_size")
    return TargetShape(name, text.positive("hidden_size"), text.positive("num_hidden_layers"), rows, rows)


def _of_gguf(header: GgufHeader) -> TargetShape:
    def size(key: str) -> int:
        value = header.get(f"{header.architecture}.{key}")
        if not isinstance(value, int) or value < 1:
            raise SpecdoctorError(f"{header.path}: key {header.architecture}.{key} is {value!r}, expected 1 or more")
        return value

    embedding = gguf_places(header).get("token_embd.weight")
    if embedding is None:
        raise SpecdoctorError(f"{header.path}: tensor token_embd.weight is missing; expected a GGUF of a target model")
    return TargetShape(header.path.name, size("embedding_length"), size("block_count"), embedding.rows, embedding.rows)
