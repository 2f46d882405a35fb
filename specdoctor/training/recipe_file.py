"""Recipes on disk: YAML in, one clear line for what is wrong with it."""

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from specdoctor.errors import SpecdoctorError
from specdoctor.measure.prompt_file import did_you_mean
from specdoctor.training.recipe import Recipe

EXAMPLES = "sample_configs/train"


def load_recipe(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        SpecdoctorError: no such file, no YAML, a key that is unknown, missing, given twice or out of range.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecdoctorError(f"{path}: {error.strerror}; expected a recipe, copy one of {EXAMPLES}") from None
    except UnicodeDecodeError as error:
        raise SpecdoctorError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    try:
        values, lines = yaml.safe_load(text), _key_lines(text, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecdoctorError(f"{where}: not YAML: {problem}; compare with a recipe of {EXAMPLES}") from None
    if not isinstance(values, dict):
        raise SpecdoctorError(f"{path}: found {_shown(values)}, expected 'key: value' lines; copy one of {EXAMPLES}")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise SpecdoctorError(_explain(error, path, lines)) from None


def _key_lines(text: str, path: Path) -> dict[tuple[str, ...], int]:
    """Line of each key by its path; refuses a key that is given twice, of which YAML would silently keep the last."""
    lines: dict[tuple[str, ...], int] = {}

    def walk(node: Any, above: tuple[str, ...]) -> None:
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                walk(item, (*above, str(i)))
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            place, line = (*above, str(key.value)), key.start_mark.line + 1
            if place in lines:
                raise SpecdoctorError(
                    f"{path}:{line}: {'.'.join(place)} is given twice, first at line {lines[place]}; keep one"
                )
            lines[place] = line
            walk(value, place)

    walk(yaml.compose(text, Loader=yaml.SafeLoader), ())
    return lines


def _explain(error: ValidationError, path: Path, lines: dict[tuple[str, ...], int]) -> str:
    """The first error as one line: place, key, found, expected, what to do; and how many more there are."""
    first, *others = error.errors()
    location = tuple(str(part) for part in first["loc"])
    known_at = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in lines), None)
    where = f"{path}:{lines[known_at]}" if known_at else str(path)
    key = ".".join(location)
    expected = re.sub("^(Value error, |Input should be |List should have )", "", first["msg"])
    if first["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        problem = f"unknown key {key}{did_you_mean(location[-1], known)}, expected one of {', '.join(known)}; rename it"
    elif first["type"] == "missing":
        problem = f"{key} is missing; add it, as in the recipes of {EXAMPLES}"
    elif first["type"] == "value_error":  # from a rule of ours over several values
        problem = f"{key + ': ' if key else ''}expected {expected}; change it"
    else:
        problem = f"{key} is {_shown(first['input'])}, expected {expected}; change the value"
    return f"{where}: {problem}" + (f" (and {len(others)} more)" if others else "")


def _fields_at(place: tuple[str, ...]) -> list[str]:
    """Keys that are known at a place of the recipe."""
    model: type[BaseModel] = Recipe
    for part in place:
        if part.isdigit():
            continue
        kind: Any = model.model_fields[part].annotation
        model = next((k for k in (kind, *getattr(kind, "__args__", ())) if _is_model(k)), model)
    return list(model.model_fields)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
