"""Acceptance: which drafts the target takes, and the token after them. Lossless.

Greedy takes a draft iff it is the target's argmax; sampling is rejection sampling (Leviathan et al. 2023, Algorithm 1;
the DSpark paper, section 2): accept x with probability min(1, p(x)/q(x)), after a rejection go on with the normalised
max(p - q, 0), after the last acceptance draw the bonus token from p. In a tree the next sibling is judged by what the
rejection left of p (multi-candidate recursive rejection: SpecInfer, Miao et al. 2023; Jeon et al. 2024 for siblings
drawn without replacement): each sibling's q is the law it was drawn from given those before it, or one-hot where
siblings are the likeliest tokens.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specdoctor.engine.draft import Draft
from specdoctor.engine.sampling import probabilities, sample, widest_float
from specdoctor.engine.sequence import Sequence


@dataclass(slots=True)
class Verdict:
    """The accepted path of one draft (node indices, root to leaf) and the bonus or correction token after it."""

    path: list[int]
    tokens: list[int]  # ids of the path, then the token after it


def verify(sequences: Seq[Sequence], drafts: Seq[Draft], logits: Tensor) -> list[Verdict]:
    """Judge drafts by the target's logits [N, V]; row 0 of each sequence is its anchor, row i + 1 its node i.

    One transfer to the host, whatever the batch. All sequences share their sampling settings.
    """
    if sequences[0].sampling.greedy:
        return _greedy(drafts, logits)
    if all(draft.is_chain for draft in drafts):
        return _chain_rejection(sequences, drafts, logits)
    return _tree_rejection(sequences, drafts, logits)


def _greedy(drafts: Seq[Draft], logits: Tensor) -> list[Verdict]:
    best = logits.float().argmax(-1)  # the same index, and faster than a 16-bit argmax on a CPU
    host = torch.cat([best, *(draft.tokens for draft in drafts)]).tolist()
    best_ids, draft_ids = host[: len(best)], host[len(best) :]
    verdicts, row, node = [], 0, 0
    for draft in drafts:
        n = len(draft)
        verdicts.append(_greedy_path(draft.parents, draft_ids[node : node + n], best_ids[row : row + n + 1]))
        row, node = row + n + 1, node + n
    return verdicts


def _greedy_path(parents: Seq[int], tokens: Seq[int], best: Seq[int]) -> Verdict:
    """Walk down from the anchor along children that equal the target's argmax; siblings are distinct tokens."""
    path: list[int] = []
    at = -1
    for node, parent in enumerate(parents):  # parents stand before their children, so one pass follows the path
        if parent == at and tokens[node] == best[at + 1]:
            path.append(node)
            at = node
    return Verdict(path, [*(tokens[node] for node in path), best[at + 1]])


def _chain_rejection(sequences: Seq[Sequence], drafts: Seq[Draft], logits: Tensor) -> list[Verdict]:
    p, q, tokens, counts, accept_uniform, next_uniform = _stacked(sequences, drafts, logits)
    accepted, after = rejection_sampling(p, q, tokens, counts, accept_uniform, next_uniform)
    host = torch.cat([accepted[:, None], after[:, None], tokens], dim=1).tolist()
    return [Verdict(list(range(n)), [*ids[:n], token]) for n, token, *ids in host]


def _tree_rejection(sequences: Seq[Sequence], drafts: Seq[Draft], logits: Tensor) -> list[Verdict]:
    p, q, tokens, _, accept_uniform, next_uniform = _stacked(sequences, drafts, logits)
    K = tokens.shape[1]
    nowhere = K + 1  # the parent of padding: a place that no walk reaches
    parents = torch.tensor([[*d.parents, *[nowhere] * (K - len(d))] for d in drafts], device=logits.device)
    taken, after = tree_rejection_sampling(p, q, tokens, parents, accept_uniform, next_uniform)
    host = torch.cat([after[:, None], taken.long(), tokens], dim=1).tolist()
    verdicts = []
    for next_token, *row in host:
        path = [node for node in range(K) if row[node]]
        verdicts.append(Verdict(path, [*(row[K + node] for node in path), next_token]))
    return verdicts


