"""Scenarios: what to decode and how, for one kind of use, as YAML that a user can copy.

Contract: `load_scenario` returns a valid `Scenario` or raises one line that names file, line and key. Presets lie in
`sample_configs/scenarios/`. A scenario only states wishes: what a drafter cannot do (K beyond its block size, a
confidence threshold without a confidence head) is for the code that puts the two together to refuse.
"""

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specdoctor.errors import SpecdoctorError
from specdoctor.measure.prompt_file import did_you_mean
from specdoctor.measure.prompts import BUNDLED_CATEGORIES

_CONFIG = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
Positive = Annotated[int, Field(ge=1)]


class DraftTemperature(BaseModel):
    """Temperature of the drafter: a number of its own, or a factor of the target's. Either is lossless, because the
    acceptance rule uses the distribution that the draft was really drawn from."""

    model_config = _CONFIG

    absolute: float | None = Field(default=None, ge=0)
    factor: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_of_two(self) -> "DraftTemperature":
        if (self.absolute is None) == (self.factor is None):
            raise ValueError("exactly one of absolute and factor")
        return self


class Scenario(BaseModel):
    """One kind of use. `K` is the proposal length, `K_range` where it is sensible to vary it."""

    model_config = _CONFIG

    name: str
    description: str = ""
    categories: Annotated[list[str], Field(min_length=1)]  # bundled prompts, used when no prompt file is given
    K: Positive  # draft tokens a round
    K_range: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None  # lowest, highest
    temperature: float = Field(ge=0)  # of the target; 0 = greedy
    draft_temperature: DraftTemperature | None = None  # None: the target's
    max_new_tokens: Positive
    confidence_threshold: float | None = Field(default=None, ge=0, le=1)  # None: verify the whole draft

    @field_validator("categories")
    @classmethod
    def _bundled(cls, categories: list[str]) -> list[str]:
        for category in categories:
            if category not in BUNDLED_CATEGORIES:
                hint = did_you_mean(category, BUNDLED_CATEGORIES)
                raise ValueError(f"one of {', '.join(BUNDLED_CATEGORIES)}, found {category!r}{hint}")
        return categories

    @model_validator(mode="after")
    def _within_range(self) -> "Scenario":
        if self.K_range and not self.K_range[0] <= self.K <= self.K_range[1]:
            raise ValueError(f"K within K_range, found K {self.K} and K_range {self.K_range}")
        return self

    def draft_temperature_at(self, temperature: float) -> float:
        """The drafter's temperature when the target samples at `temperature`; 0 beside a greedy target, where any
        other draft than the likeliest one is accepted less often."""
        if temperature == 0 or self.draft_temperature is None:
            return temperature
        if self.draft_temperature.absolute is not None:
            return self.draft_temperature.absolute
        assert self.draft_temperature.factor is not None
        return self.draft_temperature.factor * temperature


def scenario_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Load a preset by name, or a YAML file by path; a preset wins over a file of the same name.

    Raises:
        SpecdoctorError: unknown preset, unreadable file, unknown or missing key, value out of range.
    """
    wanted, names = str(name_or_path), scenario_names()
    if wanted in names:
        return _parse((_folder() / f"{wanted}.yaml").read_bytes(), f"{wanted}.yaml", wanted)
    path = Path(name_or_path)
    if not path.is_file():
        raise SpecdoctorError(
            f"scenario {wanted!r} is neither a file nor one of {', '.join(names)}{did_you_mean(wanted, names)}; "
            "give a preset's name or the path of a YAML file"
        )
    return _parse(path.read_bytes(), wanted, path.stem)


def _folder() -> Any:
    return files("specdoctor.sample_configs") / "scenarios"


def _parse(data: bytes, file: str, name: str) -> Scenario:
    try:
        text = data.decode("utf-8-sig")
        values, lines = yaml.safe_load(text), _key_lines(text, file)
    except UnicodeDecodeError as error:
        raise SpecdoctorError(f"{file}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecdoctorError(
            f"{where}: not YAML: {problem}; compare with a preset in sample_configs/scenarios"
        ) from None
    if not isinstance(values, dict):
        raise SpecdoctorError(
            f"{file}: found {_shown(values)}, expected 'key: value' lines; copy a preset from sample_configs/scenarios"
        )
    try:
        return Scenario.model_validate({"name": name, **values})
    except ValidationError as error:
        raise SpecdoctorError(_explain(error, file, lines)) from None


def _key_lines(text: str, file: str) -> dict[str, int]:
    """Line of each top-level key; refuses a key that is given twice, of which YAML would silently keep the last."""
    lines: dict[str, int] = {}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if key.value in lines:
            raise SpecdoctorError(
                f"{file}:{line}: {key.value} is given twice, first at line {lines[key.value]}; keep one"
            )
        lines[key.value] = line
    return lines


def _explain(error: ValidationError, file: str, lines: dict[str, int]) -> str:
    """The first error as one line: place, key, found, expected, what to do; and how many more there are."""
    first, *others = error.errors()
    location = [str(part) for part in first["loc"]]
    key = ".".join(location)
    where = f"{file}:{lines[location[0]]}" if location and location[0] in lines else file
    expected = re.sub("^(Value error, |Input should be |List should have )", "", first["msg"])
    if first["type"] == "extra_forbidden":
        known = (DraftTemperature if location[0] == "draft_temperature" else Scenario).model_fields
        problem = f"unknown key {key}{did_you_mean(location[-1], known)}, expected one of {', '.join(known)}; rename it"
    elif first["type"] == "missing":
        problem = f"{key} is missing; add it, as in the presets of sample_configs/scenarios"
    elif first["type"] == "value_error":  # from a rule of ours over several values
        problem = f"{key + ': ' if key else ''}expected {expected}; change it"
    elif first["type"] == "model_type":
        problem = f"{key} is {_shown(first['input'])}, expected a mapping; write {{absolute: 0.4}} or {{factor: 0.6}}"
    else:
        problem = f"{key} is {_shown(first['input'])}, expected {expected}; change the value"
    return f"{where}: {problem}" + (f" (and {len(others)} more)" if others else "")


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
