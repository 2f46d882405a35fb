"""Medusa's typical acceptance (Cai et al. 2024, section 2.3.1; formats page 2.5). LOSSY: not the target's distribution.

A draft token x is taken iff p(x) > min(threshold, alpha * exp(-H(p))), p being the target's tempered distribution there
and H its entropy in nats; the token after the last one taken is drawn from p. What the drafter gave x does not count,
so likely tokens are taken more often than p has them. Greedy decoding knows no such rule and stays exact.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specdoctor.engine.draft import Draft
from specdoctor.engine.sampling import probabilities, sample, widest_float
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.verify import Verdict, verify
from specdoctor.errors import SpecdoctorError

POSTERIOR_THRESHOLD = 0.09  # Medusa's own defaults
POSTERIOR_ALPHA = 0.3


def verify_typical(
    sequences: Seq[Sequence],
    drafts: Seq[Draft],
    logits: Tensor,
    threshold: float = POSTERIOR_THRESHOLD,
    alpha: float = POSTERIOR_ALPHA,
) -> list[Verdict]:
    """Judge chains by the target's logits [N, V], as `engine.verify.verify` does, by the lossy rule of this module.

    Raises `SpecdoctorError` for trees.
    """
    if not all(draft.is_chain for draft in drafts):
        raise SpecdoctorError("typical acceptance judges chains only; draft without a tree")
    if sequences[0].sampling.greedy:
        return verify(sequences, drafts, logits)
    sampling, counts = sequences[0].sampling, [len(draft) for draft in drafts]
    p = probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p)  # [N, V]
    uniform = torch.cat([s.uniforms(1) for s in sequences]).to(p.device, widest_float(p.device))
    judged = torch.cat([torch.arange(n) + sum(counts[:r]) + r for r, n in enumerate(counts)]).to(p.device)  # [drafts]
    tokens = torch.cat([draft.tokens for draft in drafts])
    law = p[judged]
    taken = (law.gather(1, tokens.unsqueeze(1)).squeeze(1) > _bar(law, threshold, alpha)).tolist()
    ids = tokens.tolist()
    paths, ends, node, row = [], [], 0, 0
    for n in counts:
        length = next((i for i in range(n) if not taken[node + i]), n)
        paths.append((list(range(length)), ids[node : node + length]))
        ends.append(row + length)
        node, row = node + n, row + n + 1
    after = sample(p[torch.tensor(ends, device=p.device)], uniform).tolist()
    return [Verdict(path, [*kept, token]) for (path, kept), token in zip(paths, after, strict=True)]


def _bar(law: Tensor, threshold: float, alpha: float) -> Tensor:
    """min(threshold, alpha * exp(-H)) of each row of `law` [n, V]: [n]."""
    return (alpha * torch.exp(-torch.special.entr(law).sum(-1))).clamp_max(threshold)
