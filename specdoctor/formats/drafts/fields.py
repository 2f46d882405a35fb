"""Collects the fields of a `DraftSpec` with where each came from."""

from typing import Any

from specdoctor.formats.json_config import JsonConfig


class Fields:
    """Values for a `DraftSpec` constructor and, beside each, its origin."""

    def __init__(self, config: JsonConfig, writer: str) -> None:
        self.config, self.writer = config, writer
        self.values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}

    def key(self, field: str, value: Any, key: str) -> Any:
        """A value read from `key`, or the writer's default where the config has no such key."""
        there = self.config.has(key) and self.config.find(key) is not None
        return self.put(field, value, f"config key {key}" if there else f"default of {self.writer} (no key {key})")

    def put(self, field: str, value: Any, origin: str) -> Any:
        """A value from elsewhere: a tensor's shape or presence, the format itself."""
        self.values[field], self.origin[field] = value, origin
        return value

    def source(self, field: str, tensor: str, there: bool) -> None:
        """`embed_source` or `head_source`, by whether the checkpoint holds the tensor."""
        self.put(
            field,
            "checkpoint" if there else "target",
            f"tensor {tensor}" if there else f"no tensor {tensor} in the file",
        )

    def build(self, kind: type) -> Any:
        """The spec. Raises TypeError when a field is missing: a fault of the reader, not of the file."""
        return kind(**self.values, origin=self.origin)
