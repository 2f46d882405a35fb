"""torch.profiler traces of a few rounds, in the layout that TensorBoard's torch-tb-profiler and Perfetto both read.

Contract: traces are written by torch's own handler (`DIR/WORKER.TIME.pt.trace.json`) and read back through
torch-tb-profiler's parser, so what is printed is what the plugin will show.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from specdoctor.errors import SpecdoctorError

TOP_OPERATORS = 12


def record_trace(folder: Path, step: Callable[[], None], steps: int, cuda: bool) -> Path:
    """Profile `steps` calls of `step` and write one trace file into `folder`; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob("*.pt.trace.json"))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, on_trace_ready=tensorboard_trace_handler(str(folder))) as profiler:
        for _ in range(steps):
            step()
            profiler.step()
    new = sorted(set(folder.glob("*.pt.trace.json")) - before)
    if not new:
        raise SpecdoctorError(f"{folder}: torch.profiler wrote no trace here; check that the folder is writable")
    return new[-1]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The operators that cost most, by their own time, as torch-tb-profiler's parser sees the file."""
    import logging

    import pandas as pd

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch_tb_profiler.profiler.data import RunProfileData

    parsed = RunProfileData.parse(path.name.split(".")[0], "1", str(path), None)
    table = pd.DataFrame(
        {
            "operator": op.name,
            "calls": op.calls,
            "self_seconds": (op.self_host_duration + op.self_device_duration) / 1e6,
            "total_seconds": (op.host_duration + op.device_duration) / 1e6,
        }
        for op in parsed.op_list_groupby_name
    )
    if table.empty:
        return []
    table["self_share"] = table["self_seconds"] / table["self_seconds"].sum()
    top = table.sort_values("self_seconds", ascending=False).head(TOP_OPERATORS)
    return top.to_dict("records")
