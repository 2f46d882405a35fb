"""How a causal LM drafter and a target with different tokenizers understand one another.

Three ways. Equal tokenizers: ids are the same, padding rows aside. Intersection: the draft model may only propose
tokens that both sides have, by their bytes; its distribution is renormalised on them, and as that is the very
distribution a token is drawn from, rejection sampling stays exact. Re-tokenisation: it drafts freely, and its text is
cut again by the target's tokenizer; those tokens count as chosen deterministically.

What the draft model reads of the text never touches losslessness: any reading of what is past will do.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.exact_encoder import ExactEncoder
from specdoctor.formats.shared_vocabulary import SharedVocabulary, is_special, shared_vocabulary
from specdoctor.formats.tokenizer_files import TokenizerSide, read_side

VOCABULARY_MODES = ("auto", "intersection", "retokenize")
WINDOW = 8  # target tokens before a re-tokenised draft that the target's tokenizer sees with it
TAIL = 32  # draft tokens at the end of the text whose cut may still change


@dataclass(slots=True)
class DraftText:
    """The committed text of one request in the draft model's ids."""

    ids: list[int] = field(default_factory=list)
    taken: int = 0  # target ids that are in it
    settled: int = 0  # draft ids before this will not be cut anew


class EqualVocabulary:
    """Ids mean the same on both sides; the heads may differ in rows that no token uses."""

    mode = "equal"

    def __init__(self, draft_rows: int, target_rows: int) -> None:
        self.draft_rows, self.target_rows = draft_rows, target_rows
        self.shared = min(draft_rows, target_rows)

    def take(self, text: DraftText, ids: list[int]) -> int:
        """Bring `text` up to the target ids `ids`; returns from where on its ids may have changed."""
        before = len(text.ids)
        text.ids += [i for i in ids[text.taken :] if i < self.draft_rows]
        text.taken = len(ids)
        return before

    def narrow(self, logits: Tensor) -> Tensor:
        """Logits [R, draft rows] to those of the n tokens that may be proposed [R, n]."""
        return logits[:, : self.shared]

    def draft_ids(self, choice: Tensor) -> Tensor:
        """Indices among the n tokens to ids of the draft model."""
        return choice

    def target_ids(self, choice: Tensor) -> Tensor:
        return choice

    def spread(self, q: Tensor) -> Tensor:
        """Probabilities [..., n] over the target's rows [..., V]."""
        return q if q.shape[-1] == self.target_rows else torch.nn.functional.pad(q, (0, self.target_rows - q.shape[-1]))

    def facts(self) -> dict[str, Any]:
        """For the result: how the sides go together."""
        return {"mode": self.mode, "shared": self.shared, "note": None}


class IntersectionVocabulary:
    """The draft model proposes shared tokens only."""

    mode = "intersection"

    def __init__(self, shared: SharedVocabulary, encoder: ExactEncoder, device: torch.device) -> None:
        """`encoder` is the draft's."""
        self.sides, self.encoder = shared, encoder
        draft, target = zip(*shared.pairs, strict=True)
        self.draft_index = torch.tensor(draft, device=device)  # [n]
        self.target_index = torch.tensor(target, device=device)

    def take(self, text: DraftText, ids: list[int]) -> int:
        """Shared tokens one by one, runs of others cut again by the draft's tokenizer."""
        before = len(text.ids)
        run = b""
        for target_id in ids[text.taken :]:
            draft_id = self.sides.draft_id_of.get(target_id)
            if draft_id is None:
                run += self._bytes(target_id)
                continue
            text.ids += [*self.encoder.encode(run), draft_id]
            run = b""
        text.ids += self.encoder.encode(run)
        if text.taken == 0:
            text.ids[:0] = _missing_prefix(self.sides, text.ids)
        text.taken = len(ids)
        return before

    def narrow(self, logits: Tensor) -> Tensor:
        return logits[:, self.draft_index]

    def draft_ids(self, choice: Tensor) -> Tensor:
        return self.draft_index[choice]

    def target_ids(self, choice: Tensor) -> Tensor:
        return self.target_index[choice]

    def spread(self, q: Tensor) -> Tensor:
        return q.new_zeros(*q.shape[:-1], self.sides.target_rows).index_copy_(-1, self.target_index, q)

    def facts(self) -> dict[str, Any]:
        return _facts(self.sides, self.mode, "only these are drafted")

    def _bytes(self, target_id: int) -> bytes:
        tokens = self.sides.target.tokens
        return (tokens[target_id] or b"") if target_id < len(tokens) else b""


