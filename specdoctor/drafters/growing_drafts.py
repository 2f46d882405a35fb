"""The drafts of one round of a causal LM while they grow, a token a step, each request up to a limit of its own."""

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from specdoctor.drafters.vocabularies import RetokenizingVocabulary, Vocabularies
from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.sampling import probabilities, sample, widest_float
from specdoctor.engine.sequence import Sequence


class GrowingDrafts:
    """Letters: R requests, R' of them that still draft, K the longest limit, n tokens to choose from."""

    def __init__(
        self,
        vocabularies: Vocabularies,
        sequences: Seq[Sequence],
        limits: list[int],
        stop_below: float | None,
        device: torch.device,
        target_rows: int,
    ) -> None:
        self.vocabularies, self.sequences, self.limits, self.stop_below = vocabularies, sequences, limits, stop_below
        self.sampling = sequences[0].sampling
        R, K = len(limits), max(limits)
        self.counts = [0] * R  # tokens proposed
        self.tokens = torch.zeros(R, K, dtype=torch.long, device=device)  # target ids
        self.own = torch.zeros(R, K, dtype=torch.long, device=device)  # draft ids
        self.confidence = torch.zeros(R, K, device=device)
        self.uniforms = self.probs = None
        # Re-tokenised text has no law of its own tokens, so it is chosen, not drawn.
        if self.sampling.drafting_temperature > 0 and not isinstance(vocabularies, RetokenizingVocabulary):
            drawn = [F.pad(s.uniforms(n), (0, K - n)) for s, n in zip(sequences, limits, strict=True)]
            self.uniforms = torch.stack(drawn).to(device, widest_float(device), non_blocking=True)
            self.probs = torch.zeros(R, K, target_rows, device=device)

    def choose(self, alive: list[int], logits: Tensor, step: int) -> tuple[list[int], Tensor]:
        """The next token of the requests `alive` by logits [R', draft rows]: those that go on, and draft ids [R']."""
        scores = self.vocabularies.narrow(logits).float()  # [R', n]
        sure = (scores.amax(-1) - scores.logsumexp(-1)).exp()
        if self.stop_below is not None and alive:
            going = [i for i, enough in enumerate((sure >= self.stop_below).tolist()) if enough]
            if len(going) < len(alive):
                index = torch.tensor(going, dtype=torch.long, device=scores.device)
                alive, scores, sure = [alive[i] for i in going], scores[index], sure[index]
        if not alive:
            return [], scores.new_zeros(0, dtype=torch.long)
        everyone = len(alive) == len(self.counts)
        row: slice | Tensor = slice(None) if everyone else torch.tensor(alive, device=scores.device)
        choice = self._pick(scores, row, step)
        own = self.vocabularies.draft_ids(choice)
        self.own[row, step] = own
        if not isinstance(self.vocabularies, RetokenizingVocabulary):
            self.tokens[row, step] = self.vocabularies.target_ids(choice)
        self.confidence[row, step] = sure
        for r in alive:
            self.counts[r] = step + 1
        return alive, own

    def _pick(self, scores: Tensor, row: slice | Tensor, step: int) -> Tensor:
        """Indices [R'] among the n tokens; a drawn one with the law that it was drawn from."""
        if self.uniforms is None or self.probs is None:
            return scores.argmax(-1)
        assert not isinstance(self.vocabularies, RetokenizingVocabulary)
        sampling = self.sampling
        q = probabilities(scores, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
        self.probs[row, step] = self.vocabularies.spread(q)
        return sample(q, self.uniforms[row, step])

    def finish(self, where: torch.device) -> list[Draft]:
        """The drafts, on the target's device."""
        if isinstance(self.vocabularies, RetokenizingVocabulary):
            return self._retokenized(self.vocabularies, where)
        tokens, confidence = self.tokens.to(where), self.confidence.to(where)
        probs = None if self.probs is None else self.probs.to(where)
        return [
            Draft(tokens[r, :n], chain_parents(n), None if probs is None else probs[r, :n], confidence[r, :n])
            for r, n in enumerate(self.counts)
        ]

    def _retokenized(self, vocabularies: RetokenizingVocabulary, where: torch.device) -> list[Draft]:
        drafts = []
        rows = zip(self.sequences, self.own.tolist(), self.counts, self.limits, strict=True)
        for sequence, own, n, limit in rows:
            tokens = vocabularies.proposal(sequence.ids, own[:n])[:limit] if n else []
            drafts.append(Draft(torch.tensor(tokens, dtype=torch.long, device=where), chain_parents(len(tokens))))
        return drafts
