"""`gate.yaml`: the options of `specdoctor gate` in a file. Options on the command line win over it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from specdoctor.errors import SpecdoctorError
from specdoctor.measure.comparability import STRICT, definitions_of
from specdoctor.measure.prompt_file import did_you_mean
from specdoctor.metrics.gate import MARGINS
from specdoctor.metrics.sums import METRICS


class GateConfig(BaseModel):
    """Every option; paths are relative to the working directory, as on the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    run: str | None = None
    baseline: str | None = None
    arm: str | None = None
    metric: list[str] = ["tau"]
    margin: dict[str, float] = {}
    allow: list[str] = []
    inconclusive: Literal["fail", "pass", "warn"] = "fail"
    seed: int = 0
    json_path: str | None = None
    junit: str | None = None
    markdown: str | None = None
    github: bool = False

    @field_validator("metric", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, metrics: list[str]) -> list[str]:
        for metric in metrics:
            if metric not in METRICS:
                raise ValueError(f"one of {', '.join(METRICS)}, found {metric!r}{did_you_mean(metric, METRICS)}")
        return metrics

    @field_validator("margin", mode="before")
    @classmethod
    def _number_or_map(cls, value: Any) -> Any:
        return every_margin(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("margin")
    @classmethod
    def _known_margin(cls, margins: dict[str, float]) -> dict[str, float]:
        for metric, margin in margins.items():
            if metric not in METRICS:
                raise ValueError(f"names of {', '.join(METRICS)}, found {metric!r}{did_you_mean(metric, METRICS)}")
            if not margin > 0:
                raise ValueError(f"numbers above 0, found {metric}: {margin}")
        return margins

    @field_validator("allow")
    @classmethod
    def _known_key(cls, keys: list[str]) -> list[str]:
        for key in keys:
            if key not in STRICT:
                raise ValueError(f"names of {', '.join(STRICT)}, found {key!r}{did_you_mean(key, STRICT)}")
        return keys


def every_margin(margin: float) -> dict[str, float]:
    """One margin for every relative metric; that of ece is absolute and keeps its own."""
    return {metric: float(margin) for metric in MARGINS if metric != "ece"}


def parse_margins(texts: list[str]) -> dict[str, float]:
    """`0.05` (every relative metric) and `METRIC=0.02`, the latter winning. Raises for what is neither."""
    general: dict[str, float] = {}
    named: dict[str, float] = {}
    for text in texts:
        metric, equals, number = text.rpartition("=")
        try:
            margin = float(number)
        except ValueError:
            raise SpecdoctorError(
                f"--margin: found {text!r}, expected a number or METRIC=NUMBER, such as 0.05"
            ) from None
        if not 0 < margin < float("inf"):
            raise SpecdoctorError(f"--margin: found {text!r}, expected a number above 0")
        if equals:
            definitions_of(metric)
            named[metric] = margin
        else:
            general = every_margin(margin)
    return general | named


def load_config(path: Path) -> GateConfig:
    """Read a gate.yaml. Raises one line with file, key, value and remedy."""
    if not path.is_file():
        raise SpecdoctorError(f"{path}: no such file; expected a YAML file, copy sample_configs/gate.yaml")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise SpecdoctorError(f"{where}: not YAML ({getattr(error, 'problem', None) or error})") from None
    if not isinstance(values, Mapping):
        raise SpecdoctorError(f"{path}: found {values!r}, expected 'key: value' lines; copy sample_configs/gate.yaml")
    values = {"json_path" if key == "json" else key: value for key, value in values.items()}
    try:
        return GateConfig.model_validate(values)
    except ValidationError as error:
        raise SpecdoctorError(f"{path}: {_explain(error)}") from None


def with_options(config: GateConfig, options: Mapping[str, Any]) -> GateConfig:
    """A configuration with the given options over it; raises one line that names the option."""
    try:
        return GateConfig.model_validate(config.model_dump() | dict(options))
    except ValidationError as error:
        raise SpecdoctorError(f"--{_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    first, *others = error.errors()
    # A list or mapping has one line for itself: which of its items it was stands in the message.
    key = str(first["loc"][0]).replace("json_path", "json") if first["loc"] else ""
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        known = ["json" if name == "json_path" else name for name in GateConfig.model_fields]
        return f"unknown key {key}{did_you_mean(key, known)}, expected one of {', '.join(known)}; rename it{more}"
    expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    found = ":" if first["type"] == "value_error" else f" is {first['input']!r},"  # a rule of ours names the value
    return f"{key}{found} expected {expected}; change it{more}"