class RetokenizingVocabulary:
    """The draft model proposes any text; the target's tokenizer cuts it."""

    mode = "retokenize"

    def __init__(
        self, shared: SharedVocabulary, draft: ExactEncoder, target: ExactEncoder, device: torch.device
    ) -> None:
        self.sides, self.draft, self.target = shared, draft, target
        tokens = shared.draft.tokens[: shared.draft_rows]
        common = {draft_id for draft_id, _ in shared.pairs}
        ids = [i for i, token in enumerate(tokens) if token and (i in common or not is_special(shared.draft, i))]
        self.draft_index = torch.tensor(ids, device=device)  # tokens that spell a text which the target can have

    def take(self, text: DraftText, ids: list[int]) -> int:
        """The end of the text is cut anew by the draft's tokenizer: what follows may change how it was cut."""
        if text.taken == 0:
            text.ids = _missing_prefix(self.sides, [])
            text.settled = len(text.ids)
        changed = text.settled
        data = self.draft.bytes_of(text.ids[changed:]) + self.target.bytes_of(ids[text.taken :])
        text.ids[changed:] = self.draft.encode(data)
        text.taken = len(ids)
        self._settle(text)
        return changed

    def narrow(self, logits: Tensor) -> Tensor:
        return logits[:, self.draft_index]

    def draft_ids(self, choice: Tensor) -> Tensor:
        return self.draft_index[choice]

    def proposal(self, ids: list[int], drafted: list[int]) -> list[int]:
        """Target ids for a drafted text below the committed target ids `ids`."""
        before, after = self.target.bytes_of(ids[-WINDOW:]), self.draft.bytes_of(drafted)
        alone, together = self.target.encode(before), self.target.encode(before + after)
        if together[: len(alone)] == alone:
            return together[len(alone) :]
        return self.target.encode(after)  # the cut would run through the last committed token, which is fixed

    def facts(self) -> dict[str, Any]:
        return _facts(self.sides, self.mode, "drafts are cut again by the target's tokenizer")

    def _settle(self, text: DraftText) -> None:
        """Move the border behind which the text is cut anew, to a token that begins a word."""
        if len(text.ids) - text.settled <= 2 * TAIL:
            return
        tokens = self.sides.draft.tokens
        for at in range(len(text.ids) - TAIL, text.settled, -1):
            if (tokens[text.ids[at]] or b"")[:1].isspace():
                text.settled = at
                return


Vocabularies = EqualVocabulary | IntersectionVocabulary | RetokenizingVocabulary


def match_vocabularies(draft: Target, target: Target, mode: str = "auto") -> Vocabularies:
    """How to draft for `target` with the model `draft`. Raises `SpecdoctorError` when they share no token.

    `auto`: as they are when the tokenizers are equal, else the intersection. Without tokenizer files ids can only be
    taken as they are, which needs heads of the same size.
    """
    if mode not in VOCABULARY_MODES:
        raise SpecdoctorError(f"--vocabulary {mode}: expected one of {', '.join(VOCABULARY_MODES)}")
    theirs = _side(target)
    mine = _side(draft, theirs)
    if mine is None or theirs is None:
        lacking = draft if mine is None else target
        if mode != "auto":
            raise SpecdoctorError(
                f"--vocabulary {mode}: {lacking.folder or lacking.name} has no tokenizer files; copy them into it"
            )
        if draft.vocab_size != target.vocab_size:
            raise SpecdoctorError(
                f"{draft.folder or draft.name}: vocab_size is {draft.vocab_size}, but the target {target.name} has "
                f"{target.vocab_size}, and {lacking.folder or lacking.name} has no tokenizer files to match them by; "
                "copy them into the folder"
            )
        return EqualVocabulary(draft.vocab_size, target.vocab_size)
    sides = shared_vocabulary(mine, theirs, draft.vocab_size, target.vocab_size)
    if mode == "auto" and sides.equal:
        return EqualVocabulary(draft.vocab_size, target.vocab_size)
    if not sides.pairs:
        raise SpecdoctorError(
            f"{mine.path}: no token in common with the target {target.name}; run `specdoctor check-tokenizer` on both"
        )
    encoder = ExactEncoder(mine.path, sides.draft, draft.vocab_size)
    if mode == "retokenize":
        theirs_encoder = ExactEncoder(theirs.path, sides.target, target.vocab_size)
        return RetokenizingVocabulary(sides, encoder, theirs_encoder, draft.device)
    return IntersectionVocabulary(sides, encoder, draft.device)


def _side(model: Target, like: TokenizerSide | None = None) -> TokenizerSide | None:
    if model.folder is None:
        return None
    side = read_side(model.folder, like)
    return side if side.vocabulary is not None else None


def _missing_prefix(sides: SharedVocabulary, ids: list[int]) -> list[int]:
    """What the draft's tokenizer puts before a text (bos), where it is not there."""
    prefix = list(sides.draft.prefix_ids or ())
    return [] if ids[: len(prefix)] == prefix else prefix


def _facts(sides: SharedVocabulary, mode: str, meaning: str) -> dict[str, Any]:
    n = len(sides.pairs)
    draft, target = (sum(token is not None for token in side.tokens) for side in (sides.draft, sides.target))
    note = (
        f"the tokenizers differ: {n} tokens in common, of {draft} of the draft model and {target} of the target; "
        f"{meaning}"
    )
    return {"mode": mode, "shared": n, "draft_tokens": draft, "target_tokens": target, "note": note}
