"""Reader of speculators' dflash2 (formats page 1.7.3): its dflash with the convolutions and the selector of 1.6."""

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Reading, TensorSource
from specdoctor.formats.drafts.dflash2_fields import dflash2_tensors, read_dflash2_settings
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.drafts.speculators_block import read_row_offset, read_speculators_common, speculators_reading
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec

DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def read_speculators_dflash2(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """Row k predicts anchor + k unless `sample_from_anchor`; sliding layers are bidirectional in the block by default.

    Raises for a reduced draft vocabulary: the codebooks are indexed by target ids, and speculators has no such model.
    """
    fields = Fields(config, "speculators dflash2")
    remarks = read_speculators_common(fields, config, tensors, target_layers, causal_default=False)
    read_row_offset(fields, config, config.get("sample_from_anchor", bool, False))
    rows, vocab = fields.values["draft_vocab_size"], fields.values["vocab_size"]
    if rows is not None:
        raise SpecdoctorError(
            f"{config.path}: key draft_vocab_size is {rows}, expected the whole vocabulary, {vocab}: a DFlash2 drafter "
            "with a reduced one is not defined"
        )
    read_dflash2_settings(fields, config, str, DEFAULTS)
    fields.put("algorithm", "dflash2", "speculators_model_type")
    spec = fields.build(BlockSpec)
    stored, named = dflash2_tensors(spec, tensors)
    reading = speculators_reading(spec, tensors, [*remarks, *named])
    reading.tensors |= stored
    return reading
