"""What a measurement runs on: target, drafters, prompts and sampling settings, loaded and checked against one another.

Contract: every option is checked before anything is decoded, and what was decided (scenario, template, arms, sampling)
is described for the result's `settings`.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdoctor.engine.engine import Engine
from specdoctor.engine.target import Target
from specdoctor.engine.trees import Tree, parse_tree
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.arms import Arm, EngineArm, HuggingFaceArm
from specdoctor.measure.bench import BASELINE, BenchSettings
from specdoctor.measure.drafting import (
    Drafting,
    DraftSource,
    acceptance_record,
    draft_name,
    drafting_engine,
    find_draft,
    open_drafter,
    tree_engine,
)
from specdoctor.measure.prompts import (
    Prompt,
    RawPrompt,
    check_ids,
    interleave,
    load_bundled,
    load_jsonl,
    load_tokenizer,
    render,
    template_record,
)
from specdoctor.measure.scenarios import Scenario, load_scenario

SIBLINGS = ("sampled", "likeliest")


@dataclass(slots=True)
class BenchRequest:
    """The options of a measuring command, as given; None means not given."""

    target: str
    drafts: list[str] = field(default_factory=list)
    drafts_option: str = "--draft "  # before each on the command line; empty where they are arguments
    arms: list[str] = field(default_factory=list)
    hf_baseline: bool = False
    prompts: Path | None = None
    raw_prompts: list[RawPrompt] | None = None  # already read: in the place of `prompts` and `categories`
    categories: list[str] = field(default_factory=list)
    max_prompts: int | None = None
    scenario: str = ""
    template: str = "auto"
    draft_tokens: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    draft_temperature: str | None = None
    confidence_threshold: float | None = None
    dynamic_k: str = "constant"
    vocabulary: str = "auto"
    draft_quantize: str | None = None
    draft_vocabulary: str | None = None
    trees: list[str] = field(default_factory=list)
    siblings: str = "sampled"
    lossy_typical_acceptance: bool = False
    ignore_stop: bool = False
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    draft_device: str = "same"
    draft_dtype: str = "same"
    attention: str = "auto"
    records: Path | None = None


@dataclass(slots=True)
class Workload:
    """Loaded and checked: ready to run."""

    target: Target
    arms: list[Arm]
    prompts: list[Prompt]
    settings: BenchSettings
    described: dict[str, Any]  # for the result's `settings`


def load_workload(request: BenchRequest) -> Workload:
    """Load what `request` names. Raises `SpecdoctorError` for anything that does not fit."""
    scenario = load_scenario(request.scenario) if request.scenario else None
    settings = _settings(request, scenario)
    settings.sampling(0)  # refuse bad sampling settings before anything is loaded
    _check_acceptance(request, settings)
    raw = _raw_prompts(request, scenario)
    sources = draft_sources(request)
    wanted = _wanted_arms(request, list(sources))
    sources = {name: source for name, source in sources.items() if name in wanted}
    drafting = _drafting(request, scenario)
    _drafting(request, None).check(list(sources.values()))
    folder = resolve_model(request.target)
    target = Target.load(folder, request.device, request.dtype, request.attention)
    tokenizer = load_tokenizer(folder)
    template = template_record(tokenizer, request.template)
    prompts = render(raw, tokenizer, request.template)
    check_ids(prompts, target.vocab_size)
    _check_lengths(prompts, target)
    arms = _arms(target, wanted, sources, drafting, scenario.K if scenario else None)
    described = asdict(settings) | {
        "target": request.target,
        "drafts": {name: str(source) for name, source in sources.items()},
        "template": asdict(template),
        "scenario": scenario.name if scenario else None,
        "prompts": str(request.prompts) if request.prompts else "bundled",
        "prompt_hashes": {prompt.id: prompt.text_hash for prompt in prompts},
        "draft_tokens": {arm.name: arm.engine.draft_tokens for arm in arms if isinstance(arm, EngineArm)},
        "confidence_threshold": drafting.threshold,
        "dynamic_k": request.dynamic_k,
        "trees": list(request.trees),
        "siblings": request.siblings,
        "vocabulary": request.vocabulary,
        "draft_quantize": request.draft_quantize,
        "draft_vocabulary": request.draft_vocabulary,
        "acceptance": acceptance_record(drafting.acceptance),
        "draft_device": request.draft_device,
        "draft_dtype": request.draft_dtype,
    }
    return Workload(target, arms, prompts, settings, described)


def _settings(request: BenchRequest, scenario: Scenario | None) -> BenchSettings:
    """Options over the scenario over the defaults."""
    if request.seed < 0:
        raise SpecdoctorError(f"--seed {request.seed}: expected 0 or more")
    preset = BenchSettings()
    if scenario is not None:
        preset.max_new_tokens, preset.temperature = scenario.max_new_tokens, scenario.temperature
    temperature = preset.temperature if request.temperature is None else request.temperature
    if scenario is not None and scenario.draft_temperature is not None:
        preset.draft_temperature = f"{scenario.draft_temperature_at(temperature):g}"
    return BenchSettings(
        max_new_tokens=request.max_new_tokens or preset.max_new_tokens,
        temperature=temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        draft_temperature=request.draft_temperature or preset.draft_temperature,
        seed=request.seed,
        ignore_stop=request.ignore_stop,
    )


def _raw_prompts(request: BenchRequest, scenario: Scenario | None) -> list[RawPrompt]:
    if request.raw_prompts is not None:
        return request.raw_prompts
    if request.prompts is not None:
        if request.categories:
            raise SpecdoctorError("--prompts and --categories: give one of them; a file brings its own categories")
        return interleave(load_jsonl(request.prompts), request.max_prompts)
    categories = request.categories or (list(scenario.categories) if scenario else ["code", "chat", "math"])
    return load_bundled(categories, request.max_prompts)


def draft_sources(request: BenchRequest) -> dict[str, DraftSource]:
    """Arm name to drafter; names default to `draft_name`."""
    sources: dict[str, DraftSource] = {}
    option = request.drafts_option
    for text in request.drafts:
        name, given, path = text.partition("=")
        named = bool(given) and os.sep not in name
        source = find_draft(path if named else text)
        name = name if named else draft_name(source)
        if not name:
            raise SpecdoctorError(f"{option}{text}: no name before the =; write NAME=FOLDER, or the folder alone")
        if name in (BASELINE, "hf") or name in sources:
            raise SpecdoctorError(f"{option}{text}: the arm name {name} is taken; name it with {option}NAME={source}")
        sources[name] = source
    return sources


def _wanted_arms(request: BenchRequest, drafts: list[str]) -> list[str]:
    """The arms to run: the baseline, then what was asked for."""
    known = [BASELINE, *(["hf"] if request.hf_baseline else []), *drafts]
    unknown = [name for name in request.arms if name not in known]
    if unknown:
        raise SpecdoctorError(f"--arms {unknown[0]}: no such arm, expected some of {', '.join(known)}")
    return [name for name in known if name == BASELINE or not request.arms or name in request.arms]


def _drafting(request: BenchRequest, scenario: Scenario | None) -> Drafting:
    """How to draft: options over the scenario's threshold."""
    threshold = request.confidence_threshold
    if threshold is None and scenario is not None:
        threshold = scenario.confidence_threshold
    return Drafting(
        draft_tokens=request.draft_tokens,
        dynamic_k=request.dynamic_k,
        threshold=threshold,
        vocabulary=request.vocabulary,
        quantize=request.draft_quantize,
        draft_vocabulary=request.draft_vocabulary,
        acceptance="typical" if request.lossy_typical_acceptance else "lossless",
        trees=_trees(request),
        device=request.draft_device,
        dtype=request.draft_dtype,
    )


