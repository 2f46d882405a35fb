"""A training recipe: everything that decides what a run of `specdoctor train` learns, as YAML that a user can copy.

Contract: `load_recipe` returns a valid `Recipe` or raises one line that names file, line and key. A recipe means the
same on any number of processes. Paths in it are relative to the current folder. Examples: `sample_configs/train/`.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_CONFIG = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
Whole = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Weight = Annotated[float, Field(ge=0)]

ALGORITHMS = ("dspark", "dflash", "eagle3", "mtp", "medusa", "early-exit", "causal-lm")
Algorithm = Literal["dspark", "dflash", "eagle3", "mtp", "medusa", "early-exit", "causal-lm"]


DSPARK_LOSSES = {"ce": 0.1, "l1": 0.9, "confidence": 1.0, "decay": 4.0}  # the paper's


class LossWeights(BaseModel):
    """Weights of the losses, and how positions of a draft weigh: position k counts exp(-k / decay).

    `l1` is ||p - q||_1, twice the total variation, as the DSpark paper weighs it; `kl` is KL(target || draft).
    """

    model_config = _CONFIG

    ce: Weight = 0.0
    kl: Weight = 0.0
    l1: Weight = 0.0
    confidence: Weight = 0.0  # BCE against 1 - 0.5 ||p - q||_1
    feature: Weight = 0.0  # regression of the next hidden state, of drafters that have one
    decay: float | None = Field(default=None, gt=0)  # None: all positions alike

    @model_validator(mode="after")
    def _something(self) -> "LossWeights":
        if not (self.ce or self.kl or self.l1 or self.feature):
            raise ValueError("at least one of ce, kl, l1 and feature above 0")
        return self

    def position_weight(self, k: int) -> float:
        """Weight of draft position `k`, from 0."""
        return 1.0 if self.decay is None else math.exp(-k / self.decay)

    @property
    def reads_target(self) -> bool:
        """Whether a loss needs the target's distribution, not only its tokens."""
        return bool(self.kl or self.l1 or self.confidence)


class Phase(LossWeights):
    """Loss weights from a point of the run on, until the next phase: from a step, or from a share of the run."""

    from_step: Whole | None = None
    from_share: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_point(self) -> "Phase":
        if (self.from_step is None) == (self.from_share is None):
            raise ValueError("exactly one of from_step and from_share")
        return self


class Data(BaseModel):
    """Where features come from: a cache folder, or samples with the target in the loop."""

    model_config = _CONFIG

    samples: Path | None = None  # regenerated JSONL, or its folder
    cache: Path | None = None  # folder of `specdoctor data cache`
    tokens_per_batch: Positive = 1024
    max_length: Positive | None = None  # longer samples are cut

    @model_validator(mode="after")
    def _one_source(self) -> "Data":
        if (self.samples is None) == (self.cache is None):
            raise ValueError("exactly one of samples (the target runs in the loop) and cache")
        return self


class Draft(BaseModel):
    """The drafter's shape. What an algorithm does not have is refused where it is not the default."""

    model_config = _CONFIG

    init: str = "target-layers"  # target-layers, scratch, or the folder or known name of a drafter
    layers: Positive = 2
    taps: list[Whole] | None = None  # indices into HS[0..L], rising; None: spread over the target's depth
    # Rows of a block; of recurrent drafters, steps of training-time test; heads of Medusa. SpecForge's EAGLE-3 format
    # does not keep it: give `bench -K` the same.
    block_size: Positive = 7
    mask_id: Whole | None = None  # None: the target's padding or end-of-text token
    markov: Literal["vanilla", "gated", "rnn"] | None = None
    markov_rank: Whole = 0
    confidence: Literal["hidden", "hidden+markov"] | None = None
    only_confidence: bool = False  # the rest stays as it is: for answers that it has not seen, so nothing flatters it
    exit_layer: Positive | None = None  # of an early-exit drafter
    intermediate_size: Positive | None = None  # None: the target's
    qk_norm: bool = False  # of EAGLE-3: norms on queries and keys, and DeepSpec's format instead of SpecForge's
    vocabulary: Path | None = None  # of EAGLE-3: JSON list of the target ids that it drafts; None: all
    own_heads: bool = False  # of Medusa: a projection to the vocabulary of each head's own, trained


