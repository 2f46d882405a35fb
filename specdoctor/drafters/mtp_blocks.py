"""The decoder blocks of MTP layers: transformers' own layers, run over the drafter's packed rows and cache.

Contract: a block is the layer class of the family that the checkpoint's config names, built from that config, so its
attention, experts and rotary embedding are the ones the target's own layers have. Attention goes through the function
that `engine.target` registers. Nothing of a checkpoint is executed: its `auto_map` is dropped.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.target import ATTENTION_NAME, AttentionRun
from specdoctor.errors import SpecdoctorError

BUILT_AS = {"mimo": "qwen2"}  # families whose block is another one's, and which transformers does not know
NOT_OF_A_BLOCK = ("auto_map", "quantization_config", "architectures")


class DecoderBlocks(nn.Module):
    """`count` full-attention decoder layers of one family, and the rotary embedding that they share."""

    def __init__(self, settings: Mapping[str, Any], count: int, sparse: bool) -> None:
        """`settings` is the text part of a config.json; `sparse` makes the MLPs mixtures of experts.

        Build it on the meta device; `place` then gives the rotary embedding its values. Raises `SpecdoctorError` for a
        family that transformers does not know.
        """
        super().__init__()
        self.config = _config(settings, count, sparse)
        model = AutoModel.from_config(self.config, attn_implementation=ATTENTION_NAME)
        self.layers: nn.ModuleList = model.layers
        self.rotary: nn.Module = model.rotary_emb

    def place(self, device: torch.device) -> None:
        """Make the rotary embedding's values, which no checkpoint holds."""
        self.rotary = type(self.rotary)(self.config).to(device)

    def run(self, index: int, x: Tensor, rows: PackedRows, cache: KVCache, attention: Any) -> Tensor:
        """States [N, H] of `rows` through layer `index`, to [N, H]; its keys and values go to the cache's layer."""
        run = AttentionRun(rows, cache, [None] * len(self.layers), attention)
        states, positions = x.unsqueeze(0), rows.positions.unsqueeze(0)
        output = self.layers[index](
            states,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary(states, positions),
            specdoctor_run=run,
        )
        if index not in run.layers_seen:
            raise SpecdoctorError(
                f"{type(self.layers[index]).__name__} does not call transformers' attention interface, so it cannot "
                "be an MTP layer here"
            )
        return (output[0] if isinstance(output, tuple) else output)[0]


def _config(settings: Mapping[str, Any], count: int, sparse: bool) -> Any:
    """The family's own config, cut down to `count` layers of full attention."""
    values = {key: copy.deepcopy(value) for key, value in settings.items() if key not in NOT_OF_A_BLOCK}
    kind = values.pop("model_type")
    values |= {"num_hidden_layers": count, "layer_types": ["full_attention"] * count, "use_sliding_window": False}
    try:
        config = AutoConfig.for_model(BUILT_AS.get(kind, kind), **values)
    except Exception as error:  # whatever the many config classes raise for odd values
        raise SpecdoctorError(f"transformers makes no config of model_type {kind!r}: {error}") from None
    for key, value in {
        "first_k_dense_replace": 0 if sparse else count,
        "mlp_only_layers": [] if sparse else list(range(count)),
        "decoder_sparse_step": 1,
        "mlp_layer_types": ["sparse" if sparse else "dense"] * count,
    }.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return config
