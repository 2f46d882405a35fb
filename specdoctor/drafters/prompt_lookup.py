"""Prompt lookup: the baseline without a model. What followed the last n tokens the last time is proposed again.

Saxena 2023 (prompt lookup decoding); vLLM's `ngram` method. Works on the host: the token ids are there already. Each
request keeps an index from n-grams to where they last ended, so a round costs its own new tokens and no re-reading.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import Tree
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import MOST_LOOKED_UP, PromptLookupSpec


@dataclass(slots=True)
class NgramIndex:
    """Of one text: every n-gram that something follows -> the index of what follows its last occurrence."""

    shortest: int
    longest: int
    follows: dict[tuple[int, ...], int] = field(default_factory=dict)  # lengths cannot be mistaken for one another
    read: int = 0  # n-grams that end before this index are in

    def look_up(self, ids: Seq[int]) -> list[int]:
        """Where the text went on after the n-gram at its end stood there before: longest n-gram first, places once."""
        for end in range(max(self.read, self.shortest), len(ids)):  # the one at the very end has no successor yet
            for n in range(self.shortest, min(self.longest, end) + 1):
                self.follows[tuple(ids[end - n : end])] = end
        self.read = max(self.read, len(ids))
        lengths = range(min(self.longest, len(ids)), self.shortest - 1, -1)
        found = (self.follows.get(tuple(ids[-n:])) for n in lengths)
        return list(dict.fromkeys(at for at in found if at is not None))


class PromptLookupDrafter:
    """Proposes the continuation of the most recent earlier occurrence of the text's last n-gram, if there is one."""

    taps: tuple[int, ...] = ()

    def __init__(self, spec: PromptLookupSpec, target: Target, name: str = "ngram") -> None:
        self.spec, self.name = spec, name
        self.device, self.dtype = target.device, torch.long  # token ids are all that it holds
        self.max_draft, self.default_draft = spec.max_draft, spec.default_draft

    def begin(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.drafter_state = NgramIndex(self.spec.shortest, self.spec.longest)

    def observe(self, sequences: Seq[Sequence], taps: Tensor, counts: Seq[int]) -> None:
        """Reads no hidden states."""

    def end(self, sequence: Sequence) -> None:
        sequence.drafter_state = None

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        """Chains of up to `budget` tokens, empty where nothing was found; chosen deterministically."""
        found = [self.look_up(sequence, budget) for sequence in sequences]
        return [
            Draft(torch.tensor(ids, dtype=torch.long, device=self.device), chain_parents(len(ids))) for ids in found
        ]

    def look_up(self, sequence: Sequence, budget: int) -> list[int]:
        """Up to `budget` ids that followed the last occurrence of the final n-gram."""
        places = sequence.drafter_state.look_up(sequence.ids)
        return sequence.ids[places[0] : places[0] + budget] if places else []

    def propose_tree(self, sequences: Seq[Sequence], tree: Tree, budget: int) -> list[Draft]:
        """What followed the longest n-gram, and beside it what followed the shorter ones; of a shape only its depth and
        its number of nodes are kept, since what is found is no distribution to branch by."""
        return [self._grown(sequence, tree.nodes, min(tree.depth, budget)) for sequence in sequences]

    def _grown(self, sequence: Sequence, nodes: int, depth: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        place: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for at in sequence.drafter_state.look_up(sequence.ids):
            node = -1
            for token in sequence.ids[at : at + depth]:
                if (node, token) not in place:
                    if len(tokens) == nodes:
                        break
                    place[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = place[node, token]
        return Draft(torch.tensor(tokens, dtype=torch.long, device=self.device), tuple(parents))


def prompt_lookup_spec(text: str, vocab_size: int) -> PromptLookupSpec:
    """The settings that `ngram` or `ngram:5` (longest n-gram) stand for. Raises `SpecdoctorError` for anything else."""
    _, given, longest = text.partition(":")
    n = PromptLookupSpec.longest
    if given:
        if not longest.isdecimal() or not 1 <= int(longest) <= MOST_LOOKED_UP:
            raise SpecdoctorError(
                f"--draft {text}: expected ngram, or ngram:N with the longest n-gram to look up, 1 to {MOST_LOOKED_UP}"
            )
        n = int(longest)
    return PromptLookupSpec(
        family="prompt-lookup", algorithm="prompt-lookup", hidden_size=0, vocab_size=vocab_size, longest=n
    )