class Sampling(BaseModel):
    """What a step looks at, and in which pieces the LM head is applied."""

    model_config = _CONFIG

    anchors: Positive = 32  # blocks a sequence
    head_chunk: Positive = 128  # rows that have logits at one time: bounds memory
    vocabulary: Positive | None = None  # LM-head rows a step compares; None: all. See `training.vocabulary`


class Optimiser(BaseModel):
    """The optimiser (`training.optimisers`) and the learning rate's way. `warmup` and `decay` are shares of the run."""

    model_config = _CONFIG

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(default=6e-4, gt=0)
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = Field(default=0.04, ge=0, le=1)
    decay: float = Field(default=0.2, ge=0, le=1)  # wsd: the share at the end in which it falls
    floor: float = Field(default=0.0, ge=0, le=1)  # lowest rate, as a share of lr
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: Weight = 0.0
    clip: float | None = Field(default=1.0, gt=0)
    accumulate: Positive = 1  # batches an optimiser step, all processes together


class Length(BaseModel):
    """When a run ends: at the first of these that is reached."""

    model_config = _CONFIG

    steps: Positive | None = None
    epochs: Positive | None = None
    minutes: float | None = Field(default=None, gt=0)  # the schedule then follows the clock; not bit-repeatable

    @model_validator(mode="after")
    def _ends(self) -> "Length":
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise ValueError("at least one of steps, epochs and minutes")
        return self


class HeldOut(BaseModel):
    """Prompts on which the true tau is measured, greedy, every `every` steps and at the end."""

    model_config = _CONFIG

    every: Whole = 0  # 0: never on the way
    prompts: Path | None = None  # JSONL; None: the bundled prompts
    categories: list[str] | None = None  # of the bundled prompts; None: all
    max_prompts: Positive = 12
    max_new_tokens: Positive = 64


class Recipe(BaseModel):
    """One run of `specdoctor train`."""

    model_config = _CONFIG

    algorithm: Algorithm
    target: str  # folder, Hugging Face id, or a known name
    output: Path  # folder of the run: log, state, drafter
    template: str = "auto"  # how held-out prompts become ids
    device: str = "auto"
    dtype: str = "auto"  # of the target's weights
    autocast: bool = True  # matrix products in bfloat16, masters in float32
    seed: Whole = 0
    data: Data
    draft: Draft = Draft()
    losses: LossWeights  # where left out: the paper's for DSpark, cross-entropy for the others
    phases: list[Phase] = []  # other weights from a point on; before the first, `losses`
    sampling: Sampling = Sampling()
    optimiser: Optimiser = Optimiser()
    length: Length
    held_out: HeldOut = HeldOut()
    log_every: Positive = 10
    save_every: Positive = 200

    @model_validator(mode="before")
    @classmethod
    def _usual_losses(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "losses" in values:
            return values
        return values | {"losses": DSPARK_LOSSES if values.get("algorithm") == "dspark" else {"ce": 1.0}}

    @model_validator(mode="after")
    def _length_fits(self) -> "Recipe":
        by_share = any(phase.from_share is not None for phase in self.phases)
        needs_end = by_share or self.optimiser.schedule != "constant"
        if needs_end and self.length.steps is None and self.length.minutes is None:
            raise ValueError("length.steps or length.minutes, which the schedule and phases by share need")
        return self

    def weights_at(self, step: int, share: float) -> LossWeights:
        """Loss weights of step `step`, at `share` of the run."""
        current: LossWeights = self.losses
        for phase in self.phases:
            begun = step >= phase.from_step if phase.from_step is not None else share >= (phase.from_share or 0.0)
            if begun:
                current = phase
        return current
