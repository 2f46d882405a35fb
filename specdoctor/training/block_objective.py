"""Objective of DSpark (vanilla, gated, rnn; confidence) and DFlash (paper, section 3; formats page 1.1, "Losses").

Anchors are drawn in every sequence, and one isolated block below each runs through the network that drafts
(`drafters.backbone`, `drafters.heads`) beside the sequence's features, all packed. Rows that have an answer token to
predict go through the LM head in chunks (`head_loss`). The loss of a row k weighs exp(-k / decay); the batch's loss is
the weighted mean over rows.
"""

import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specdoctor.drafters.backbone import Attention, Layer
from specdoctor.drafters.rope import Rope
from specdoctor.engine.target import FINAL_NORMED, Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.expressible import expressible
from specdoctor.formats.drafts.pair import TargetShape, misfits
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.drafts.write_deepspec import write_deepspec
from specdoctor.formats.drafts.write_zlab import write_zlab
from specdoctor.formats.spec import BlockSpec
from specdoctor.training.anchors import Blocks, sample_blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.block_attention import BlockAttention, block_attention, choose_path
from specdoctor.training.block_metrics import acceptance_parts
from specdoctor.training.block_start import (
    DraftNetwork,
    block_spec,
    refuse_foreign_keys,
    start_network,
    warm_spec,
)
from specdoctor.training.head_loss import HeadJob, HeadLosses, head_losses
from specdoctor.training.objective import Losses
from specdoctor.training.recipe import Recipe
from specdoctor.training.vocabulary import sample_columns


