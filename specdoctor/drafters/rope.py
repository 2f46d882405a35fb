"""Rotary position embedding of drafters, read from the draft's own config (never inherited from the target).

Types: default, linear, llama3, yarn and proportional (Gemma4, formats page 1.2). Half-split pairing: (j, j + D/2).
"""

import math
from typing import Any

import torch
from torch import Tensor

from specdoctor.errors import SpecdoctorError


class Rope:
    """cos and sin by position, computed once in float32 and grown in steps."""

    def __init__(self, settings: dict[str, Any], head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        inverse, self._scale = inverse_frequencies(settings, head_dim)
        self._inverse = inverse.to(device)
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, head_dim, dtype=dtype, device=device)

    def at(self, positions: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """cos, sin [N, D] at `positions` [N]; `limit` is above all of them (known on the host, so no wait)."""
        if limit > len(self._cos):
            self._grow(max(2 * len(self._cos), -(-limit // 1024) * 1024))
        return self._cos[positions], self._sin[positions]

    def _grow(self, length: int) -> None:
        angles = torch.arange(length, device=self._inverse.device).float()[:, None] * self._inverse
        angles = torch.cat([angles, angles], dim=-1)
        self._cos = (angles.cos() * self._scale).to(self._dtype)
        self._sin = (angles.sin() * self._scale).to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `x` [h, N, D] with cos, sin [N, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def inverse_frequencies(settings: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] and the factor on cos and sin of a RoPE type.

    Raises `SpecdoctorError` for a type that is not known here, or whose settings are incomplete.
    """
    try:
        return _by_type(settings, head_dim)
    except (KeyError, TypeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"has a value of the wrong kind ({error})"
        raise SpecdoctorError(
            f"the RoPE of type {settings['rope_type']!r} {what}; take rope_parameters over whole"
        ) from None


def _by_type(settings: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    kind, theta = settings["rope_type"], settings["rope_theta"]
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / theta**exponent
    if kind != "proportional" and settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise SpecdoctorError(
            f"partial_rotary_factor is {settings['partial_rotary_factor']}, expected 1 for a rope_type {kind!r}; this "
            "drafter cannot be run here"
        )
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / settings["factor"], 1.0
    if kind == "llama3":
        return _llama3(inverse, settings), 1.0
    if kind == "yarn":
        return _yarn(inverse, settings, head_dim)
    if kind == "proportional":
        turning = int(settings.get("partial_rotary_factor", 0.25) * head_dim // 2)
        inverse = inverse / settings.get("factor", 1.0)
        inverse[turning:] = 0.0
        return inverse, 1.0
    raise SpecdoctorError(
        f"rope_type is {kind!r}, expected default, linear, llama3, yarn or proportional; this drafter cannot be run "
        "here"
    )


def _llama3(inverse: Tensor, settings: dict[str, Any]) -> Tensor:
    """Llama-3 scaling: long wavelengths divided by the factor, short ones kept, a ramp between."""
    original, factor = settings["original_max_position_embeddings"], settings["factor"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inverse / factor + blend * inverse


def _yarn(inverse: Tensor, settings: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """YaRN: interpolate low frequencies, keep high ones; cos and sin grow by the attention factor."""
    original = settings.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    theta = settings["rope_theta"]
    factor = settings["factor"] or settings["max_position_embeddings"] / original

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    inverse = inverse / factor * ramp + inverse * (1 - ramp)
    attention = settings.get("attention_factor")
    if attention is None:
        one, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        attention = _mscale(factor, one) / _mscale(factor, all_dim) if one and all_dim else _mscale(factor, 1.0)
    return inverse, float(attention)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
