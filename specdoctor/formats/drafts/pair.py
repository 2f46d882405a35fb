"""What a drafter and its target must share, told from sizes alone: hidden size, depth, taps, vocabulary, mask id."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specdoctor.formats.drafts.checkpoint import DraftCheckpoint


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of its logits
    embedding_rows: int


@dataclass(frozen=True)
class Misfit:
    """One fact in which the two differ. `line` names the drafter's file, the key and both values."""

    key: str
    drafter: int
    target: int
    line: str


def misfits(checkpoint: DraftCheckpoint, target: TargetShape) -> Iterator[Misfit]:
    """What every drafter shares with its target and does not share here; an algorithm's binder checks its own part."""
    spec, where = checkpoint.spec, checkpoint.where
    needed = spec.target_hidden_size or spec.hidden_size
    if spec.taps and needed != target.hidden_size:
        key = "target_hidden_size" if spec.target_hidden_size else "hidden_size"
        yield Misfit(
            key,
            needed,
            target.hidden_size,
            f"{where}: key {key} is {needed}, but the target {target.name} has {target.hidden_size}; "
            "this drafter was made for another target",
        )
    if spec.num_target_layers is not None and spec.num_target_layers != target.num_layers:
        yield Misfit(
            "num_target_layers",
            spec.num_target_layers,
            target.num_layers,
            f"{where}: key num_target_layers is {spec.num_target_layers}, but the target {target.name} has "
            f"{target.num_layers} layers; this drafter was made for another target",
        )
    if spec.taps and max(spec.taps) > target.num_layers:
        yield Misfit(
            "target_layer_ids",
            max(spec.taps),
            target.num_layers,
            f"{where}: target_layer_ids ends with layer {max(spec.taps) - 1}, but the target {target.name} has "
            f"layers 0 to {target.num_layers - 1}",
        )
    mask_id = getattr(spec, "mask_id", None)
    rows = spec.vocab_size if spec.embed_source == "checkpoint" else target.embedding_rows
    if mask_id is not None and not 0 <= mask_id < rows:
        yield Misfit(
            "mask_token_id",
            mask_id,
            rows,
            f"{where}: key mask_token_id is {mask_id}, but the embedding has rows 0 to {rows - 1}",
        )
    yield from _vocabulary(checkpoint, target, where)


def _vocabulary(checkpoint: DraftCheckpoint, target: TargetShape, where: Path) -> Iterator[Misfit]:
    spec = checkpoint.spec
    head_rows = spec.head_rows if spec.head_source == "checkpoint" else target.vocab_size
    unmapped = head_rows != target.vocab_size and not spec.has_vocabulary_map
    if spec.algorithm != "causal-lm" and (spec.vocab_size != target.vocab_size or unmapped):
        yield Misfit(
            "vocab_size",
            head_rows if unmapped else spec.vocab_size,
            target.vocab_size,
            f"{where}: vocab_size is {spec.vocab_size} and the head has {head_rows} rows, but the target {target.name} "
            f"has {target.vocab_size}; run `specdoctor check-tokenizer` on the pair",
        )
