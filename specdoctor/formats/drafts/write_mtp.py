"""Writer of speculators' MTP folders: one layer, re-applied (formats page 1.7.6)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.formats.drafts.mtp import SPECULATORS
from specdoctor.formats.drafts.write_config import write_folder
from specdoctor.formats.spec import RecurrentSpec

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "0.9.0"  # of speculators, whose layout this is


def write_mtp(
    spec: RecurrentSpec, block: dict[str, Any], tensors: "dict[str, Tensor]", folder: Path, architecture: str = ""
) -> None:
    """Make `folder` from canonical tensors. `block` is the target's own text config, depth included.

    `architecture` is the target's class; embedding and head stay with the target.
    """
    stored = {_stored(name): value for name, value in tensors.items()}
    write_folder(folder, mtp_config(spec, block, architecture), stored)


def mtp_config(spec: RecurrentSpec, block: dict[str, Any], architecture: str = "") -> dict[str, Any]:
    """The config.json."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": spec.draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": VERSION,
        "num_nextn_predict_layers": 1,
        "num_speculative_steps": spec.draft_tokens,
        "transformer_layer_config": block,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": spec.target_name or "",
                "architectures": [architecture] if architecture else [],
            },
        },
    }


def _stored(name: str) -> str:
    """layers.0.token_norm.weight -> mtp_layers.0.token_layernorm.weight, and so on; block.* loses that part."""
    own = name.removeprefix("layers.0.")
    if own.startswith("block."):
        return SPECULATORS.block.format(i=0) + own.removeprefix("block.")
    return str(getattr(SPECULATORS, own.removesuffix(".weight"))).format(i=0)
