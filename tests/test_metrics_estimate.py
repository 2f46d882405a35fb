"""Absent, zero and NaN stay three things, and NaN never leaves."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdoctor.metrics.estimate import Estimate


def test_absent_zero_and_nan_are_three_things() -> None:
    absent, zero, nan = Estimate.absent("no drafts", 4), Estimate(0.0, 0.0, 0.0, 4), Estimate(math.nan, n=4)
    assert absent.to_json() == {"value": None, "low": None, "high": None, "n": 4, "reason": "no drafts"}
    assert zero.to_json() == {"value": 0.0, "low": 0.0, "high": 0.0, "n": 4}
    assert nan.value is not None and math.isnan(nan.value)
    assert nan.to_json()["value"] is None and "NaN" in nan.to_json()["reason"]


def test_an_absent_value_needs_a_reason() -> None:
    with pytest.raises(AssertionError, match="reason"):
        Estimate(None)


def test_numpy_numbers_become_json_numbers() -> None:
    row = Estimate(np.float64(1.5), np.float32(1.0), np.float64(2.0), np.int64(3)).to_json()  # type: ignore[arg-type]
    assert json.loads(json.dumps(row)) == {"value": 1.5, "low": 1.0, "high": 2.0, "n": 3}


@given(st.floats(), st.floats() | st.none(), st.floats() | st.none())
def test_json_is_always_strict(value: float, low: float | None, high: float | None) -> None:
    row = Estimate(value, low, high, 1).to_json()
    json.dumps(row, allow_nan=False)
    assert (row["value"] is None) == (not math.isfinite(value)) == ("reason" in row)


def test_importing_the_metrics_loads_nothing_heavy() -> None:
    modules = ["estimate", "acceptance", "statistics", "speedup", "conventions", "calibration"]
    code = f"import sys; from specdoctor.metrics import {', '.join(modules)}; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "numpy" in loaded and not loaded & {"scipy", "torch", "transformers", "pandas"}
