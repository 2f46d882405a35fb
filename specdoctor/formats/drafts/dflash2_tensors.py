"""Canonical names and shapes of what DFlash2 adds to a block drafter (formats page 1.6)."""

from specdoctor.formats.spec import BlockSpec

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def dflash2_shapes(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    """The convolutions of every layer and the candidate selector, whose codebooks have no suffix `.weight`."""
    H, k = spec.hidden_size, spec.conv_kernel_size
    shapes: dict[str, tuple[int, ...]] = {}
    if k:
        for i in range(len(spec.layers)):
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{name}.base_kernel"] = (2, k, H)
                shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * k * (H // spec.conv_group_size), H)
    if spec.selector_rank:
        shapes |= dict.fromkeys(CODEBOOKS, (spec.vocab_size, spec.selector_rank))
        shapes["candidate_selector.hidden_projection.weight"] = (spec.selector_rank, H)
    return shapes
