"""Sequential heads (DSpark paper, section 3; formats page 1.1): the bias that tokens already sampled put on the next.

Contract: a head is stateless between blocks. `start` gives the block's state; `step` takes the previous token [R] and
the row's hidden state [R, H] to a code, and `corrected` adds the code's bias to the row's logits. W1 is indexed by
target ids, W2 has the rows of the draft vocabulary, where that is smaller (formats page 3.13). All of it on the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VanillaHead(nn.Module):
    """Markov head: bias = W1[prev] W2^T, rank r."""

    def __init__(self, vocab: int, hidden: int, rank: int, draft_vocab: int) -> None:
        """`vocab` rows of the target's vocabulary, `draft_vocab` of the draft head."""
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)

    def start(self, rows: int) -> Tensor:
        return self.markov_w1.weight.new_zeros(rows, self.markov_w1.embedding_dim)

    def step(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The rank-r vector [R, r] whose product with W2^T is the bias, and the next state."""
        return self.markov_w1(prev), state

    def corrected(self, base: Tensor, code: Tensor) -> Tensor:
        """base [R, dV] + code [R, r] W2^T, in one pass over W2."""
        return torch.addmm(base, code, self.markov_w2.weight.T)


class GatedHead(VanillaHead):
    """Markov head whose code is gated by the row's hidden state: bias = W2 (sigmoid(G [h ; W1[prev]]) * W1[prev])."""

    def __init__(self, vocab: int, hidden: int, rank: int, draft_vocab: int) -> None:
        super().__init__(vocab, hidden, rank, draft_vocab)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def step(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        code = self.markov_w1(prev)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, code], dim=-1))) * code, state


class RnnHead(VanillaHead):
    """RNN head: z = [s ; W1[prev] ; h] to gate, candidate, output; the output is taken from the old state."""

    def __init__(self, vocab: int, hidden: int, rank: int, draft_vocab: int) -> None:
        super().__init__(vocab, hidden, rank, draft_vocab)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def step(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.cat([state, self.markov_w1(prev), hidden], dim=-1)
        gate, candidate, output = self.joint_proj(z).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


HEADS = {"vanilla": VanillaHead, "gated": GatedHead, "rnn": RnnHead}


class ConfidenceHead(nn.Module):
    """Conditional acceptance of a row: sigmoid(w [h ; W1[prev]] + b), or of h alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def logits(self, features: Tensor) -> Tensor:
        """[..., width] -> [...], in float32, before the sigmoid."""
        return F.linear(features, self.proj.weight, self.proj.bias).float().squeeze(-1)
