"""The true tau of a drafter in training, greedy, on prompts that it is not trained on.

Contract: block drafters are judged by `measure.accept` (exact, without decoding; the target's answers are written once,
into the run's folder), others by decoding with the engine.
"""

from pathlib import Path

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.target import Target
from specdoctor.measure.accept import AcceptSettings, measure_acceptance
from specdoctor.measure.arms import EngineArm
from specdoctor.measure.corpus import Corpus, Manifest
from specdoctor.measure.prompts import (
    Prompt,
    TemplateRecord,
    check_ids,
    interleave,
    load_bundled,
    load_jsonl,
    load_tokenizer,
    render,
    template_record,
)
from specdoctor.metrics.accept_summary import AcceptanceFigures, by_round
from specdoctor.metrics.acceptance import by_category, tau_step
from specdoctor.training.recipe import Recipe


class HeldOutPrompts:
    """Prompts and how to judge a drafter on them."""

    def __init__(self, recipe: Recipe, target: Target, folder: Path) -> None:
        """`folder` keeps the target's answers. Raises `SpecdoctorError` for prompts that cannot be used."""
        self.target, self.settings, self.folder = target, recipe.held_out, folder
        tokenizer = None
        if recipe.template != "bytes" and target.folder is not None:
            tokenizer = load_tokenizer(target.folder)
        self.template: TemplateRecord = template_record(tokenizer, recipe.template)
        wanted = recipe.held_out
        if wanted.prompts is None:
            raw = load_bundled(wanted.categories, wanted.max_prompts)
        else:
            raw = interleave(load_jsonl(wanted.prompts), wanted.max_prompts)
        self.prompts: list[Prompt] = render(raw, tokenizer, recipe.template)
        check_ids(self.prompts, target.vocab_size)
        room = target.max_positions - wanted.max_new_tokens - 1
        self.prompts = [prompt for prompt in self.prompts if len(prompt.ids) <= room]

    def measure(self, drafter_folder: Path) -> dict[str, float]:
        """`tau_held_out`, and the same by category."""
        target = Target(self.target.model, self.target.folder)  # its cache is freed when the figures are there
        drafter = load_drafter(drafter_folder, target)
        by_name = self._accept(drafter) if isinstance(drafter, BlockDrafter) else self._decode(drafter, target)
        return {f"tau_{name}": value for name, value in by_name.items()}

    def _accept(self, drafter: BlockDrafter) -> dict[str, float]:
        sampling = Sampling()
        manifest = Manifest.of(self.target, self.template, sampling, self.target.stop_ids, 0)
        settings = AcceptSettings(
            sampling=sampling, max_new_tokens=self.settings.max_new_tokens, what_if=False, confidence=False
        )
        run = measure_acceptance(self.target, {"draft": drafter}, self.prompts, Corpus(self.folder, manifest), settings)
        if run.stopped == "interrupted":
            raise KeyboardInterrupt
        arm = run.arms[0]
        groups = {"held_out": arm.texts}
        for text in arm.texts:
            groups.setdefault(text.category, []).append(text)
        taus = {name: AcceptanceFigures(texts, arm.variant, by_round, 0).tau().value for name, texts in groups.items()}
        return {name: value for name, value in taus.items() if value is not None}

    def _decode(self, drafter: Drafter, target: Target) -> dict[str, float]:
        arm = EngineArm("draft", Engine(target, drafter))
        records = [
            record
            for prompt in self.prompts
            for record in arm.run(prompt, self.settings.max_new_tokens, Sampling(), self.target.stop_ids).records
        ]
        taus = {"held_out": tau_step(records).value}
        taus |= {name: tau_step(own).value for name, own in by_category(records).items()}
        return {name: value for name, value in taus.items() if value is not None}
