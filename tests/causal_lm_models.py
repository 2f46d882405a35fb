"""Draft models that are causal LMs, made in a test."""

from pathlib import Path

import torch
from transformers import PreTrainedModel


def save(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    return folder


def near_copy(model: PreTrainedModel, seed: int = 3, noise: float = 0.03) -> PreTrainedModel:
    """A drafter that often agrees with `model`: the same weights with a little noise."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return twin
