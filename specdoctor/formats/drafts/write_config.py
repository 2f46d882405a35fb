"""What the config.json writers share: the keys of the decoder layers, and a folder of config.json and safetensors."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.formats.spec import DraftSpec

if TYPE_CHECKING:
    from torch import Tensor


def layer_keys(spec: DraftSpec, model_type: str = "qwen3") -> dict[str, Any]:
    """Keys of a transformers config that describe the decoder layers of `spec`; all layers have one shape."""
    first = spec.layers[0]
    windows = {layer.window for layer in spec.layers if layer.window}
    rope = {key: value for key, value in spec.rope.items() if key != "max_position_embeddings"}
    keys: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": first.heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "intermediate_size": first.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "attention_bias": first.bias,
        "attention_dropout": 0.0,
        "layer_types": ["sliding_attention" if layer.window else "full_attention" for layer in spec.layers],
        "sliding_window": min(windows, default=None),
        "use_sliding_window": bool(windows),
        "max_window_layers": len(spec.layers),
        "rope_parameters": rope,
        "rope_theta": spec.rope["rope_theta"],  # for engines that know only the older key
        "tie_word_embeddings": False,
    }
    if (longest := spec.rope.get("max_position_embeddings")) is not None:
        keys["max_position_embeddings"] = longest
    return keys


def write_folder(folder: Path, config: dict[str, Any], tensors: "dict[str, Tensor]") -> None:
    """Make `folder` with config.json and model.safetensors. Raises OSError or SafetensorError when it cannot."""
    from safetensors.torch import save_file

    folder.mkdir()
    kinds = Counter(str(value.dtype).removeprefix("torch.") for value in tensors.values() if value.is_floating_point())
    config = {**config, "dtype": kinds.most_common(1)[0][0]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    weights = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, weights, metadata={"format": "pt"})
    weights.chmod((folder / "config.json").stat().st_mode)  # safetensors makes it for its owner only
