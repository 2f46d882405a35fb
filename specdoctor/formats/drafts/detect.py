"""Which public format a draft checkpoint is in, decided by config keys and tensor names (formats page, section 0).

Every marker is looked at, not only the first: a checkpoint with the markers of two families is named as such, because
whoever loads it by one of them computes something that was never trained.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Remark, TensorSource
from specdoctor.formats.drafts.early_exit import ARCHITECTURE as EARLY_EXIT
from specdoctor.formats.drafts.gguf_draft import EARLY_ARCHITECTURES, gguf_architecture
from specdoctor.formats.json_config import JsonConfig

DEEPSPEC_CLASSES = {
    "Qwen3DSparkModel": ("deepspec", "DeepSpec DSpark or DFlash, Qwen3 backbone"),
    "Gemma4DSparkModel": ("deepspec-gemma4", "DeepSpec DSpark or DFlash, Gemma4 backbone"),
    "Qwen3Eagle3Model": ("deepspec-eagle3", "DeepSpec EAGLE-3, Qwen3 backbone"),
    "Gemma4Eagle3Model": ("deepspec-gemma4-eagle3", "DeepSpec EAGLE-3, Gemma4 backbone"),
    "Eagle3DraftModel": ("deepspec-eagle3", "DeepSpec EAGLE-3"),
}
_V4_STAGES = (".markov_head.", ".confidence_head.", ".main_proj.")  # no plain MTP layer has them
SPECULATORS = ("dflash", "dflash2", "dspark", "xpress", "eagle3", "peagle", "mtp", "eagle")


@dataclass(frozen=True)
class Detected:
    family: str  # key of the reader, or of what is known by name only
    title: str
    evidence: str  # the marker that decided
    remarks: list[Remark] = field(default_factory=list)


def detect(config: JsonConfig, tensors: TensorSource) -> Detected:
    """Name the format. Raises when nothing matches; families without a reader are named all the same."""
    config = JsonConfig(config.path, config.values)  # looking for markers is not yet reading a key
    found = _by_config(config, tensors) or _by_tensors(config, tensors)
    if found is None:
        raise SpecdoctorError(
            f"{config.path}: architectures is {_architecture(config) or 'absent'}, and no other marker of a draft "
            f"checkpoint was found; expected one of {', '.join(DEEPSPEC_CLASSES)}, DFlashDraftModel or another public "
            "draft format"
        )
    return Detected(found.family, found.title, found.evidence, _contradictions(config, tensors, found))


def _architecture(config: JsonConfig) -> str:
    names = config.get("architectures", list, [])
    return str(names[0]) if names else ""


def _by_config(config: JsonConfig, tensors: TensorSource) -> Detected | None:
    first = _architecture(config)
    if (gguf := gguf_architecture(config)) is not None:
        return _by_gguf(gguf, tensors)
    if config.has("speculators_model_type"):
        kind = config.get("speculators_model_type", str)
        return Detected(f"speculators-{kind}", f"speculators {kind}", f"speculators_model_type {kind}")
    # Before the classes: NVIDIA writes DeepSpec's class name, other converters write the key as false.
    bonus = next((k for k in ("dspark_bonus_anchor", "dflash_config.dspark_bonus_anchor") if config.find(k)), None)
    if bonus:
        return Detected("nemotron-dspark", "NVIDIA Nemotron DSpark", f"key {bonus}")
    if first == "Eagle3DraftModel" and "layers.0.layer_scalar" in tensors:  # both backbones go by this name
        family, title = DEEPSPEC_CLASSES["Gemma4Eagle3Model"]
        return Detected(family, title, f"architectures {first} with tensor layers.0.layer_scalar")
    if first in DEEPSPEC_CLASSES:
        family, title = DEEPSPEC_CLASSES[first]
        return Detected(family, title, f"architectures {first}")
    if config.has("dspark_block_size"):
        return Detected("deepseek-v4-dspark", "DeepSeek-V4 DSpark inside the target", "dspark_block_size")
    projector = config.get("dflash_config.projector_type", str, "")
    if projector in ("dspark", "domino"):
        return Detected(f"specforge-{projector}", f"SpecForge {projector}", f"dflash_config.projector_type {projector}")
    if first == EARLY_EXIT:
        return Detected("early-exit", "specdoctor early-exit head", f"architectures {first}")
    if first == "DSparkDraftModel":
        return Detected("specforge-dspark", "SpecForge dspark", f"architectures {first}")
    if first == "DFlash2DraftModel":
        return Detected("zlab-dflash2", "z-lab DFlash2", f"architectures {first}")
    if first == "DFlashDraftModel":
        return Detected("zlab", "z-lab or SpecForge DFlash", f"architectures {first}")
    if first == "PEagleDraftModel":
        return Detected("specforge-peagle", "SpecForge P-EAGLE", f"architectures {first}")
    return None


def _by_gguf(arch: str, tensors: TensorSource) -> Detected:
    evidence = f"general.architecture {arch}"
    if arch == "dflash" or arch in EARLY_ARCHITECTURES:
        kind = "DSpark" if "markov_w1.weight" in tensors else "DFlash"
        kind = "DFlash2" if "selector_hidden.weight" in tensors else kind
        return Detected("gguf-dflash", f"GGUF {kind}{'' if arch == 'dflash' else ' of an early design'}", evidence)
    if arch == "eagle3":
        return Detected("gguf-eagle3", "GGUF EAGLE-3", evidence)
    return Detected("gguf-other", f"a GGUF of architecture {arch!r}", evidence)


def _by_tensors(config: JsonConfig, tensors: TensorSource) -> Detected | None:
    first, names = _architecture(config), tensors.names()
    if first.endswith("Eagle3"):
        return Detected("eagle3", "EAGLE-3 (SpecForge, yuhuili)", f"architectures {first}")
    if config.has("draft_vocab_size"):
        return Detected("eagle3", "EAGLE-3 (SpecForge, yuhuili)", "key draft_vocab_size")
    if any(n == "d2t" or n.startswith("midlayer.") for n in names):
        return Detected("eagle3", "EAGLE-3 (SpecForge, yuhuili)", "tensor d2t or midlayer.*")
    if config.has("medusa_num_heads") or config.get("model_type", str, "") == "medusa":
        return Detected("medusa", "Medusa", "key medusa_num_heads, or model_type medusa")
    if any("medusa_lm_head" in tensors.file_of(n).name for n in names[:1]):
        return Detected("medusa", "Medusa", "file medusa_lm_head.pt")
    stage = next((n for n in names if n.startswith("mtp.") and any(part in n for part in _V4_STAGES)), None)
    if stage:
        return Detected("deepseek-v4-dspark", "DeepSeek-V4 DSpark inside the target", f"tensor {stage}")
    mtp_key = next((k for k in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if config.find(k)), None)
    mtp_tensor = next((n for n in names if n.startswith(("mtp.", "model.mtp_layers.")) or ".eh_proj." in n), None)
    if mtp_key or mtp_tensor:
        return Detected("mtp", "native MTP layers", f"key {mtp_key}" if mtp_key else f"tensor {mtp_tensor}")
    if "fc.weight" in tensors and "lm_head.weight" not in tensors and "norm.weight" not in tensors:
        return Detected("eagle", "EAGLE-1 or EAGLE-2", "fc.weight without lm_head and norm")
    if first.endswith(("ForCausalLM", "LMHeadModel")):
        return Detected("causal-lm", f"a plain causal LM ({first})", f"architectures {first}")
    return None


# Marker -> the families that may have it; a star ends a prefix. One that is there in another family contradicts what
# the family was recognised by. Tensors count by the start of their name.
_MARKOV = ("deepspec", "deepspec-gemma4", "specforge-dspark", "speculators-dspark", "deepseek-v4-dspark", "nemotron-*")
_TENSOR_MARKERS = {
    "markov_head.": _MARKOV,
    "confidence_head.": _MARKOV,
    "logit_head.": ("specforge-dspark", "specforge-domino"),
    "candidate_selector.": ("zlab-dflash2", "speculators-dflash2"),
    "midlayer.": ("eagle3", "speculators-eagle3", "speculators-eagle"),
    "mask_hidden": ("speculators-peagle", "specforge-peagle", "eagle3"),
    "prefix_gru.": ("specforge-domino",),
    "medusa_head.": ("medusa",),
    "d2t": ("eagle3", "specforge-peagle", "speculators-*", "gguf*"),
    "mtp.": ("mtp", "deepseek-v4-dspark"),
    "mtp_layers.": ("speculators-mtp",),
    "model.mtp_layers.": ("mtp",),
}
_KEY_MARKERS = {
    "markov_rank": _MARKOV,
    "dflash_config": ("zlab", "zlab-dflash2", "specforge-dspark", "specforge-domino", "nemotron-*"),
    "dspark_block_size": ("deepseek-v4-dspark",),
    "ttt_length": ("deepspec-eagle3", "deepspec-gemma4-eagle3"),
    "medusa_num_heads": ("medusa",),
    "transformer_layer_config": ("speculators-*",),
}
_CLASS_MARKERS: dict[str, tuple[str, ...]] = {
    **{name: (family,) for name, (family, _) in DEEPSPEC_CLASSES.items()},
    "Eagle3DraftModel": ("deepspec-eagle3", "deepspec-gemma4-eagle3"),
    "DFlashDraftModel": ("zlab", "speculators-dflash", "specforge-*", "nemotron-*"),
    "DFlash2DraftModel": ("zlab-dflash2", "speculators-dflash2"),
    "DSparkDraftModel": ("specforge-*", "nemotron-*"),
    "PEagleDraftModel": ("specforge-peagle",),
    "DFlashSpeculator": ("speculators-dflash",),
    "DSparkSpeculator": ("speculators-dspark",),
    "XPressSpeculator": ("speculators-xpress",),
    "Eagle3Speculator": ("speculators-eagle3",),
    "PEagleSpeculator": ("speculators-peagle",),
    "MTPDraftModel": ("speculators-mtp",),
    "LlamaForCausalLMEagle3": ("eagle3",),
}


def _contradictions(config: JsonConfig, tensors: TensorSource, found: Detected) -> list[Remark]:
    """One fatal remark for each marker of another family than the one recognised."""
    remarks = []
    first = _architecture(config)
    if not _may_have(found, _CLASS_MARKERS.get(first, ("*",))):
        remarks.append(_contradiction(config.path, f"architectures {first}", _CLASS_MARKERS[first], found, first))
    for prefix, families in _TENSOR_MARKERS.items():
        name = next((n for n in tensors.names() if n.startswith(prefix)), None)
        if name and not _may_have(found, families):
            remarks.append(_contradiction(tensors.file_of(name), f"tensor {name}", families, found, prefix))
    for key, families in _KEY_MARKERS.items():
        if config.values.get(key) is not None and not _may_have(found, families):
            remarks.append(_contradiction(config.path, f"key {key}", families, found, key))
    return remarks


def _may_have(found: Detected, families: tuple[str, ...]) -> bool:
    return any(fnmatchcase(found.family, pattern) for pattern in families)


def _contradiction(place: Path, marker: str, families: tuple[str, ...], found: Detected, subject: str) -> Remark:
    return Remark(
        "contradiction",
        f"{place}",
        f"{marker} belongs to {' or '.join(families)}, but {found.evidence} says {found.title}",
        "make config and weights agree; ask whoever wrote the checkpoint",
        fatal=True,
        subject=subject,
    )
