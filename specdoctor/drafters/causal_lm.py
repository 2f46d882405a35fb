"""A small causal LM as the drafter, with a KV cache of its own (formats page 1.13; Leviathan et al. 2023).

The model runs over packed rows as the target does. Before it drafts it reads what was committed since; the columns that
it wrote while drafting stay where the committed text took those tokens, so an accepted draft is never read twice. Its
state is one slot and the ids behind that slot's columns.

`stop_below` ends a draft before the first token of whose law the likeliest has less probability than that. Lossless:
this is decided from the tokens before it, and not from the token itself, which is not drawn yet.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from specdoctor.drafters.causal_lm_tree import CausalLMExpansion, own_ids
from specdoctor.drafters.growing_drafts import GrowingDrafts
from specdoctor.drafters.quantize import quantize_weights
from specdoctor.drafters.tree_drafting import Expansion, TreeDrafting
from specdoctor.drafters.vocabularies import (
    DraftText,
    EqualVocabulary,
    IntersectionVocabulary,
    RetokenizingVocabulary,
    Vocabularies,
    match_vocabularies,
)
from specdoctor.engine.draft import Draft
from specdoctor.engine.rows import PackedRows, pack_pieces
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import PREFILL_ROWS, Target
from specdoctor.engine.trees import Tree
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.spec import CausalLMSpec


@dataclass(slots=True)
class DraftState:
    """Of one request: the slot, the text in draft ids, and the ids of the columns that the slot holds."""

    slot: int
    text: DraftText = field(default_factory=DraftText)
    columns: list[int] = field(default_factory=list)
    drafted: Tensor | None = None  # draft ids of the last columns, not yet read from the device


class CausalLMDrafter(TreeDrafting):
    """A causal LM bound to a target."""

    taps: tuple[int, ...] = ()

    def __init__(
        self, spec: CausalLMSpec, model: Target, vocabularies: Vocabularies, target: Target, name: str
    ) -> None:
        self.spec, self.model, self.vocabularies, self.name = spec, model, vocabularies, name
        self.max_draft, self.default_draft = spec.max_draft, spec.default_draft
        self.verify_on, self.target_rows = target.device, target.vocab_size
        self.stop_below: float | None = None
        self.quantized: str | None = None  # what its weights were turned into: "int8"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    # The drafter protocol -------------------------------------------------------------------------------------------

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Read the prompts, so that the first round costs what the others do."""
        for sequence in sequences:
            sequence.drafter_state = DraftState(self.model.open())
        self.catch_up(sequences)

    def observe(self, sequences: Seq[Sequence], taps: Tensor, counts: Seq[int]) -> None:
        """Reads no hidden states of the target."""

    def end(self, sequence: Sequence) -> None:
        if sequence.drafter_state is not None:  # None: interrupted before it began
            self.model.close(sequence.drafter_state.slot)
            sequence.drafter_state = None

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        logits = self.catch_up(sequences)
        limits = [min(budget, self._room(s.drafter_state)) for s in sequences]
        drafts = GrowingDrafts(self.vocabularies, sequences, limits, self.stop_below, self.device, self.target_rows)
        written = [0] * len(sequences)  # drafted tokens whose columns are in the cache
        alive = [r for r, limit in enumerate(limits) if limit]
        for step in range(budget):
            alive, choice = drafts.choose(alive, logits, step)
            going = [i for i, r in enumerate(alive) if step + 1 < limits[r]]
            if not going:
                break
            if len(going) < len(alive):
                choice = choice[torch.tensor(going, device=self.device)]
            alive = [alive[i] for i in going]
            logits = self.extend([sequences[r] for r in alive], choice, step)
            for r in alive:
                written[r] = step + 1
        self._keep_columns(sequences, drafts, written)
        return drafts.finish(self.verify_on)

    def propose_tree(self, sequences: Seq[Sequence], tree: Tree, budget: int) -> list[Draft]:
        """A tree where the draft model has positions for all its levels, else a chain as far as it has."""
        self.catch_up(sequences)  # so that the room is known
        levels = min(tree.depth, budget)
        roomy = [r for r, s in enumerate(sequences) if self._room(s.drafter_state) >= levels]
        tight = [r for r in range(len(sequences)) if r not in roomy]
        drafts: dict[int, Draft] = {}
        if roomy:
            drafts |= zip(roomy, super().propose_tree([sequences[r] for r in roomy], tree, budget), strict=True)
        if tight:
            drafts |= zip(tight, self.propose([sequences[r] for r in tight], budget), strict=True)
        return [drafts[r] for r in range(len(sequences))]

    def expansion(self, sequences: Seq[Sequence], depth: int) -> Expansion:
        return CausalLMExpansion(self, sequences)

    @property
    def direct_vocabularies(self) -> EqualVocabulary | IntersectionVocabulary:
        """The vocabularies, where token stands for token. Raises `SpecdoctorError` where text is tokenised again."""
        if isinstance(self.vocabularies, RetokenizingVocabulary):
            raise SpecdoctorError("--tree and --vocabulary retokenize: re-tokenised text is one chain; leave one out")
        return self.vocabularies

    @cached_property
    def own_ids(self) -> Tensor:
        return own_ids(self)

    def to_target_ids(self, choice: Tensor) -> Tensor:
        return self.direct_vocabularies.target_ids(choice)

    def in_target_vocabulary(self, q: Tensor) -> Tensor:
        return self.direct_vocabularies.spread(q)

    # The steps, separately callable ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def catch_up(self, sequences: Seq[Sequence]) -> Tensor:
        """Read what is not read of the committed text; logits [R', draft rows] after its last token.

        R' are the requests whose text fits into the model's positions.
        """
        fitting, pending = [], []
        for sequence in sequences:
            state: DraftState = sequence.drafter_state
            start = self._forget_rejected(state, sequence.ids)
            if self._room(state):
                fitting.append(state)
                pending.append((start, len(state.text.ids)))
        logits = torch.empty(0, self.model.vocab_size, device=self.device)
        ends: dict[int, Tensor] = {}
        for pieces in pack_pieces(pending, PREFILL_ROWS):
            ends |= self._read(fitting, pieces)
        return torch.stack([ends[i] for i in range(len(fitting))]) if fitting else logits

    def extend(self, sequences: Seq[Sequence], tokens: Tensor, step: int) -> Tensor:
        """Run the drafted tokens [R] (draft ids) behind the text and `step` earlier drafts; logits [R, draft rows]."""
        slots = [s.drafter_state.slot for s in sequences]
        starts = [len(s.drafter_state.text.ids) + step for s in sequences]
        rows = PackedRows(slots, starts, [1] * len(slots), self.device)
        return self.model.forward(rows, tokens).logits

    def _keep_columns(self, sequences: Seq[Sequence], drafts: GrowingDrafts, written: list[int]) -> None:
        """Keep the drafted columns until it is known which tokens were taken."""
        for r, (sequence, count) in enumerate(zip(sequences, written, strict=True)):
            if count:
                state: DraftState = sequence.drafter_state
                self.model.cache.keep(state.slot, range(count))
                state.drafted = drafts.own[r, :count]

    def _room(self, state: DraftState) -> int:
        """Tokens that can be drafted before the model runs out of positions; none without any text to go on from."""
        length = len(state.text.ids)
        return max(0, self.model.max_positions + 1 - length) if length else 0

    def _forget_rejected(self, state: DraftState, ids: list[int]) -> int:
        """Cut the slot to the columns that agree with the committed text, but for its last token; how many are left."""
        if state.drafted is not None:
            state.columns += state.drafted.tolist()
            state.drafted = None
        agree = self.vocabularies.take(state.text, ids)
        text = state.text.ids
        most = min(len(state.columns), max(0, len(text) - 1))  # the last one runs again: its logits are wanted
        agree = min(agree, most)
        while agree < most and state.columns[agree] == text[agree]:
            agree += 1
        self.model.cache.cut(state.slot, agree)
        del state.columns[agree:]
        return agree

    def _read(self, states: list[DraftState], pieces: list["Piece"]) -> dict[int, Tensor]:
        """One forward over pieces of texts; logits [draft rows] after each piece, by request."""
        counts = [end - start for _, start, end in pieces]
        ids = [token for i, start, end in pieces for token in states[i].text.ids[start:end]]
        rows = PackedRows(
            [states[i].slot for i, _, _ in pieces], [start for _, start, _ in pieces], counts, self.device
        )
        ends = torch.tensor(counts, device=self.device).cumsum(0) - 1
        logits = self.model.forward(rows, torch.tensor(ids, device=self.device), logit_rows=ends).logits
        for (i, start, end), count in zip(pieces, counts, strict=True):
            self.model.cache.keep(states[i].slot, range(count))
            states[i].columns += states[i].text.ids[start:end]
        return {i: row for (i, _, _), row in zip(pieces, logits, strict=True)}


Piece = tuple[int, int, int]  # of request i the ids [start, end)


def load_causal_lm(
    checkpoint: DraftCheckpoint,
    target: Target,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: str = "auto",
    quantize: str | None = None,
) -> CausalLMDrafter:
    """Load a causal LM with transformers and match its vocabulary with the target's (`match_vocabularies`).

    `quantize`: None or "int8". Raises `SpecdoctorError` when it is no complete model, or when the two tokenizers have
    nothing in common.
    """
    model = Target.load(checkpoint.path, str(device), str(dtype).removeprefix("torch."))
    spec = checkpoint.spec
    assert isinstance(spec, CausalLMSpec)
    drafter = CausalLMDrafter(spec, model, match_vocabularies(model, target, vocabulary), target, name)
    if quantize is not None:
        quantize_weights(model.model, quantize)
        drafter.quantized = quantize
    return drafter
