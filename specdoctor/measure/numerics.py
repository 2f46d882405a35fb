"""A pair run in several dtypes, watched: prompts, rounds and a tree each, then a few rounds for the acceptance.

Contract: `run_numerics` makes one `DtypeRun` a dtype, in the order given; a dtype that cannot be run has its reason in
`error` and the others go on. Target and drafter of one dtype are freed before the next is loaded.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specdoctor.engine.draft import Drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.kernels.attention import AttentionPath, matmul_attention
from specdoctor.kernels.tree_mask import tree_attention_mask, tree_depths, with_anchor
from specdoctor.measure.half_fallback import HalfFallback
from specdoctor.measure.numeric_probe import NumericProbe, ProbeRecord
from specdoctor.measure.prompts import Prompt

TREE = with_anchor((-1, 0, 0, 1, 1, 2, 2))  # rows of the tree that is run below each prompt
PROBED_ROUNDS = 2
FLOOR = -65504.0  # the lowest number of float16: what is tried in place of -inf


@dataclass(frozen=True)
class OwnMask:
    """A user's own mask, run as it is: `values` [rows, context + rows] are added to the scores."""

    values: Tensor
    parents: tuple[int, ...]  # of the rows
    context: int


@dataclass(frozen=True)
class NumericsPlan:
    """What is run in each dtype."""

    prompts: Seq[Prompt]  # all decode for the acceptance
    probed: int = 2  # so many of them are watched
    max_new_tokens: int = 24
    mask: OwnMask | None = None


@dataclass
class Acceptance:
    """Rounds of all prompts together."""

    rounds: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tau_step(self) -> float | None:
        return self.committed / self.rounds if self.rounds else None


@dataclass
class DtypeRun:
    """What happened in one dtype."""

    dtype: str
    attention: str = ""
    record: ProbeRecord = field(default_factory=ProbeRecord)
    cured: bool | None = None  # by -65504 in place of -inf; None: no row was all -inf
    cured_record: ProbeRecord | None = None
    emulated: dict[str, int] = field(default_factory=dict)
    acceptance: Acceptance | None = None  # None without a drafter
    error: str = ""


Pair = tuple[Target, Drafter | None]


def run_numerics(make: Callable[[str], Pair], dtypes: Iterable[str], plan: NumericsPlan) -> Iterator[DtypeRun]:
    """Run the pair that `make` loads in each dtype."""
    for dtype in dtypes:
        run = DtypeRun(dtype)
        try:
            _fill(run, make(dtype), plan)
        except (RuntimeError, NotImplementedError) as error:  # no kernel for this dtype, or no memory
            run.error = next(iter(str(error).splitlines()), type(error).__name__)
        gc.collect()  # hooks make circles of references: without this two pairs would be in memory at once
        yield run


@torch.inference_mode()
def _fill(run: DtypeRun, pair: Pair, plan: NumericsPlan) -> None:
    target, drafter = pair
    if plan.mask is not None:  # the fused path replaces -inf, so what the mask does would not be seen
        target.attention = AttentionPath("matmul", "needed for --mask", matmul_attention)
    run.attention = target.attention.name
    fallback = HalfFallback()
    with ExitStack() as stack:
        if target.dtype == torch.float16 and target.device.type == "cpu":
            stack.enter_context(fallback)
        run.record = _probed(target, drafter, plan, None)
        if run.record.masked:
            run.cured_record = _probed(target, drafter, plan, FLOOR)
            # What other faults give birth to is none of the mask's.
            masked = {rows.module for rows in run.record.masked}
            run.cured = not any(birth.module in masked for birth in run.cured_record.births.values()) and not any(
                rows.gives == "nan" for rows in run.cured_record.masked
            )
        if drafter is not None:
            run.acceptance = _accepted(Engine(target, drafter), plan)
    run.emulated = dict(fallback.emulated)


