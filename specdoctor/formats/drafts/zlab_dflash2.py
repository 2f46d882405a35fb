"""Reader of z-lab DFlash2 checkpoints (formats page 1.6)."""

from specdoctor.formats.drafts.checkpoint import Reading, TensorSource
from specdoctor.formats.drafts.dflash2_fields import dflash2_tensors, read_dflash2_settings
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.drafts.zlab import read_zlab_common
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec


def read_zlab_dflash2(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """z-lab DFlash2: DFlash with convolutions and a candidate selector, its settings in `dflash_config`."""
    fields = Fields(config, "z-lab DFlash2")
    remarks = read_zlab_common(fields, config, tensors, target_layers)
    fields.put("family", "zlab", "architectures")
    fields.put("algorithm", "dflash2", "architectures")

    def key_of(name: str) -> str:  # z-lab looks into dflash_config first, then at the top
        nested = f"dflash_config.{name}"
        return nested if config.has(nested) or not config.has(name) else name

    read_dflash2_settings(fields, config, key_of)
    spec = fields.build(BlockSpec)
    stored, named = dflash2_tensors(spec, tensors)
    return Reading(spec, stored, remarks=[*remarks, *named])
