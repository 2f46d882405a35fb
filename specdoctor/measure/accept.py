"""`specdoctor accept`: acceptance from texts that the target wrote, without decoding with the drafter.

Contract: `measure_acceptance` goes through prompts in order; each is looked at by every drafter. It stops at the end of
the prompts, when `precision` is reached for every drafter, or when `budget` seconds are spent, and says which. Texts
come from a corpus, which grows by what is missing. Ctrl-C keeps what is complete.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specdoctor.drafters.block import BlockDrafter
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.accept_pass import AcceptancePass, PassOptions
from specdoctor.measure.bench import Progress
from specdoctor.measure.corpus import BATCH, Corpus, CorpusText
from specdoctor.measure.prompts import Prompt
from specdoctor.metrics.accept_summary import AcceptanceFigures, by_anchor, by_round
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.text_acceptance import TextAcceptance
from specdoctor.metrics.whatif import Variant

LOOKAHEAD = 8  # at least: a corpus should serve drafters with a longer block as well
TREE_WIDTH = 8
DRAFT_TEMPERATURES = ("0", "0.5x", "0.7x", "1x", "1.3x")  # tried beside the run's own, where the target samples
GROUP = 8  # prompts between two looks at the interval
FEWEST = 8  # prompts before an interval is believed


@dataclass(slots=True)
class AcceptSettings:
    """What was asked for."""

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    draft_tokens: Mapping[str, int] = field(default_factory=dict)  # K by drafter; missing: its most
    confidence_threshold: float | None = None
    what_if: bool = True
    confidence: bool = True  # follow rejected drafts where the confidence head reads them
    draft_temperatures: tuple[str, ...] | None = None  # None: the usual ones when sampling, none in greedy
    anchors: int | None = None
    repeats: int = 1  # texts of a prompt
    precision: float | None = None  # half-width of the interval of tau_step over its value
    budget: float | None = None  # seconds
    seed: int = 0

    def check(self) -> None:
        """Raise for what cannot be."""
        for label in self.draft_temperatures or ():
            draft_temperature(self.sampling, label)
        for name, value in (("--precision", self.precision), ("--budget", self.budget)):
            if value is not None and not value > 0:
                raise SpecdoctorError(f"{name} {value}: expected a number above 0")
        if self.repeats > 1 and self.sampling.greedy:
            raise SpecdoctorError(
                f"--repeats {self.repeats}: a greedy target writes one text a prompt; set --temperature, or drop it"
            )
        if self.anchors is not None and self.precision is not None:
            raise SpecdoctorError("--precision is about tau_step, which a sample of --anchors does not show; drop one")


@dataclass(slots=True)
class AcceptArm:
    """One drafter and what was learned about it."""

    name: str
    drafter: BlockDrafter
    draft_tokens: int
    variant: Variant  # the headline
    texts: list[TextAcceptance] = field(default_factory=list)
    seconds: float = 0.0  # spent in passes

    def tau(self, seed: int) -> Estimate:
        """tau_step so far; by anchor where anchors were sampled."""
        whole = all(text.whole for text in self.texts)
        return AcceptanceFigures(self.texts, self.variant, by_round if whole else by_anchor, seed).tau()


@dataclass(slots=True)
class AcceptRun:
    """Everything measured. A text counts for all arms or not at all."""

    target: Target
    arms: list[AcceptArm]
    settings: AcceptSettings
    corpus: Corpus
    texts_written: int = 0  # texts that had to be decoded first
    writing_seconds: float = 0.0
    stopped: str = "prompts"  # prompts (all done), precision, budget, interrupted
    seconds: float = 0.0

    @property
    def precise(self) -> bool:
        """Whether the precision asked for is reached, on enough prompts to believe an interval."""
        precision = self.settings.precision
        if precision is None or len({text.prompt_id for text in self.arms[0].texts}) < FEWEST:
            return False
        return all(half_width(arm.tau(self.settings.seed)) <= precision for arm in self.arms)


class _BudgetSpentError(Exception):
    """Leaves the writing of texts when time is up and there is something to report."""


def measure_acceptance(
    target: Target,
    drafters: Mapping[str, BlockDrafter],
    prompts: Sequence[Prompt],
    corpus: Corpus,
    settings: AcceptSettings,
    on_progress: Callable[[Progress], None] | None = None,
) -> AcceptRun:
    """Measure acceptance of `drafters` on the texts of `prompts`; see the module's contract."""
    settings.check()
    run = AcceptRun(target, [_arm(name, drafter, settings) for name, drafter in drafters.items()], settings, corpus)
    wanted = [(prompt, repeat) for prompt in prompts for repeat in range(settings.repeats)]
    measuring = _Measuring(run, len(wanted), on_progress)
    try:
        while measuring.done < len(wanted):
            for text in measuring.texts(_next_group(corpus, wanted[measuring.done :], settings)):
                measuring.look(text)
                if measuring.done < len(wanted):
                    measuring.heed_budget()
            if measuring.done < len(wanted) and run.precise:
                run.stopped = "precision"
                break
    except _BudgetSpentError:
        run.stopped = "budget"
    except KeyboardInterrupt:
        run.stopped = "interrupted"
    run.seconds = measuring.elapsed
    return run


