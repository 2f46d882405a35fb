"""From what `--draft` names and how it is to draft, to an engine: the options that bench, generate and profile share.

Contract: an option that no drafter of the run can follow is one clear line, before anything is decoded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdoctor.drafters.causal_lm import CausalLMDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.drafters.prompt_lookup import PromptLookupDrafter, prompt_lookup_spec
from specdoctor.drafters.quantize import KINDS
from specdoctor.drafters.vocabularies import VOCABULARY_MODES
from specdoctor.engine.draft import Drafter, Schedule
from specdoctor.engine.engine import Engine
from specdoctor.engine.target import Target
from specdoctor.engine.trees import Tree
from specdoctor.engine.typical import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.gguf_tensors import gguf_file
from specdoctor.formats.sources import resolve_model
from specdoctor.scheduling.confidence import confidence_threshold
from specdoctor.scheduling.dynamic_k import DEFAULT_THRESHOLD, adaptive, check_dynamic_k

NGRAM = "ngram"
OF_A_RUN = "drafter"  # the folder that every run of `specdoctor train` leaves

DraftSource = Path | str  # a checkpoint folder, or `ngram`, `ngram:5`


@dataclass(frozen=True, slots=True)
class Drafting:
    """How to draft; None or the first choice where nothing was asked for."""

    draft_tokens: int | None = None  # K, the most where it varies
    dynamic_k: str = "constant"
    threshold: float | None = None  # of the confidence
    vocabulary: str = "auto"
    quantize: str | None = None
    draft_vocabulary: str | None = None  # file with the ids that drafters may propose, or `own`
    acceptance: str = "lossless"  # or "typical", Medusa's lossy rule
    trees: tuple[Tree, ...] = ()  # shapes that each drafter proposes in arms of their own, beside the chain
    device: str = "same"
    dtype: str = "same"

    def check(self, sources: list[DraftSource]) -> None:
        """Refuse what is wrong in itself, and what there is no drafter for."""
        check_dynamic_k(self.dynamic_k)
        if self.vocabulary not in VOCABULARY_MODES:
            raise SpecdoctorError(f"--vocabulary {self.vocabulary}: expected one of {', '.join(VOCABULARY_MODES)}")
        if self.quantize is not None and self.quantize not in KINDS:
            raise SpecdoctorError(f"--draft-quantize {self.quantize}: expected {' or '.join(KINDS)}")
        if self.threshold is not None:
            confidence_threshold(self.threshold)
        if self.draft_vocabulary is not None and any(isinstance(source, str) for source in sources):
            raise SpecdoctorError("--draft-vocabulary: ngram proposes what the text has; leave one of them out")
        if sources:
            return
        for option, value in (
            ("--confidence-threshold", self.threshold),
            ("--dynamic-k", self.dynamic_k if self.dynamic_k != "constant" else None),
            ("--tree", self.trees[0].label if self.trees else None),
            ("--draft-vocabulary", self.draft_vocabulary),
            *self._causal_lm_options(),
        ):
            if value is not None:
                raise SpecdoctorError(f"{option} {value}: no drafter to apply it to; give one with --draft")

    def check_drafters(self, drafters: list[Drafter]) -> None:
        """Refuse an option of a causal LM drafter when none of those loaded is one, and trees of one that has none."""
        for drafter in drafters if self.trees else ():
            if not hasattr(drafter, "propose_tree"):
                raise SpecdoctorError(f"--tree: the drafter {drafter.name} proposes chains only; leave one of them out")
        if any(isinstance(drafter, CausalLMDrafter) for drafter in drafters):
            return
        for option, value in self._causal_lm_options():
            if value is not None:
                names = ", ".join(drafter.name for drafter in drafters)
                raise SpecdoctorError(
                    f"{option} {value}: is for a causal LM as the drafter, found {names}; leave it out"
                )

    def _causal_lm_options(self) -> list[tuple[str, str | None]]:
        vocabulary = self.vocabulary if self.vocabulary != "auto" else None
        return [("--vocabulary", vocabulary), ("--draft-quantize", self.quantize)]


def find_draft(text: str) -> DraftSource:
    """The folder or GGUF that `text` names, or the look-up `ngram`, `ngram:5`; a folder of that name is `./ngram`."""
    if text.partition(":")[0] == NGRAM:
        prompt_lookup_spec(text, 0)
        return text
    path = Path(text).expanduser()
    return path if gguf_file(path) is not None else resolve_model(text)


def draft_name(source: DraftSource) -> str:
    """What an arm with this drafter is called unless it is given a name; `RUN/drafter` of `train` after its run."""
    if isinstance(source, str):
        return source.replace(":", "-")
    place = source.resolve()
    own = place.parent.name if place.name == OF_A_RUN else ""
    return own or place.name.removesuffix(".gguf")


def open_drafter(source: DraftSource, target: Target, options: Drafting, name: str = "") -> Drafter:
    """The drafter bound to `target`. Raises `SpecdoctorError` as `load_drafter` does."""
    name = name or draft_name(source)
    if isinstance(source, str):
        return PromptLookupDrafter(prompt_lookup_spec(source, target.vocab_size), target, name)
    return load_drafter(
        source,
        target,
        name=name,
        device=options.device,
        dtype=options.dtype,
        vocabulary=options.vocabulary,
        quantize=options.quantize,
        draft_vocabulary=options.draft_vocabulary,
    )


def vocabulary_facts(drafter: Drafter | None) -> dict[str, Any] | None:
    """How a causal LM's vocabulary goes with the target's: mode, tokens in common, a note where they differ."""
    return drafter.vocabularies.facts() if isinstance(drafter, CausalLMDrafter) else None


def acceptance_record(acceptance: str) -> dict[str, Any]:
    """The acceptance rule for a result's settings, marked lossy where it is."""
    if acceptance == "lossless":
        return {"rule": acceptance, "lossless": True}
    return {"rule": acceptance, "lossless": False, "threshold": POSTERIOR_THRESHOLD, "alpha": POSTERIOR_ALPHA}


