"""Two processes train as one does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("accelerate")

# argv: tests folder, output, keys of a recipe as JSON, "resume" or "".
WORKER = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from specdoctor.errors import SpecdoctorError
from specdoctor.training.block_objective import make_block
from specdoctor.training.loop import TrainLoop
from specdoctor.training.processes import Processes
from specdoctor.training.run_folder import RunFolder
from training_cases import MadeFeatures, made_recipe, made_target
output, resume = Path(sys.argv[2]), sys.argv[4] == "resume"
recipe = made_recipe(output=str(output), **json.loads(sys.argv[3]))
processes = Processes()
target = made_target()
objective = make_block(recipe, target, None)
folder = RunFolder(output, recipe, resume) if processes.main else None
source = MadeFeatures(target, objective.taps, 6, processes.rank, processes.world)
try:
    TrainLoop(recipe, objective, source, processes, folder).run(RunFolder.read(output, recipe) if resume else None)
except SpecdoctorError as error:
    sys.exit(str(error))
processes.leave()
"""
RECIPE: dict[str, Any] = {
    "length": {"steps": 20},
    "optimiser": {"accumulate": 2},
    "losses": {"ce": 1.0},  # the confidence head has no gradient in the first phase
    "phases": [{"from_step": 7, "ce": 0.1, "l1": 0.9, "confidence": 1.0}],
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(output: Path, world: int, recipe: dict[str, Any], resume: str = "", **more: str) -> list[str]:
    """Train with `world` processes; their error output."""
    port, children = str(_free_port()), []
    for rank in range(world):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more
        if world > 1:
            environment |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(output), json.dumps(recipe), resume]
        children.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [child.communicate(timeout=300)[1] for child in children]
    return [error for child, error in zip(children, errors, strict=True) if child.returncode]


def _same_drafter(one: Path, other: Path) -> bool:
    a, b = (load_file(run / "drafter" / "model.safetensors") for run in (one, other))
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)


def _losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "log.jsonl").read_text().splitlines()]


def test_two_processes_give_the_loss_curve_of_one(tmp_path: Path) -> None:
    assert not _run(tmp_path / "one", 1, RECIPE)
    assert not _run(tmp_path / "two", 2, RECIPE | {"length": {"steps": 12}})
    assert not _run(tmp_path / "two", 2, RECIPE, "resume")
    one, two = _losses(tmp_path / "one"), _losses(tmp_path / "two")
    assert len(one) == len(two) == 20
    assert two == pytest.approx(one, abs=1e-4)
    assert _same_drafter(tmp_path / "one", tmp_path / "two")
    alone = RECIPE | {"optimiser": {"accumulate": 1}}  # negative control: half of the batches are another curve
    assert not _run(tmp_path / "half", 1, alone)
    assert _losses(tmp_path / "half") != pytest.approx(one, abs=1e-2)


def test_sharded_parameters_give_the_same_curve(tmp_path: Path) -> None:
    """FSDP2, stopped and resumed, as `accelerate launch --use_fsdp --fsdp_version 2` sets it up."""
    sharding = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
    short = RECIPE | {"length": {"steps": 10}}
    assert not _run(tmp_path / "one", 1, short)
    assert not _run(tmp_path / "two", 2, RECIPE | {"length": {"steps": 5}}, **sharding)
    assert not _run(tmp_path / "two", 2, short, "resume", **sharding)
    assert _losses(tmp_path / "two") == pytest.approx(_losses(tmp_path / "one"), abs=1e-4)
    assert _same_drafter(tmp_path / "one", tmp_path / "two")


def test_batches_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    errors = _run(tmp_path / "odd", 2, RECIPE | {"optimiser": {"accumulate": 3}})
    assert len(errors) == 2
    assert all("accumulate is 3, expected a multiple of the 2 processes" in error for error in errors)