def _stacked(
    sequences: Seq[Sequence], drafts: Seq[Draft], logits: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Padded p [R, K+1, V], q [R, K, V], tokens [R, K], counts [R], and the uniform numbers [R, K] and [R]."""
    sampling = sequences[0].sampling
    device, V, K, R = logits.device, logits.shape[-1], max(map(len, drafts)), len(drafts)
    p = probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    lengths = [len(draft) for draft in drafts]
    # Each request takes just what it needs from its stream, so its text does not depend on its neighbours.
    drawn = [sequence.uniforms(n + 1) for sequence, n in zip(sequences, lengths, strict=True)]
    accept_uniform = _padded([u[:-1] for u in drawn], K).to(device, widest_float(device))
    next_uniform = torch.stack([u[-1] for u in drawn]).to(device, widest_float(device))
    p = p.view(R, K + 1, V) if min(lengths) == K else _padded(p.split([n + 1 for n in lengths]), K + 1)
    tokens = _padded([draft.tokens for draft in drafts], K)
    q = None
    if any(draft.probs is not None for draft in drafts):  # an empty draft has none
        nothing = p.new_zeros(0, V)
        q = _padded([nothing if draft.probs is None else draft.probs for draft in drafts], K)
    return p, q, tokens, torch.tensor(lengths, device=device), accept_uniform, next_uniform


def rejection_sampling(
    p: Tensor, q: Tensor | None, tokens: Tensor, counts: Tensor, accept_uniform: Tensor, next_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Chain rejection sampling on the device, batched.

    `p` [R, K+1, V] target, `q` [R, K, V] draft (None: drafts were chosen deterministically, q is one-hot), `tokens`
    [R, K], `counts` [R] valid drafts, uniforms [R, K] and [R]. Returns accepted [R] and the token after them [R].
    """
    R, K = tokens.shape
    row = torch.arange(R, device=p.device)
    if K == 0:
        return torch.zeros_like(row), sample(p[:, 0], next_uniform)
    p_token = p[:, :K].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # [R, K]
    q_token = torch.ones_like(p_token) if q is None else q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    taken = accept_uniform * q_token < p_token  # u < p/q without dividing by a vanishing q
    taken &= torch.arange(K, device=p.device) < counts[:, None]
    accepted = taken.long().cumprod(-1).sum(-1)  # [R]
    after = p[row, accepted]  # [R, V]
    last = accepted.clamp_max(K - 1)
    rejected = (accepted < counts).unsqueeze(-1)
    used = torch.zeros_like(after).scatter_(1, tokens[row, last].unsqueeze(-1), 1.0) if q is None else q[row, last]
    residual = (after - used * rejected).clamp_min_(0)
    # p == q up to rounding leaves no residual mass; then a rejection was rounding too, and p is the right law.
    empty = residual.sum(-1, keepdim=True) <= 1e-9
    return accepted, sample(torch.where(empty, after, residual), next_uniform)


def tree_rejection_sampling(
    p: Tensor, q: Tensor | None, tokens: Tensor, parents: Tensor, accept_uniform: Tensor, next_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Multi-candidate recursive rejection sampling over trees on the device, batched, without a wait.

    `p` [R, K+1, V], row 0 the anchor's, row i + 1 node i's; `q` [R, K, V] the law that each node was drawn from given
    its earlier siblings (None: one-hot); `tokens` [R, K]; `parents` [R, K], each before its child, -1 the anchor;
    uniforms [R, K] and [R]. Returns which nodes were accepted, bool [R, K], and the token after them [R].
    """
    R, K = tokens.shape
    row = torch.arange(R, device=p.device)
    at = torch.full((R,), -1, device=p.device)  # the last accepted node
    law = p[:, 0]  # [R, V] what the next token is to be drawn from, after the rejections so far
    taken = torch.zeros(R, K, dtype=torch.bool, device=p.device)
    for node in range(K):  # parents stand before children, siblings in order: one pass follows the path
        token = tokens[:, node : node + 1]
        asked = parents[:, node] == at
        q_token = 1.0 if q is None else q[row, node].gather(1, token).squeeze(1)
        accepted = asked & (accept_uniform[:, node] * q_token < law.gather(1, token).squeeze(1))
        used = torch.zeros_like(law).scatter_(1, token, 1.0) if q is None else q[:, node]
        residual = (law - used).clamp_min_(0)
        mass = residual.sum(-1, keepdim=True)
        residual = torch.where(mass <= 1e-9, law, residual / mass)  # no mass: the rejection was rounding
        law = torch.where(accepted[:, None], p[:, node + 1], torch.where(asked[:, None], residual, law))
        at = torch.where(accepted, node, at)
        taken[:, node] = accepted
    return taken, sample(law, next_uniform)


def _padded(parts: Seq[Tensor], length: int) -> Tensor:
    """Stack [n_r, ...] tensors to [R, length, ...], zeros behind."""
    counts = [part.shape[0] for part in parts]
    if min(counts) == length:
        return torch.stack(list(parts))
    out = parts[0].new_zeros(len(parts), length, *parts[0].shape[1:])
    # The indices are made on the host: a boolean mask would wait for the device.
    row, column = (torch.arange(length) < torch.tensor(counts)[:, None]).nonzero(as_tuple=True)
    out[row.to(out.device), column.to(out.device)] = torch.cat(list(parts))
    return out