def drafting_engine(target: Target, drafter: Drafter, options: Drafting, wished: int | None = None) -> Engine:
    """An engine that drafts as asked; `wished` tokens (a scenario's K) where `-K` does not say.

    Raises `SpecdoctorError` for a threshold on a drafter without a confidence.
    """
    K = options.draft_tokens or (min(wished, drafter.max_draft) if wished else None)
    schedule = _threshold(drafter, options)
    if options.dynamic_k != "adaptive":
        return Engine(
            target, drafter, draft_tokens=K, schedule=schedule, acceptance=options.acceptance, arm=drafter.name
        )
    most = K or drafter.max_draft
    lengths = adaptive(min(drafter.default_draft, most), most)
    return Engine(
        target,
        drafter,
        draft_tokens=most,
        schedule=schedule,
        draft_length=lengths,
        acceptance=options.acceptance,
        arm=drafter.name,
    )


def tree_engine(target: Target, drafter: Drafter, tree: Tree) -> Engine:
    """An engine whose drafter proposes trees of one shape; its arm is named by drafter and shape."""
    return Engine(target, drafter, tree=tree, arm=f"{drafter.name}-tree-{tree.label}")


def _threshold(drafter: Drafter, options: Drafting) -> Schedule | None:
    """Where a draft ends for want of confidence: in the drafting of a causal LM, after that of any other."""
    threshold, option = options.threshold, f"--confidence-threshold {options.threshold}"
    if threshold is None and options.dynamic_k == "threshold":
        threshold, option = DEFAULT_THRESHOLD, "--dynamic-k threshold"
    if threshold is None:
        return None
    if isinstance(drafter, CausalLMDrafter):
        drafter.stop_below = threshold
        return None
    if getattr(drafter.spec, "confidence", None) is None:
        raise SpecdoctorError(
            f"{option}: the drafter {drafter.name} has no confidence head; leave the option out or leave the drafter "
            "out"
        )
    return confidence_threshold(threshold)
