"""A draft vocabulary that is a part of the target's: its map is checked once, when a drafter is bound.

A drafter of the whole vocabulary can be cut to the ids that matter when it is loaded (Zhao et al. 2025, "FR-Spec"): its
head is most of what a draft costs beside a small target, and the target, which verifies, keeps all of its own.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.spec import DraftSpec

OWN = "own"  # instead of a file's name: the list beside the weights
BESIDE = "draft_vocabulary.json"
CUT = ("dspark", "dflash", "eagle3")  # algorithms that can be cut


def checked_map(d2t: Tensor | None, spec: DraftSpec) -> Tensor | None:
    """`d2t` [dV], absolute target ids, unless it cannot be that; None for a full vocabulary.

    Raises `SpecdoctorError` for ids outside the target's vocabulary and for two draft rows with one id: q would not be
    the law that drafts are drawn from. A map of the wrong form (offsets or ids, formats page 3.10) ends here too.
    """
    if d2t is None:
        return None
    low, high = int(d2t.min()), int(d2t.max())
    if low < 0 or high >= spec.vocab_size:
        raise SpecdoctorError(
            f"tensor d2t maps draft ids to {low}..{high}, expected target ids 0..{spec.vocab_size - 1}; a map stored "
            "as offsets where ids are expected, or the reverse, looks like this"
        )
    counts = torch.bincount(d2t, minlength=spec.vocab_size)
    if int(counts.max()) > 1:
        twice = int(counts.argmax())
        raise SpecdoctorError(
            f"tensor d2t maps {int(counts[twice])} draft ids to target id {twice}, expected each id once; a map of ids "
            "where offsets are expected, or the reverse, looks like this"
        )
    return d2t


def over_target_vocabulary(values: Tensor, d2t: Tensor | None, rows: int, elsewhere: float = 0.0) -> Tensor:
    """Values over draft ids [..., dV] to values over target ids [..., rows], `elsewhere` where no draft row is."""
    if d2t is None:
        return values
    return values.new_full((*values.shape[:-1], rows), elsewhere).index_copy_(-1, d2t, values)


def ids_to_cut_to(wanted: str | Path | None, checkpoint: DraftCheckpoint, folder: Path) -> Tensor | None:
    """What `--draft-vocabulary` asks for; None where it was not given.

    Raises `SpecdoctorError` for a drafter that cannot be cut and for a list that cannot be read.
    """
    if wanted is None:
        return None
    _refuse_cut(checkpoint)
    return read_vocabulary(vocabulary_file(wanted, folder), checkpoint.spec.vocab_size)


def vocabulary_file(wanted: str | Path, folder: Path) -> Path:
    """The list that `wanted` names: a file, or "own" for the one in a drafter's folder."""
    path = folder / BESIDE
    if str(wanted) != OWN:
        return Path(wanted).expanduser()
    if not path.is_file():
        raise SpecdoctorError(f"--draft-vocabulary own: there is no {path}; give a JSON list of ids or leave it out")
    return path


def read_vocabulary(path: Path, vocab: int) -> Tensor:
    """Target ids [dV], rising, of a draft vocabulary, from a JSON list. Raises `SpecdoctorError` for anything else."""
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecdoctorError(
            f"{path}: cannot be read as a draft vocabulary ({error}); expected a JSON list of ids, as `specdoctor data "
            "vocabulary` writes"
        ) from None
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= vocab:
        raise SpecdoctorError(f"{path}: expected a JSON list of different target ids, 0 to {vocab - 1}")
    return torch.tensor(sorted(ids))


def cut_to(
    ids: Tensor, checkpoint: DraftCheckpoint, tensors: dict[str, Tensor], head: Tensor
) -> tuple[DraftCheckpoint, dict[str, Tensor], Tensor]:
    """The parts of a drafter that proposes `ids` [dV] only: its head [V, H] and W2 of its Markov head lose their other
    rows, and `d2t` joins the tensors. The confidence head and its calibration stay those of the whole vocabulary.
    """
    spec = checkpoint.spec
    if len(ids) == spec.vocab_size:
        return checkpoint, tensors, head
    ids = ids.to(head.device)
    w2 = "markov_head.markov_w2.weight"
    tensors = tensors | {"d2t": ids} | ({w2: tensors[w2][ids]} if w2 in tensors else {})
    return replace(checkpoint, spec=replace(spec, draft_vocab_size=len(ids))), tensors, head[ids]


def _refuse_cut(checkpoint: DraftCheckpoint) -> None:
    """Raise `SpecdoctorError` for an algorithm that cannot be cut and for a vocabulary that is a part already."""
    spec = checkpoint.spec
    if spec.algorithm not in CUT:
        raise SpecdoctorError(
            f"--draft-vocabulary: {checkpoint.where} is a drafter of algorithm {spec.algorithm}, expected one of "
            f"{', '.join(CUT)}; leave it or the option out"
        )
    if spec.has_vocabulary_map:
        raise SpecdoctorError(
            f"--draft-vocabulary: {checkpoint.where} has a draft vocabulary of its own, {spec.head_rows} of "
            f"{spec.vocab_size} ids; leave the option out"
        )
