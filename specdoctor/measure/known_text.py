"""A text on the device: the probabilities that the target gave its tokens, and the drafter ready for blocks below any.

Contract: `prefill` runs target and drafter features over prompt and completion once, in chunks of rows; `hidden_below`
then gives the blocks below any anchors of the completion, in chunks whose memory is bounded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.teacher_forced import blocks_hidden
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import Sampling, probabilities
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import PREFILL_ROWS, Target
from specdoctor.measure.corpus import CorpusText

LOGIT_BYTES = 64 << 20  # of one chunk of logits
SCORE_BYTES = 64 << 20  # of one layer's attention scores in the drafter
KEPT_BYTES = 256 << 20  # of the target's logits that wait for the drafted paths
COLD = 1e-6  # temperatures that `probabilities` has to look after


@dataclass(slots=True)
class KnownText:
    """Row i predicts completion token i + 1. The drafter's features lie in the slot of `sequence`."""

    sequence: Sequence
    prompt: int  # tokens of the prompt
    ids: Tensor  # [n + lookahead] completion, on the drafter's device
    probability: Tensor  # [rows] of y's next token under the processed p; 1 in greedy
    logits: Tensor | None  # [kept, V] of the first rows, where they were asked for
    disagreements: int = 0  # greedy: rows whose argmax is not y's token
    impossible: int = 0  # sampling: rows that give y's token probability 0


def prefill(
    target: Target,
    drafter: BlockDrafter,
    sampling: Sampling,
    text: CorpusText,
    sequence: Sequence,
    keep_logits: bool = False,
) -> KnownText:
    """Run prompt and completion once. `sequence` is one that `drafter.begin` has taken up; the caller ends it."""
    first = len(text.prompt_ids)
    ids = torch.tensor([*text.prompt_ids, *text.ids], device=target.device)
    rows, most = len(ids) - 1, rows_within(LOGIT_BYTES, target.vocab_size)
    known = KnownText(sequence, first, ids[first:].to(drafter.device), torch.empty(0), None)
    probability, kept, kept_bytes = [], [], 0
    slot = target.open()
    try:
        start = 0
        while start < rows:
            end = min(start + PREFILL_ROWS, rows, max(start, first) + most)
            wanted = torch.arange(max(first, start), end, device=target.device)
            at = wanted - start if len(wanted) else torch.tensor([end - start - 1], device=target.device)
            layout = PackedRows([slot], [start], [end - start], target.device)
            output = target.forward(layout, ids[start:end], logit_rows=at, taps=drafter.taps)
            target.cache.keep(slot, range(end - start))
            assert output.taps is not None
            drafter.observe([sequence], output.taps, [end - start])
            if len(wanted):
                probability.append(_emitted(output.logits, ids[wanted + 1], sampling, known))
                kept_bytes += output.logits.numel() * output.logits.element_size()
                if keep_logits and kept_bytes <= KEPT_BYTES:
                    kept.append(output.logits)
            start = end
    finally:
        target.close(slot)
    known.probability = torch.cat(probability).to(drafter.device)
    known.logits = torch.cat(kept) if kept else None
    return known


def hidden_below(drafter: BlockDrafter, known: KnownText, anchors: Tensor) -> Tensor:
    """Final hidden states [A, max_draft, H] of a block below each anchor [A] of the completion."""
    positions = (known.prompt + anchors).tolist()
    return blocks_hidden(drafter, known.sequence.drafter_state, positions, known.ids[anchors])


def block_chunks(drafter: BlockDrafter, known: KnownText, count: int) -> list[tuple[int, int]]:
    """Ranges of `count` blocks whose attention scores and logits stay within bounds."""
    spec = drafter.spec
    columns = drafter.backbone.cache.lengths[known.sequence.drafter_state]
    heads = max(layer.heads for layer in spec.layers)
    size = rows_within(LOGIT_BYTES, spec.vocab_size)
    while size > 1 and heads * size * spec.block_size * (columns + size * spec.block_size) * 4 > SCORE_BYTES:
        size //= 2
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def tokens_ahead(ids: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """[A, depth] tokens after each anchor; the last one stands for those beyond the text."""
    index = anchors[:, None] + torch.arange(1, depth + 1, device=ids.device)
    return ids[index.clamp_max(len(ids) - 1)]


def token_probability(logits: Tensor, tokens: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Float32 probability [rows] of `tokens` [rows] under `engine.sampling.probabilities` of `logits` [rows, V]."""
    if top_k or top_p < 1 or temperature < COLD:
        return probabilities(logits, temperature, top_k, top_p).gather(-1, tokens[:, None]).squeeze(-1)
    scores = logits.float() / temperature  # no need of the other probabilities: one pass over V less
    return (scores.gather(-1, tokens[:, None]).squeeze(-1) - scores.logsumexp(-1)).exp()


def rows_within(budget: int, vocab: int) -> int:
    """Rows of float32 logits that fit into `budget` bytes."""
    return max(8, budget // (4 * vocab))


def _emitted(logits: Tensor, tokens: Tensor, sampling: Sampling, known: KnownText) -> Tensor:
    """p(y) [rows] of the processed distribution; greedy: 1, since y is what the target emits."""
    if sampling.greedy:
        known.disagreements += int((logits.argmax(-1) != tokens).sum())
        return torch.ones(len(tokens), device=logits.device)
    p = token_probability(logits, tokens, sampling.temperature, sampling.top_k, sampling.top_p)
    known.impossible += int((p == 0).sum())
    return p
