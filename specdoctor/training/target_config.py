"""What the data tools need of a target before (or without) loading it: sizes, positions, stop tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.json_file import load_json
from specdoctor.formats.target_shape import target_shape

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class TargetConfig:
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int
    stop_ids: frozenset[int]  # of the generation config and the model config, as the engine stops at
    dtype: str  # that its config names; "" if none

    @classmethod
    def read(cls, folder: Path) -> "TargetConfig":
        """From a model folder's JSON files. Raises `SpecdoctorError` when a size is missing."""
        shape = target_shape(JsonConfig.read(folder), folder.name)
        config = load_json(folder / "config.json")
        text = next((config[key] for key in _TEXT_PARTS if isinstance(config.get(key), dict)), config)
        generation = folder / "generation_config.json"
        said = load_json(generation) if generation.is_file() else {}
        positions = text.get("max_position_embeddings") or text.get("n_positions") or NO_LIMIT
        dtype = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or ""
        return cls(
            shape.hidden_size,
            shape.num_layers,
            shape.vocab_size,
            int(positions),
            frozenset(_ids(said.get("eos_token_id")) | _ids(text.get("eos_token_id"))),
            str(dtype),
        )


def _ids(value: Any) -> set[int]:
    return set(value) if isinstance(value, list) else set() if value is None else {value}
