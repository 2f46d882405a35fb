"""Which public format a draft checkpoint is in, decided by config keys and tensor names (formats page, section 0)."""

from dataclasses import dataclass

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.tensors import TensorFolder

DEEPSPEC_BLOCK = "deepspec"
ZLAB_DFLASH = "zlab"

DEEPSPEC_CLASSES = {
    "Qwen3DSparkModel": (DEEPSPEC_BLOCK, "DeepSpec DSpark or DFlash, Qwen3 backbone"),
    "Gemma4DSparkModel": ("deepspec-gemma4", "DeepSpec DSpark or DFlash, Gemma4 backbone"),
    "Qwen3Eagle3Model": ("deepspec-eagle3", "DeepSpec EAGLE-3, Qwen3 backbone"),
    "Gemma4Eagle3Model": ("deepspec-eagle3", "DeepSpec EAGLE-3, Gemma4 backbone"),
    "Eagle3DraftModel": ("deepspec-eagle3", "DeepSpec EAGLE-3"),
}


@dataclass(frozen=True)
class Detected:
    family: str
    title: str
    evidence: str  # the marker that decided


def detect(config: JsonConfig, tensors: TensorFolder) -> Detected:
    """Name the format; raises when nothing matches. Families that no reader exists for yet are named all the same."""
    architectures = config.get("architectures", list, [])
    first = str(architectures[0]) if architectures else ""
    names = tensors.names()
    if config.has("speculators_model_type"):
        kind = config.get("speculators_model_type", str)
        return Detected("speculators", f"speculators {kind}", f"speculators_model_type {kind}")
    if first in DEEPSPEC_CLASSES:
        family, title = DEEPSPEC_CLASSES[first]
        return Detected(family, title, f"architectures {first}")
    projector = config.get("dflash_config.projector_type", str, "")
    if projector in ("dspark", "domino"):
        return Detected("specforge", f"SpecForge {projector}", f"dflash_config.projector_type {projector}")
    if first == "DFlash2DraftModel":
        return Detected("zlab-dflash2", "z-lab DFlash2", f"architectures {first}")
    if first == "DFlashDraftModel":
        return Detected(ZLAB_DFLASH, "z-lab DFlash", f"architectures {first}")
    if (
        first.endswith("Eagle3")
        or config.has("draft_vocab_size")
        or any(n == "d2t" or n.startswith("midlayer.") for n in names)
    ):
        return Detected("eagle3", "EAGLE-3", f"architectures {first or 'absent'}, d2t or midlayer tensors")
    if config.has("medusa_num_heads"):
        return Detected("medusa", "Medusa", "medusa_num_heads")
    if (
        config.has("num_nextn_predict_layers")
        or config.has("mtp_num_hidden_layers")
        or any(n.startswith("mtp.") for n in names)
    ):
        return Detected("mtp", "native MTP layers", "num_nextn_predict_layers, mtp_num_hidden_layers or mtp.* tensors")
    if config.has("dspark_block_size"):
        return Detected("deepseek-v4-dspark", "DeepSeek-V4 DSpark inside the target", "dspark_block_size")
    if "fc.weight" in tensors and "lm_head.weight" not in tensors and "norm.weight" not in tensors:
        return Detected("eagle", "EAGLE-1 or EAGLE-2", "fc.weight without lm_head and norm")
    if first.endswith("ForCausalLM"):
        return Detected("causal-lm", f"a plain causal LM ({first})", f"architectures {first}")
    raise SpecdoctorError(
        f"{config.path}: architectures is {first or 'absent'}, and no other marker of a draft checkpoint was found; "
        f"expected one of {', '.join(DEEPSPEC_CLASSES)}, DFlashDraftModel or another public draft format"
    )
