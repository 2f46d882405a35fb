"""Shared fixtures. Models made on the spot are in `tiny_models.py`."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tiny models: threads only cost


@pytest.fixture(scope="session")
def golden() -> Path:
    """Tiny trained pairs with the outputs of the reference implementations."""
    return Path(__file__).parent / "data" / "golden"
