"""Shared fixtures. Models made on the spot are in `tiny_models.py`."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The same examples on every run, and no limit on how long one may take: a busy machine must not fail a test.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# Reports are looked at as they are when piped; test runners tell their workers the width of a terminal.
os.environ.pop("COLUMNS", None)

torch.set_num_threads(1)  # tiny models: threads only cost


@pytest.fixture(scope="session")
def golden() -> Path:
    """Tiny trained pairs with the outputs of the reference implementations."""
    return Path(__file__).parent / "data" / "golden"
