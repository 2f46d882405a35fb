"""Readers of EAGLE-3 checkpoints into `EagleSpec` and tensors: DeepSpec (formats page 1.3).

Contract: as for block drafters, every tensor is used or refused by name.
"""

from pathlib import Path

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.block_checkpoint import read_layers, read_rope, read_taps
from specdoctor.formats.eagle_spec import EagleSpec
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.tensors import TensorFolder


def read_deepspec_eagle3(folder: Path, config: JsonConfig, tensors: TensorFolder) -> EagleSpec:
    """DeepSpec's Qwen3 EAGLE-3: full vocabulary, own embedding and head, q/k norms, `ttt_length` drafts a round."""
    hidden = config.positive("hidden_size")
    vocab = config.positive("vocab_size")
    layers = read_layers(config, sliding_is_causal=True)
    if len(layers) != 1:
        raise SpecdoctorError(f"{config.path}: key num_hidden_layers is {len(layers)}, expected 1 for DeepSpec's EAGLE-3")
    return EagleSpec(
        family="deepspec",
        hidden_size=hidden,
        target_hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        layers=layers,
        taps=read_taps(config, "target_layer_ids", lowest=0),
        draft_tokens=config.positive("ttt_length"),
        rms_norm_eps=float(config.get("rms_norm_eps", (int, float))),
        rope=read_rope(config),
        num_target_layers=config.get("num_target_layers", int, None),
        embed_source="checkpoint" if "embed_tokens.weight" in tensors else "target",
        head_source="checkpoint" if "lm_head.weight" in tensors else "target",
    )