class _Measuring:
    """A run on its way: the clock, the passes, and who wants to know."""

    def __init__(self, run: AcceptRun, total: int, on_progress: Callable[[Progress], None] | None) -> None:
        self.run, self.total, self.done = run, total, 0
        self._on_progress = on_progress
        self._began = time.perf_counter()
        settings = run.settings
        self._passes = [
            AcceptancePass(run.target, arm.drafter, settings.sampling, _options(arm, settings)) for arm in run.arms
        ]

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def heed_budget(self) -> None:
        """Leave when time is up and there is something to report."""
        budget = self.run.settings.budget
        if budget is not None and self.done and self.elapsed >= budget:
            raise _BudgetSpentError

    def texts(self, group: Sequence[tuple[Prompt, int]]) -> list[CorpusText]:
        """The texts of a group, those that are missing written first."""
        run, start, before = self.run, time.perf_counter(), self.run.corpus.written
        produced = 0

        def on_tokens(count: int) -> None:
            nonlocal produced
            produced += count
            self.heed_budget()
            self._tell("writing texts", produced / (time.perf_counter() - start))

        try:
            lookahead = max(LOOKAHEAD, *(arm.drafter.max_draft for arm in run.arms))
            return run.corpus.ensure(run.target, group, run.settings.max_new_tokens, lookahead, on_tokens)
        finally:
            run.texts_written += run.corpus.written - before
            run.writing_seconds += time.perf_counter() - start

    def look(self, text: CorpusText) -> None:
        """Pass over one text with every drafter; it counts for all of them or for none."""
        results = []
        for arm, one_pass in zip(self.run.arms, self._passes, strict=True):
            start = time.perf_counter()
            results.append(one_pass.run(text, text.length(self.run.settings.max_new_tokens)))
            arm.seconds += time.perf_counter() - start
        for arm, result in zip(self.run.arms, results, strict=True):
            arm.texts.append(result)
        self.done += 1
        self._tell("looking at texts", None)

    def _tell(self, what: str, tokens_per_s: float | None) -> None:
        if self._on_progress:
            self._on_progress(Progress(self.done, self.total, what, tokens_per_s, None))


def _arm(name: str, drafter: BlockDrafter, settings: AcceptSettings) -> AcceptArm:
    most = drafter.max_draft
    K = settings.draft_tokens.get(name, most)
    if not 0 < K <= most:
        raise SpecdoctorError(f"-K {K}: {name} proposes 1 to {most} tokens in a round")
    threshold = settings.confidence_threshold
    if threshold is not None and drafter.confidence is None:
        raise SpecdoctorError(f"--confidence-threshold {threshold}: the drafter {name} has no confidence head")
    return AcceptArm(name, drafter, K, Variant("headline", K, threshold))


def _options(arm: AcceptArm, settings: AcceptSettings) -> PassOptions:
    return PassOptions(
        draft_tokens=arm.draft_tokens,
        depth=arm.drafter.max_draft if settings.what_if else arm.draft_tokens,
        temperatures=_temperatures(settings) if settings.what_if else (),
        tree_width=TREE_WIDTH if settings.what_if else 0,
        anchors=settings.anchors,
        drafted_paths=settings.confidence,
        seed=settings.seed,
    )


def _temperatures(settings: AcceptSettings) -> tuple[tuple[str, float], ...]:
    """Draft temperatures to try, with their values; the run's own is known anyway."""
    sampling = settings.sampling
    labels = settings.draft_temperatures
    if labels is None:
        labels = () if sampling.greedy else DRAFT_TEMPERATURES
    values = {label: draft_temperature(sampling, label) for label in labels}
    return tuple((label, value) for label, value in values.items() if value != sampling.drafting_temperature)


def draft_temperature(sampling: Sampling, label: str) -> float:
    """Value of a draft temperature such as 0.5 or 0.7x beside the target's."""
    return Sampling(sampling.temperature, draft_temperature=label).drafting_temperature


def _next_group(
    corpus: Corpus, wanted: Sequence[tuple[Prompt, int]], settings: AcceptSettings
) -> Sequence[tuple[Prompt, int]]:
    """Texts until the next look at the interval; where they must be written first, a whole batch of them."""
    group = wanted[:GROUP]
    there = all(corpus.find(prompt, repeat, settings.max_new_tokens) for prompt, repeat in group)
    return group if there or settings.budget is not None else wanted[:BATCH]


def half_width(tau: Estimate) -> float:
    """Half the interval over the value."""
    if not tau.value or tau.low is None or tau.high is None:
        return float("inf")
    return (tau.high - tau.low) / 2 / tau.value