class BlockObjective:
    """See `Objective`."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        spec: BlockSpec,
        network: DraftNetwork,
        own: dict[str, Tensor] | None = None,
    ) -> None:
        """`own` holds the embedding or head of a drafter that does not share its target's; they stay as they are."""
        own = own or {}
        device = target.device
        self.spec, self.module, self.weights, self.sampling = spec, network.to(device), recipe.losses, recipe.sampling
        last = target.num_layers if spec.tap_final_is_prenorm else FINAL_NORMED
        self.taps = tuple(last if tap == target.num_layers else tap for tap in spec.taps)
        self.dtype = torch.bfloat16 if recipe.autocast else torch.float32
        self.own = own
        self.target_head = target.lm_head.weight.detach().to(self.dtype)
        self.embedding = own.get("embed_tokens.weight", target.embedding.weight.detach()).to(device)
        self.head = own["lm_head.weight"].to(device, self.dtype) if "lm_head.weight" in own else self.target_head
        self.softcap = getattr(target.config, "final_logit_softcapping", None)
        self.path = choose_path(device)
        self._rope = Rope(spec.rope, spec.layers[0].head_dim, device, torch.float32)

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> Losses:
        """See `Objective.loss`."""
        spec = self.spec
        blocks = sample_blocks(batch, self.sampling.anchors, spec.block_size, spec.max_draft, generator)
        if not blocks.count:  # no answer of two tokens: nothing to learn, and still a graph for every parameter
            return Losses(sum((p.sum() for p in self.module.parameters()), torch.zeros(())) * 0.0)
        with self._autocast():
            hidden = self.hidden(batch, blocks)  # [A, K, H]
            codes = self._codes(blocks, hidden)
            row_weights = self._row_weights(blocks)
            found = self._head_losses(batch, blocks, hidden, codes, row_weights, generator)
            total, parts = found.total, _means(found, row_weights)
            if self.module.confidence is not None and self.weights.confidence:
                assert found.l1 is not None
                each = self._confidence_losses(blocks, hidden, 1 - 0.5 * found.l1)
                unsure = (each * row_weights).sum()
                total = total + self.weights.confidence * unsure
                parts["confidence"] = unsure.detach()
        return Losses(total, parts | acceptance_parts(blocks.valid, found))

    def save(self, folder: Path) -> None:
        """See `Objective.save`; bfloat16 after training under autocast, without the target's embedding and head."""
        tensors = {name: value.to("cpu", self.dtype).contiguous() for name, value in self.module.tensors().items()}
        tensors |= {name: value.to("cpu", self.dtype) for name, value in self.own.items()}
        write = write_deepspec if _as_deepspec(self.spec) else write_zlab
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            write(self.spec, tensors, partial_folder / folder.name)
            (partial_folder / folder.name).rename(folder)
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)

    # The steps, separately callable for tests -------------------------------------------------------------------

    def hidden(self, batch: TrainingBatch, blocks: Blocks) -> Tensor:
        """Final hidden states [A, K, H] of the proposing rows of all blocks, in one packed pass."""
        spec, backbone, A = self.spec, self.module.backbone, blocks.count
        taps = batch.taps if batch.taps.dtype == self.dtype else batch.taps.to(self.dtype)
        context = backbone.hidden_norm(backbone.fc(taps))  # [N, H]
        limit = max(high - low for low, high in zip(batch.starts, batch.starts[1:], strict=False)) + spec.block_size
        own_positions = torch.cat([torch.arange(b - a) for a, b in zip(batch.starts, batch.starts[1:], strict=False)])
        context_turn = self._rope.at(own_positions.to(context.device), limit)
        turn = self._rope.at(blocks.positions, limit)
        ids = torch.full((A, spec.block_size), spec.mask_id, device=batch.ids.device)
        ids[:, 0] = blocks.tokens[:, 0]
        x = F.embedding(ids.view(-1), self.embedding).float()  # the residual stream is float32 under autocast too
        made: dict[tuple[int | None, bool], BlockAttention] = {}
        for layer in cast(list[Layer], backbone.layers):
            shape = layer.self_attn.shape
            key = (shape.window, shape.causal_in_block)
            if key not in made:
                made[key] = block_attention(blocks, batch.starts, shape, spec.window_anchor == "block", self.path)
            features = layer.self_attn.keys_values(context, *context_turn)
            x = layer(x, partial(_attend, layer.self_attn, made[key], features, turn))
        hidden = backbone.norm(x).view(A, spec.block_size, -1)
        return hidden[:, 1 - spec.row_offset :]

    def _codes(self, blocks: Blocks, hidden: Tensor) -> Tensor | None:
        """The sequential head's vectors [A, K, r], told the text's own tokens."""
        markov = self.module.markov
        if markov is None:
            return None
        if self.spec.markov == "vanilla":
            return markov.markov_w1(blocks.previous)
        state, codes = markov.start(blocks.count), []
        for k in range(self.spec.max_draft):
            code, state = markov.step(state, blocks.previous[:, k], hidden[:, k])
            codes.append(code)
        return torch.stack(codes, dim=1)

    def _row_weights(self, blocks: Blocks) -> Tensor:
        """[M] weights of the valid rows, which sum to 1."""
        by_position = [self.weights.position_weight(k) for k in range(self.spec.max_draft)]
        weights = torch.tensor(by_position, device=blocks.valid.device).expand(blocks.count, -1)[blocks.valid]
        return weights / weights.sum()

    def _head_losses(
        self,
        batch: TrainingBatch,
        blocks: Blocks,
        hidden: Tensor,
        codes: Tensor | None,
        row_weights: Tensor,
        generator: torch.Generator,
    ) -> HeadLosses:
        valid, labels = blocks.valid, blocks.labels[blocks.valid]
        head, target_head, log_factor = self.head, self.target_head, None
        w2 = None if self.module.markov is None else self.module.markov.markov_w2.weight
        if self.sampling.vocabulary is not None and self.sampling.vocabulary < len(head):
            columns = sample_columns(len(head), self.sampling.vocabulary, labels, generator)
            shared, head = target_head is head, head[columns.ids]
            target_head = head if shared else target_head[columns.ids]
            w2 = None if w2 is None else w2[columns.ids]
            labels, log_factor = columns.place_of(labels), columns.log_factor
        job = HeadJob(
            head=head,
            target_head=target_head,
            target_hidden=batch.last_hidden[blocks.states[valid]],
            labels=labels,
            row_weights=row_weights,
            losses=self.weights,
            chunk=self.sampling.head_chunk,
            dtype=self.dtype,
            softcap=self.softcap,
            log_factor=log_factor,
        )
        return head_losses(hidden[valid], None if codes is None else codes[valid], w2, job)

    def _confidence_losses(self, blocks: Blocks, hidden: Tensor, overlap: Tensor) -> Tensor:
        """BCE [M] of the predicted acceptance against the analytic one, `overlap` [M]."""
        assert self.module.confidence is not None
        features = hidden[blocks.valid]
        if self.spec.confidence == "hidden+markov":
            assert self.module.markov is not None
            raw = self.module.markov.markov_w1(blocks.previous[blocks.valid])
            features = torch.cat([features, raw.to(features.dtype)], dim=-1)
        logits = self.module.confidence.logits(features)
        return F.binary_cross_entropy_with_logits(logits, overlap.clamp(0, 1), reduction="none")

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.embedding.device.type, self.dtype)


