"""What a measurement runs on: target, drafters, prompts and sampling settings, loaded and checked against one another.

Contract: every option is checked before anything is decoded, and what was decided (scenario, template, arms, sampling)
is described for the result's `settings`.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.arms import Arm, EngineArm, HuggingFaceArm
from specdoctor.measure.bench import BASELINE, BenchSettings
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
from specdoctor.scheduling.confidence import confidence_threshold


@dataclass(slots=True)
class BenchRequest:
    """The options of a measuring command, as given; None means not given."""

    target: str
    drafts: list[str] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    hf_baseline: bool = False
    prompts: Path | None = None
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
    raw = _raw_prompts(request, scenario)
    folders = _draft_folders(request)
    wanted = _wanted_arms(request, list(folders))
    folder = resolve_model(request.target)
    target = Target.load(folder, request.device, request.dtype, request.attention)
    tokenizer = load_tokenizer(folder)
    template = template_record(tokenizer, request.template)
    prompts = render(raw, tokenizer, request.template)
    check_ids(prompts, target.vocab_size)
    _check_lengths(prompts, target)
    arms = _arms(request, scenario, target, folders, wanted)
    described = asdict(settings) | {
        "target": request.target,
        "drafts": {name: str(path) for name, path in folders.items() if name in wanted},
        "template": asdict(template),
        "scenario": scenario.name if scenario else None,
        "prompts": str(request.prompts) if request.prompts else "bundled",
        "prompt_hashes": {prompt.id: prompt.text_hash for prompt in prompts},
        "draft_tokens": {arm.name: arm.engine.draft_tokens for arm in arms if isinstance(arm, EngineArm)},
        "confidence_threshold": _threshold(request, scenario),
        "draft_device": request.draft_device,
        "draft_dtype": request.draft_dtype,
    }
    return Workload(target, arms, prompts, settings, described)


def _settings(request: BenchRequest, scenario: Scenario | None) -> BenchSettings:
    """Options over the scenario over the defaults."""
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
    if request.prompts is not None:
        if request.categories:
            raise SpecdoctorError("--prompts and --categories: give one of them; a file brings its own categories")
        return interleave(load_jsonl(request.prompts), request.max_prompts)
    categories = request.categories or (list(scenario.categories) if scenario else ["code", "chat", "math"])
    return load_bundled(categories, request.max_prompts)


def _draft_folders(request: BenchRequest) -> dict[str, Path]:
    """Arm name to folder; names default to the folder's own."""
    folders: dict[str, Path] = {}
    for text in request.drafts:
        name, given, path = text.partition("=")
        named = bool(given) and os.sep not in name
        folder = resolve_model(path if named else text)
        name = name if named else folder.resolve().name
        if not name:
            raise SpecdoctorError(f"--draft {text}: no name before the =; write NAME=FOLDER, or the folder alone")
        if name in (BASELINE, "hf") or name in folders:
            raise SpecdoctorError(f"--draft {text}: the arm name {name} is taken; name it with --draft NAME={folder}")
        folders[name] = folder
    return folders


def _wanted_arms(request: BenchRequest, drafts: list[str]) -> list[str]:
    """The arms to run: the baseline, then what was asked for."""
    known = [BASELINE, *(["hf"] if request.hf_baseline else []), *drafts]
    unknown = [name for name in request.arms if name not in known]
    if unknown:
        raise SpecdoctorError(f"--arms {unknown[0]}: no such arm, expected some of {', '.join(known)}")
    return [name for name in known if name == BASELINE or not request.arms or name in request.arms]


def _threshold(request: BenchRequest, scenario: Scenario | None) -> float | None:
    if request.confidence_threshold is not None:
        return request.confidence_threshold
    return scenario.confidence_threshold if scenario else None


def _arms(
    request: BenchRequest, scenario: Scenario | None, target: Target, folders: dict[str, Path], wanted: list[str]
) -> list[Arm]:
    threshold = _threshold(request, scenario)
    schedule = None if threshold is None else confidence_threshold(threshold)
    arms: list[Arm] = []
    for name in wanted:
        if name == BASELINE:
            arms.append(EngineArm(BASELINE, Engine(target, arm=BASELINE)))
        elif name == "hf":
            arms.append(HuggingFaceArm(target))
        else:
            drafter = load_drafter(
                folders[name], target, name=name, device=request.draft_device, dtype=request.draft_dtype
            )
            if schedule is not None and getattr(drafter.spec, "confidence", None) is None:
                raise SpecdoctorError(
                    f"--confidence-threshold {threshold}: the drafter {name} has no confidence head; leave the option "
                    "out or leave the drafter out"
                )
            K = request.draft_tokens or (min(scenario.K, drafter.max_draft) if scenario else None)
            arms.append(EngineArm(name, Engine(target, drafter, draft_tokens=K, schedule=schedule, arm=name)))
    return arms


def _check_lengths(prompts: list[Prompt], target: Target) -> None:
    """Refuse a prompt that does not fit before anything is decoded: a long run must not die in its middle."""
    for prompt in prompts:
        if len(prompt.ids) >= target.max_positions:
            raise SpecdoctorError(
                f"{prompt.source or prompt.id}: prompt {prompt.id!r} has {len(prompt.ids)} tokens, but {target.name} "
                f"has {target.max_positions} positions (max_position_embeddings); shorten it or leave it out"
            )