def _probed(target: Target, drafter: Drafter | None, plan: NumericsPlan, floor: float | None) -> ProbeRecord:
    models = {"target": target.model} | ({} if drafter is None else {"drafter": _module_of(drafter)})
    probe = NumericProbe(models, floor)
    engine = Engine(target, drafter)
    with probe.watching():
        for prompt in plan.prompts[: plan.probed]:
            sequence = Sequence(prompt.ids, max_new_tokens=1 << 20)
            try:
                probe.phase = f"prefill of prompt {prompt.id}"
                engine.prefill([sequence])
                for number in range(PROBED_ROUNDS):
                    probe.phase = f"round {number} of prompt {prompt.id}"
                    engine.step([sequence])
                probe.phase = f"tree below prompt {prompt.id}"
                _tree(target, sequence)
            finally:
                engine.release([sequence])
        if plan.mask is not None:
            probe.phase = "tree with the mask given"
            _own_tree(target, plan.prompts[0].ids, plan.mask)
    return probe.record


def _tree(target: Target, sequence: Sequence) -> None:
    assert sequence.slot is not None
    start = target.cache.lengths[sequence.slot]
    ids = torch.tensor([sequence.ids[-1], *_other_ids(target, sequence.ids, len(TREE) - 1)], device=target.device)
    visible = [tree_attention_mask(TREE, target.device)]
    rows = PackedRows([sequence.slot], [start], [len(TREE)], target.device, visible, [tree_depths(TREE)])
    target.forward(rows, ids)


def _own_tree(target: Target, text: Seq[int], mask: OwnMask) -> None:
    """A tree below as much context as the mask has columns for, with the mask's own numbers."""
    slot, rows = target.open(), len(mask.parents)
    compute = target.attention.compute
    try:
        if mask.context:
            committed = torch.tensor(_other_ids(target, text, mask.context), device=target.device)
            target.forward(PackedRows([slot], [0], [mask.context], target.device), committed)
            target.cache.keep(slot, range(mask.context))
        values = mask.values.to(target.device, target.dtype).float()  # as the engine would hold it

        def with_mask(q: Tensor, k: Tensor, v: Tensor, own: Tensor, *rest: Any) -> Tensor:
            own = torch.full_like(own, -torch.inf)  # columns of padding, which an engine's own mask does not have
            own[:, :, :, : mask.context + rows] = values[None, None, :, : mask.context + rows]
            return compute(q, k, v, own, *rest)

        target.attention = AttentionPath(target.attention.name, target.attention.reason, with_mask)
        ids = torch.tensor(_other_ids(target, text, rows), device=target.device)
        visible = [tree_attention_mask(mask.parents, target.device)]
        depths = [tree_depths(mask.parents)]
        target.forward(PackedRows([slot], [mask.context], [rows], target.device, visible, depths), ids)
    finally:
        target.attention = AttentionPath(target.attention.name, target.attention.reason, compute)
        target.close(slot)


def _accepted(engine: Engine, plan: NumericsPlan) -> Acceptance:
    total = Acceptance()
    for prompt in plan.prompts:
        sequence = Sequence(
            prompt.ids, max_new_tokens=plan.max_new_tokens, stop_ids=engine.target.stop_ids, prompt_id=prompt.id
        )
        engine.generate([sequence])
        for record in sequence.records:
            total.rounds += 1
            total.committed += record.committed
            total.drafted += record.drafted
            total.accepted += record.accepted
    return total


def _module_of(drafter: Drafter) -> nn.Module:
    """The drafter's modules, whatever holds them: itself, or what it is made of."""
    if isinstance(drafter, nn.Module):
        return drafter
    parts = nn.ModuleDict()
    for name, value in vars(drafter).items():
        inner = value.model if isinstance(value, Target) else value
        if isinstance(inner, nn.Module):
            parts[name] = inner
    return parts


def _other_ids(target: Target, text: Seq[int], count: int) -> list[int]:
    """Ids of the text itself, in turns: what a drafter might propose."""
    return [text[i % len(text)] % target.vocab_size for i in range(count)]


def check_mask_fits(mask: OwnMask, target: Target) -> None:
    """Raise `SpecdoctorError` when the mask is wider than the target has positions."""
    columns = mask.context + len(mask.parents)
    if columns > target.max_positions:
        raise SpecdoctorError(
            f"--mask: {columns} columns, but {target.name} has {target.max_positions} positions; dump a smaller one"
        )
