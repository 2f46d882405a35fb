"""The decode loop: prefill once, then rounds of draft, trim, verify, accept, commit.

Contract: lossless. Greedy output equals the target's own greedy output token for token in float32; sampled output has
the target's own distribution, unless the caller asks for a lossy acceptance by name. `Engine` holds no request state:
`Sequence` does.
"""

from collections.abc import Sequence as Seq
from typing import cast

import torch
from torch import Tensor

from specdoctor.engine.clock import PhaseClock
from specdoctor.engine.draft import Draft, Drafter, DraftLength, Schedule, TreeDrafter
from specdoctor.engine.rows import PackedRows, pack_pieces
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import PREFILL_ROWS, Target, TargetOutput
from specdoctor.engine.trees import Tree, node_depths, rows_visible
from specdoctor.engine.typical import verify_typical
from specdoctor.engine.verify import Verdict, verify
from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.record import RoundRecord

ACCEPTANCE = {"lossless": verify, "typical": verify_typical}


class Engine:
    """A target, a drafter (None: plain decoding, K = 0) and a schedule, run over sequences."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        draft_tokens: int | None = None,
        schedule: Schedule | None = None,
        tree: Tree | None = None,
        draft_length: DraftLength | None = None,
        acceptance: str = "lossless",
        arm: str = "",
    ) -> None:
        """`tree` lets the drafter propose trees of that shape; `draft_tokens` is then their depth.

        `draft_length` varies the length of drafts from round to round, up to `draft_tokens`. `acceptance` "typical" is
        Medusa's rule, which is LOSSY when sampling and for chains only.
        """
        self.target, self.drafter, self.schedule, self.tree = target, drafter, schedule, tree
        self.draft_length, self.acceptance = draft_length, acceptance
        self._judge = ACCEPTANCE[acceptance]
        if tree is not None:
            if not hasattr(drafter, "propose_tree"):
                raise SpecdoctorError(f"--tree: the drafter {getattr(drafter, 'name', 'none')} proposes chains only")
            draft_tokens = tree.depth
        self.draft_tokens = 0 if drafter is None else drafter.default_draft if draft_tokens is None else draft_tokens
        if drafter is not None and not 0 < self.draft_tokens <= drafter.max_draft:
            raise SpecdoctorError(
                f"-K {self.draft_tokens}: {drafter.name} proposes 1 to {drafter.max_draft} tokens in a round"
            )
        self.taps = () if drafter is None else drafter.taps
        self._nothing = Draft(torch.empty(0, dtype=torch.long, device=target.device), ())
        self.arm = arm or (drafter.name if drafter else "ar")

    @property
    def draft_rows(self) -> int:
        """Most draft tokens that a round verifies: of a chain K, of a tree its nodes."""
        return self.draft_tokens if self.tree is None else self.tree.nodes

    def generate(self, sequences: Seq[Sequence]) -> None:
        """Run requests to their end, all in one batch."""
        try:
            self.prefill(sequences)
            while any(not s.finished for s in sequences):
                self.step(sequences)
        finally:
            self.release(sequences)

    def release(self, sequences: Seq[Sequence]) -> None:
        """Give back KV slots and drafter state, and fill in the times of the rounds."""
        for sequence in sequences:
            sequence.settle_times()
            if sequence.slot is not None:
                self.target.close(sequence.slot)
                sequence.slot = None
                if self.drafter is not None:
                    self.drafter.end(sequence)

    @torch.inference_mode()
    def prefill(self, sequences: Seq[Sequence]) -> None:
        """Run the prompts and commit the first token of each. Not a round: no record, not in tau."""
        for sequence in sequences:
            self._check(sequence)
        waiting = [s for s in sequences if not s.finished]
        clock = PhaseClock(self.target.device)
        for sequence in waiting:
            sequence.slot = self.target.open()
        if self.drafter is not None:
            self.drafter.begin(waiting)
        for pieces in pack_pieces([(0, s.prompt_length) for s in waiting], PREFILL_ROWS):
            self._prefill([(waiting[i], start, end) for i, start, end in pieces])
        clock.mark("prefill")
        for sequence in waiting:
            sequence.prefill_seconds = clock.seconds()["prefill"] / len(waiting)

    @torch.inference_mode()
    def step(self, sequences: Seq[Sequence]) -> None:
        """One round of every unfinished sequence; those that share sampling settings run as one batch."""
        groups: dict[tuple, list[Sequence]] = {}
        for sequence in sequences:
            if not sequence.finished:
                groups.setdefault(sequence.sampling.distribution, []).append(sequence)
        for group in groups.values():
            self._round(group)

    def _round(self, sequences: list[Sequence]) -> None:
        clock = PhaseClock(self.target.device)
        proposed = self._propose(sequences)
        clock.mark("draft")
        drafts = proposed if self.schedule is None else self.schedule(sequences, proposed)
        clock.mark("schedule")
        rows, output = self._verify(sequences, drafts)
        clock.mark("verify")
        verdicts = self._judge(sequences, drafts, output.logits)
        clock.mark("accept")
        # Read now, while the device is idle: after the drafter's next kernels are queued it would wait for them.
        confidences = _on_host([draft.confidence for draft in proposed])
        committed = self._commit(sequences, verdicts)
        clock.mark("commit")
        self._observe(sequences, rows, verdicts, output)
        clock.mark("draft")  # the drafter's own work on the committed tokens counts as drafting
        for sequence, whole, draft, verdict, ids, confidence in zip(
            sequences, proposed, drafts, verdicts, committed, confidences, strict=True
        ):
            sequence.records.append(self._record(sequence, whole, draft, verdict, ids, confidence))
            sequence.clocks.append(clock)

    def _propose(self, sequences: list[Sequence]) -> list[Draft]:
        """Drafts of at most K tokens, fewer where the target's positions run out.

        Each request gets the budget that it would have alone: its random numbers must not depend on its neighbours.
        """
        drafts = [self._nothing] * len(sequences)
        if self.drafter is None:
            return drafts
        by_budget: dict[int, list[int]] = {}
        for r, sequence in enumerate(sequences):
            room = min(self.draft_tokens, self.target.max_positions - len(sequence.ids))
            if self.draft_length is not None:
                room = min(room, self.draft_length(sequence))
            if room > 0:
                by_budget.setdefault(room, []).append(r)
        for budget, members in by_budget.items():
            for r, draft in zip(members, self.drafts([sequences[r] for r in members], budget), strict=True):
                drafts[r] = draft
        return drafts

    def drafts(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        """What the drafter proposes below each anchor: chains of at most `budget` tokens, trees of so many levels."""
        assert self.drafter is not None
        if self.tree is None:
            return self.drafter.propose(sequences, budget)
        return cast(TreeDrafter, self.drafter).propose_tree(sequences, self.tree, budget)

    def _verify(self, sequences: list[Sequence], drafts: list[Draft]) -> tuple[PackedRows, TargetOutput]:
        anchors = torch.tensor([s.anchor for s in sequences], device=self.target.device)
        if len(sequences) == 1:
            ids = torch.cat([anchors, drafts[0].tokens])
        else:
            ids = torch.cat([part for r, draft in enumerate(drafts) for part in (anchors[r : r + 1], draft.tokens)])
        slots = [s.slot for s in sequences if s.slot is not None]
        starts = [self.target.cache.lengths[slot] for slot in slots]
        counts, device = [len(draft) + 1 for draft in drafts], self.target.device
        if all(draft.is_chain for draft in drafts):
            rows = PackedRows(slots, starts, counts, device)
        else:
            visible = [rows_visible(draft.parents, device) for draft in drafts]
            depths = [(0, *node_depths(draft.parents)) for draft in drafts]
            rows = PackedRows(slots, starts, counts, device, visible, depths)
        return rows, self.target.forward(rows, ids, taps=self.taps)

    def _commit(self, sequences: list[Sequence], verdicts: list[Verdict]) -> list[list[int]]:
        committed = []
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            assert sequence.slot is not None
            self.target.cache.keep(sequence.slot, [0, *(node + 1 for node in verdict.path)])
            committed.append(sequence.commit(verdict.tokens))
            if not sequence.finished and len(sequence.ids) > self.target.max_positions:
                sequence.stop_reason = "context"
        return committed

    def _observe(
        self, sequences: list[Sequence], rows: PackedRows, verdicts: list[Verdict], output: TargetOutput
    ) -> None:
        """Hand the drafter the states of the committed rows: the anchor's and the accepted drafts'."""
        if self.drafter is None or output.taps is None:
            return
        going, kept, first = [], [], 0
        for sequence, verdict, count in zip(sequences, verdicts, rows.counts, strict=True):
            if not sequence.finished:
                going.append(sequence)
                kept.append([first, *(first + node + 1 for node in verdict.path)])
            first += count
        if not going:
            return
        flat = [row for one in kept for row in one]
        taps = output.taps[: len(flat)] if flat == list(range(len(flat))) else output.taps[flat]
        self.drafter.observe(going, taps, [len(one) for one in kept])

    def _record(
        self,
        sequence: Sequence,
        whole: Draft,
        draft: Draft,
        verdict: Verdict,
        committed: list[int],
        confidence: list[float] | None,
    ) -> RoundRecord:
        return RoundRecord(
            arm=self.arm,
            prompt_id=sequence.prompt_id,
            round=len(sequence.records),
            drafted=len(whole),
            verified=len(draft),
            accepted=len(verdict.path),
            committed_ids=committed,
            depth=None if draft.is_chain else max(node_depths(draft.parents)),
            outcomes=_outcomes(whole, draft, verdict),
            confidence=confidence,
            stop=sequence.stop_reason,
            context=len(sequence.ids) - len(committed) - 1,
            category=sequence.category,
            repeat=sequence.repeat,
        )

    def _check(self, sequence: Sequence) -> None:
        length, limit = sequence.prompt_length, self.target.max_positions
        name = sequence.prompt_id or "prompt"
        if length == 0:
            raise SpecdoctorError(f"{name}: the prompt has no tokens, expected at least one")
        if length >= limit:
            raise SpecdoctorError(
                f"{name}: the prompt has {length} tokens, but {self.target.name} has {limit} positions "
                "(max_position_embeddings) and needs one to generate; shorten the prompt"
            )
        if sequence.max_new_tokens < 0:
            raise SpecdoctorError(f"{name}: max_new_tokens is {sequence.max_new_tokens}, expected 0 or more")
        if sequence.max_new_tokens == 0:
            sequence.stop_reason = "length"

    def _prefill(self, pieces: list["Piece"]) -> None:
        """One forward over pieces of prompts; a prompt whose last piece this is gets its first token."""
        device = self.target.device
        sequences, counts = [s for s, _, _ in pieces], [end - start for _, start, end in pieces]
        slots = [s.slot for s in sequences if s.slot is not None]
        rows = PackedRows(slots, [start for _, start, _ in pieces], counts, device)
        ids = torch.tensor([token for s, start, end in pieces for token in s.ids[start:end]], device=device)
        ends = torch.tensor(counts, device=device).cumsum(0) - 1
        output = self.target.forward(rows, ids, logit_rows=ends, taps=self.taps)
        for slot, count in zip(slots, counts, strict=True):
            self.target.cache.keep(slot, range(count))
        if self.drafter is not None and output.taps is not None:
            self.drafter.observe(sequences, output.taps, counts)
        self._first_tokens(pieces, output.logits)

    def _first_tokens(self, pieces: list["Piece"], logits: Tensor) -> None:
        """Commit the token after each finished prompt: a verdict on an empty draft."""
        groups: dict[tuple, list[int]] = {}
        for r, (sequence, _, end) in enumerate(pieces):
            if end == sequence.prompt_length:
                groups.setdefault(sequence.sampling.distribution, []).append(r)
        for members in groups.values():
            chosen = [pieces[r][0] for r in members]
            verdicts = verify(chosen, [self._nothing] * len(chosen), logits[members])
            for sequence, verdict in zip(chosen, verdicts, strict=True):
                sequence.commit(verdict.tokens)


Piece = tuple[Sequence, int, int]  # prompt ids [start, end) of a sequence


def _on_host(values: Seq[Tensor | None]) -> list[list[float] | None]:
    """Confidences as lists, in one transfer where there are any."""
    there = [value for value in values if value is not None]
    if not there:
        return [None] * len(values)
    flat = iter(torch.cat(there).tolist())
    return [None if value is None else [next(flat) for _ in range(value.shape[0])] for value in values]


def _outcomes(whole: Draft, draft: Draft, verdict: Verdict) -> list[str]:
    """Why each node fell: accepted, rejected (its parent was accepted), unreached, or trimmed before verification."""
    path = set(verdict.path)
    out = []
    for node, parent in enumerate(whole.parents):
        if node >= len(draft):
            out.append("trimmed")
        elif node in path:
            out.append("accepted")
        else:
            out.append("rejected" if parent == -1 or parent in path else "unreached")
    return out
