"""RoPE settings of a drafter in a GGUF file: standard keys, and llama.cpp's frequency factors for Llama-3 scaling.

A GGUF keeps less than a config.json (no Llama-3 parameters, no `max_position_embeddings` beside the context length), so
the exporter adds the settings as they were under `specdoctor.rope_parameters`; engines ignore that key.
"""

import json
import math
from itertools import product
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import TensorSource
from specdoctor.formats.json_config import JsonConfig

KEPT = "specdoctor.rope_parameters"
FACTORS = "rope_freqs.weight"
_YARN_KEYS = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_LLAMA3_ORIGINALS = (8192, 4096, 16384, 32768, 131072)  # original_max_position_embeddings of models with this scaling


def float32(value: float) -> float:
    """The shortest decimal of a value that was stored as float32: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def read_gguf_rope(config: JsonConfig, arch: str, tensors: TensorSource, head_dim: int) -> tuple[dict[str, Any], str]:
    """The settings as a config.json has them, and where they came from."""
    theta = float32(config.get(f"{arch}.rope.freq_base", (int, float), 10000.0))
    turning = config.get(f"{arch}.rope.dimension_count", int, head_dim)
    sections = config.get(f"{arch}.rope.dimension_sections", list, [])
    if turning != head_dim or any(sections[1:]):
        raise SpecdoctorError(
            f"{config.path}: {arch}.rope.dimension_count is {turning} and dimension_sections {sections}, expected all "
            f"{head_dim} dimensions of a head to turn together; this drafter cannot be run here"
        )
    standard = _standard(config, arch, theta)
    if FACTORS in tensors:
        standard = _llama3_of(config, tensors, head_dim, standard) if not config.has(KEPT) else standard
    kept = config.get(KEPT, str, None)
    if kept is None:
        return standard, f"config keys {arch}.rope.*"
    rope = json.loads(kept)
    if not isinstance(rope, dict) or float32(rope.get("rope_theta", 0)) != theta:
        raise SpecdoctorError(
            f"{config.path}: {arch}.rope.freq_base is {theta}, but {KEPT} says {kept}; expected one value: the file "
            "was edited after its export"
        )
    return rope, f"config key {KEPT}"


def _standard(config: JsonConfig, arch: str, theta: float) -> dict[str, Any]:
    at = f"{arch}.rope.scaling"
    kind = config.get(f"{at}.type", str, "none")
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta}
    if kind not in ("none", "linear", "yarn"):
        raise SpecdoctorError(f"{config.path}: key {at}.type is {kind!r}, expected none, linear or yarn")
    if kind != "none":
        rope["factor"] = float32(config.get(f"{at}.factor", (int, float)))
    if kind == "yarn":
        rope["original_max_position_embeddings"] = config.positive(f"{at}.original_context_length")
        for name, key in _YARN_KEYS.items():
            if config.find(f"{at}.{key}") is not None:
                rope[name] = float32(config.get(f"{at}.{key}", (int, float)))
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            if config.find(f"{at}.{key}") is not None:
                raise SpecdoctorError(f"{config.path}: key {at}.{key} is set, which cannot be run here")
    length = config.get(f"{arch}.context_length", int, None)
    if length is not None:
        rope["max_position_embeddings"] = length
    return rope


def _llama3_of(config: JsonConfig, tensors: TensorSource, head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    """The Llama-3 parameters that give the stored factors: the public models differ in factor and length alone."""
    factors = tensors.load([FACTORS])[FACTORS].double().tolist()
    factor = round(max(factors), 3)
    for original, (low, high) in product(_LLAMA3_ORIGINALS, ((1.0, 4.0),)):
        settings = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        settings["original_max_position_embeddings"] = original
        made = llama3_factors(rope["rope_theta"], settings, head_dim)
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(made, factors, strict=True)):
            return {**rope, "rope_type": "llama3", **settings}
    raise SpecdoctorError(
        f"{config.path}: tensor {FACTORS} holds frequency factors of no known Llama-3 scaling; give the checkpoint "
        "that this file was converted from"
    )


def llama3_factors(theta: float, settings: dict[str, Any], head_dim: int) -> list[float]:
    """What llama.cpp divides each of the D / 2 inverse frequencies by: 1 for short wavelengths, `factor` for long."""
    low, high, factor = settings["low_freq_factor"], settings["high_freq_factor"], settings["factor"]
    factors = []
    for j in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (j / head_dim)
        blend = (settings["original_max_position_embeddings"] / wavelength - low) / (high - low)
        blend = min(max(blend, 0.0), 1.0)
        factors.append(1 / ((1 - blend) / factor + blend))
    return factors


def rope_entries(arch: str, rope: dict[str, Any], context: int, head_dim: int) -> dict[str, Any]:
    """Metadata that means `rope`; `context` stands in where it names no length."""
    kind, at = rope["rope_type"], f"{arch}.rope.scaling"
    entries: dict[str, Any] = {
        f"{arch}.context_length": int(rope.get("max_position_embeddings") or context),
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim,
    }
    if kind in ("linear", "yarn"):
        entries |= {f"{at}.type": kind, f"{at}.factor": float(rope["factor"])}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or rope["max_position_embeddings"]
        entries[f"{at}.original_context_length"] = int(original)
        entries |= {f"{at}.{key}": float(rope[name]) for name, key in _YARN_KEYS.items() if rope.get(name)}
    plain = {"rope_type": kind, "rope_theta": float32(rope["rope_theta"])}
    if rope != plain | {"max_position_embeddings": entries[f"{arch}.context_length"]}:
        entries[KEPT] = json.dumps(rope, sort_keys=True)
    return entries


def why_no_gguf_rope(rope: dict[str, Any]) -> str | None:
    """Why llama.cpp cannot turn as these settings say, or None."""
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "llama3", "yarn"):
        return f"its RoPE is of type {kind!r}, which GGUF cannot express"
    extra = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(name) is not None]
    if kind == "yarn" and (extra or rope.get("truncate") is False):
        return f"its YaRN sets {extra[0] if extra else 'truncate'}, which GGUF cannot express"
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        return "it turns only part of each head, which the exporter does not write"
    return None
