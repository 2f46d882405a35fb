"""What every writer of DFlash2 has: the convolutions and the candidate selector (formats page 1.6)."""

from collections.abc import Callable

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Remark, Stored, TensorSource, same_names
from specdoctor.formats.drafts.dflash2_tensors import CODEBOOKS
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec

SETTINGS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def read_dflash2_settings(
    fields: Fields, config: JsonConfig, key_of: Callable[[str], str], defaults: dict[str, int] | None = None
) -> None:
    """The four settings, under the writer's keys; without `defaults` each key must be there.

    Raises for groups that do not divide the hidden size and for more candidates than the vocabulary has. `fields` must
    hold both sizes.
    """
    for name in SETTINGS:
        key = key_of(name)
        value = config.positive(key) if defaults is None else config.positive(key, defaults[name])
        fields.key(name, value, key)
    hidden, vocab = fields.values["hidden_size"], fields.values["vocab_size"]
    group, top_k = fields.values["conv_group_size"], fields.values["selector_top_k"]
    if hidden % group:
        raise SpecdoctorError(
            f"{config.path}: key {key_of('conv_group_size')} is {group}, expected a divisor of hidden_size, {hidden}"
        )
    if top_k > vocab:
        raise SpecdoctorError(
            f"{config.path}: key {key_of('selector_top_k')} is {top_k}, expected at most vocab_size, {vocab}"
        )


def dflash2_tensors(spec: BlockSpec, tensors: TensorSource) -> tuple[dict[str, Stored], list[Remark]]:
    """Where each canonical tensor is stored: the codebooks by their bare names, or, as a remark, with `.weight`."""
    stored, remarks = same_names(block_tensor_shapes(spec)), []
    for name in CODEBOOKS:
        suffixed = f"{name}.weight"
        if name not in tensors and suffixed in tensors:
            stored[name] = Stored(suffixed, stored[name].shape)
            remarks.append(
                Remark(
                    "unverified",
                    f"{tensors.file_of(suffixed)}",
                    f"tensor {suffixed} is read as {name}, the name that z-lab and speculators store it under",
                    "rename it for engines that drop what they do not know",
                    subject=suffixed,
                )
            )
    return stored, remarks