def _trees(request: BenchRequest) -> tuple[Tree, ...]:
    if request.siblings not in SIBLINGS:
        raise SpecdoctorError(f"--siblings {request.siblings}: expected {' or '.join(SIBLINGS)}")
    trees = tuple(parse_tree(text, request.siblings == "sampled") for text in request.trees)
    for option, given in (
        ("--lossy-typical-acceptance", request.lossy_typical_acceptance),
        ("--confidence-threshold", request.confidence_threshold is not None),
        ("--dynamic-k", request.dynamic_k != "constant"),
    ):
        if trees and given:
            raise SpecdoctorError(f"--tree and {option}: the option is for chains; leave one of them out")
    return trees


def _check_acceptance(request: BenchRequest, settings: BenchSettings) -> None:
    if not request.lossy_typical_acceptance:
        return
    if settings.temperature == 0:
        raise SpecdoctorError(
            "--lossy-typical-acceptance: a rule for sampling, and the temperature is 0; give --temperature, or leave "
            "it out"
        )
    if not request.drafts:
        raise SpecdoctorError("--lossy-typical-acceptance: no drafter to apply it to; give one with --draft")


def _arms(
    target: Target, wanted: list[str], sources: dict[str, DraftSource], drafting: Drafting, scenario_K: int | None
) -> list[Arm]:
    drafters = {name: open_drafter(source, target, drafting, name) for name, source in sources.items()}
    if drafters:
        drafting.check_drafters(list(drafters.values()))
    arms: list[Arm] = []
    for name in wanted:
        if name == BASELINE:
            arms.append(EngineArm(BASELINE, Engine(target, arm=BASELINE)))
        elif name == "hf":
            arms.append(HuggingFaceArm(target))
        else:
            arms.append(EngineArm(name, drafting_engine(target, drafters[name], drafting, scenario_K)))
            for tree in drafting.trees:
                engine = tree_engine(target, drafters[name], tree)
                arms.append(EngineArm(engine.arm, engine))
    return arms


def _check_lengths(prompts: list[Prompt], target: Target) -> None:
    """Refuse a prompt that does not fit before anything is decoded: a long run must not die in its middle."""
    for prompt in prompts:
        if len(prompt.ids) >= target.max_positions:
            raise SpecdoctorError(
                f"{prompt.source or prompt.id}: prompt {prompt.id!r} has {len(prompt.ids)} tokens, but {target.name} "
                f"has {target.max_positions} positions (max_position_embeddings); shorten it or leave it out"
            )
