"""config.json, read raw: every key has one reader, and a missing or wrong one is one clear line."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError

_ABSENT = object()
LARGEST = 2**31 - 1
MOST_THINGS = 4096


class JsonConfig:
    """A JSON object of a file, and its path for error lines. Keys may be dotted: `dflash_config.mask_token_id`.

    `read_keys` collects what was looked at, so that what nobody reads can be named. A `view` reads the keys of a nested
    object without their prefix; error lines show it.
    """

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "", read: set[str] | None = None) -> None:
        self.path, self.values, self.prefix = path, values, prefix
        self.read_keys: set[str] = set() if read is None else read

    def view(self, key: str) -> "JsonConfig":
        """The nested object `key` as a config of its own. Raises when it is missing or no object."""
        self.get(key, dict)
        self.read_keys.discard(self.prefix + key)  # only its keys that are looked at count as read
        return JsonConfig(self.path, self.values, f"{self.prefix}{key}.", self.read_keys)

    @classmethod
    def read(cls, folder: Path) -> "JsonConfig":
        path = folder / "config.json"
        if folder.is_file():
            raise SpecdoctorError(
                f"{folder}: a file that is no *.gguf; expected a draft checkpoint's folder (config.json and "
                "*.safetensors) or a GGUF file"
            )
        if not folder.is_dir():
            raise SpecdoctorError(
                f"{folder}: no such folder; expected a draft checkpoint (config.json and *.safetensors)"
            )
        if not path.is_file():
            raise SpecdoctorError(f"{path}: missing; expected the config.json of a draft checkpoint")
        try:
            values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, parse_float=_finite)
        except RecursionError:
            raise SpecdoctorError(f"{path}: nested too deep, expected the config.json of a draft checkpoint") from None
        except (ValueError, UnicodeDecodeError) as error:
            raise SpecdoctorError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise SpecdoctorError(f"{path}: holds a {type(values).__name__}, expected a JSON object")
        return cls(path, values)

    def has(self, key: str) -> bool:
        return self._look(key) is not _ABSENT

    def find(self, key: str) -> Any:
        """The raw value of `key`, None when it is absent."""
        value = self._look(key)
        return None if value is _ABSENT else value

    def unread(self) -> list[str]:
        """Dotted keys that no reader looked at; a nested object that was read whole counts as read."""
        return sorted(_unread(self.values, "", self.read_keys))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _ABSENT) -> Any:
        """The value of `key`, checked to be of `kind` (bool is not an int); null counts as absent."""
        value = self._look(key)
        if value is _ABSENT or value is None:
            if default is _ABSENT:
                raise SpecdoctorError(f"{self.path}: key {self.prefix}{key} is missing, expected {_names(kind)}")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
            raise SpecdoctorError(f"{self.path}: key {self.prefix}{key} is {value!r}, expected {_names(kind)}")
        return value

    def positive(self, key: str, default: Any = _ABSENT) -> int:
        """A whole number of 1 or more."""
        value = self.get(key, int, default)
        if not 1 <= value <= LARGEST:
            raise SpecdoctorError(
                f"{self.path}: key {self.prefix}{key} is {value}, expected a whole number of 1 or more"
                + (f", at most {LARGEST}" if value > LARGEST else "")
            )
        return value

    def count(self, key: str, default: Any = _ABSENT) -> int:
        """A number of things that are listed one by one: layers, heads, experts; 1 to `MOST_THINGS`."""
        value = self.positive(key, default)
        if value > MOST_THINGS:
            raise SpecdoctorError(f"{self.path}: key {self.prefix}{key} is {value}, expected at most {MOST_THINGS}")
        return value

    def _look(self, key: str) -> Any:
        key = self.prefix + key
        self.read_keys.add(key)
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return _ABSENT
            value = value[part]
        return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large a number")
    return value


def _unread(values: dict[str, Any], prefix: str, read: set[str]) -> Iterator[str]:
    for key, value in values.items():
        name = prefix + key
        if name in read:
            continue
        if isinstance(value, dict) and any(other.startswith(name + ".") for other in read):
            yield from _unread(value, name + ".", read)
        else:
            yield name


def _names(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    words = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
        list: "a list",
        dict: "an object",
    }
    return " or ".join(words.get(k, k.__name__) for k in kinds if not (k is int and float in kinds))