def make_block(recipe: Recipe, target: Target, start: Path | None) -> BlockObjective:
    """A DSpark or DFlash objective, new or from the drafter in the folder `start`.

    Raises `SpecdoctorError` for a recipe, a target or a drafter that cannot go together.
    """
    refuse_foreign_keys(recipe)
    if target.lm_head.bias is not None:
        raise SpecdoctorError(f"{target.name}: its LM head has a bias, which no block drafter can share")
    own: dict[str, Tensor] = {}
    if start is None:
        spec = block_spec(recipe, target)
        if (reason := expressible(spec, "deepspec")) is not None:
            raise SpecdoctorError(f"the recipe's drafter cannot be written: {reason}; give another target")
        network = start_network(spec, target, recipe.draft.init, recipe.seed)
    else:
        spec, network, own = _warm(recipe, target, start)
    _check_confidence(recipe, spec)
    if recipe.draft.only_confidence:
        if start is None or network.confidence is None:
            raise SpecdoctorError(
                "draft.only_confidence is true, which needs draft.init with the folder of a trained drafter, and "
                "draft.confidence"
            )
        network.requires_grad_(False)
        network.confidence.requires_grad_(True)
    return BlockObjective(recipe, target, spec, network, own)


def _warm(recipe: Recipe, target: Target, start: Path) -> tuple[BlockSpec, DraftNetwork, dict[str, Tensor]]:
    checkpoint = read_draft(start, target.num_layers)
    checkpoint.refuse_if_broken()
    rows = target.embedding.weight.shape[0]
    shape = TargetShape(target.name, target.hidden_size, target.num_layers, target.vocab_size, rows)
    if (misfit := next(misfits(checkpoint, shape), None)) is not None:
        raise SpecdoctorError(misfit.line)
    spec = warm_spec(recipe, checkpoint)
    tensors = checkpoint.load()
    own = {}
    for name, theirs in (("embed_tokens.weight", target.embedding.weight), ("lm_head.weight", target.lm_head.weight)):
        mine = tensors.pop(name, None)
        if mine is not None and not mine.to(theirs).equal(theirs.detach()):
            own[name] = mine
    sources = {"embed_source": "embed_tokens.weight", "head_source": "lm_head.weight"}
    placed = {field: "checkpoint" if name in own else "target" for field, name in sources.items()}
    spec = replace(spec, **placed)  # type: ignore[arg-type]
    if not _as_deepspec(spec) and (own or (reason := expressible(spec, "zlab")) is not None):
        why = "its own embedding or head" if own else reason
        raise SpecdoctorError(f"{checkpoint.where}: no format to write what is trained from it: {why}")
    network = start_network(spec, target, "scratch", recipe.seed)  # of heads that the recipe adds
    network.fill(tensors)
    return spec, network, own


def _as_deepspec(spec: BlockSpec) -> bool:
    return expressible(spec, "deepspec") is None


def _check_confidence(recipe: Recipe, spec: BlockSpec) -> None:
    weighed = any(weights.confidence for weights in (recipe.losses, *recipe.phases))
    if weighed and spec.confidence is None:
        raise SpecdoctorError(
            "losses.confidence is above 0, but draft.confidence is not set; set it to hidden or hidden+markov, or drop "
            "the weight"
        )
    if spec.confidence and not weighed:
        raise SpecdoctorError(
            f"draft.confidence is {spec.confidence}, but losses.confidence is 0 throughout; the head would stay as it "
            "is: give it a weight, or leave it out"
        )


def _attend(
    attention: Attention,
    attend: BlockAttention,
    features: tuple[Tensor, Tensor],
    turn: tuple[Tensor, Tensor],
    x: Tensor,
) -> Tensor:
    """A layer's attention of all blocks: `x` [A * B, H] normed; `features` are the context's keys and values."""
    k, v = attention.keys_values(x, *turn)
    q = attention.queries(x, *turn)
    kind = v.dtype  # keys and queries come out of norm and rotation in float32 under autocast
    ck, cv = features
    return attention.o_proj(attend(q.to(kind), ck.to(kind), cv, k.to(kind), v, attention.scale))


def _means(found: HeadLosses, row_weights: Tensor) -> dict[str, Tensor]:
    values = {"ce": found.ce, "kl": found.kl, "l1": found.l1}
    return {name: (value * row_weights).sum() for name, value in values.items() if value is not None}
