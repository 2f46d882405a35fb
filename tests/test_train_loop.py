"""The training loop: resuming bit for bit, stopping, logs, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_models import tiny_target
from training_cases import MadeFeatures, made_recipe, made_target, made_texts
from typer.testing import CliRunner

from specdoctor.cli.train import app
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.training.block_objective import make_block
from specdoctor.training.loop import TrainLoop
from specdoctor.training.optimisers import make_optimiser
from specdoctor.training.processes import Processes
from specdoctor.training.recipe import Optimiser
from specdoctor.training.recipe_file import load_recipe
from specdoctor.training.run_folder import RunFolder
from specdoctor.training.schedule import rate_factor


def _loop(folder: Path, target: Target, resume: bool = False, **changes: Any) -> tuple[TrainLoop, RunFolder]:
    recipe = made_recipe(output=str(folder), **changes)
    objective = make_block(recipe, target, None)
    opened = RunFolder(folder, recipe, resume)
    return TrainLoop(recipe, objective, MadeFeatures(target, objective.taps), Processes(), opened), opened


def _train(folder: Path, target: Target, resume: bool = False, **changes: Any) -> TrainLoop:
    loop, opened = _loop(folder, target, resume, **changes)
    try:
        loop.run(RunFolder.read(folder, loop.recipe) if resume else None)
    finally:
        opened.close()
    return loop


def _log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def _same(one: Path, other: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_learns(tmp_path: Path) -> None:
    target = made_target()
    _train(tmp_path / "run", target, length={"steps": 40}, losses={"ce": 1.0, "confidence": 0.1})
    losses = [line["loss"] for line in _log(tmp_path / "run")]
    assert len(losses) == 40 and sum(losses[-4:]) < 0.7 * sum(losses[:4])


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_resumed_is_bit_equal(tmp_path: Path, optimiser: str) -> None:
    """Stopped after each of several steps, within an epoch and at its end, with accumulation and two phases."""
    target = made_target()
    phases = [{"from_share": 0.5, "l1": 1.0, "confidence": 1.0}]
    settings: dict[str, Any] = {
        "length": {"steps": 9},
        "optimiser": {"name": optimiser, "accumulate": 2, "schedule": "cosine", "warmup": 0.2, "weight_decay": 0.1},
        "losses": {"ce": 1.0},
        "phases": phases,
        "log_every": 2,
    }
    whole = _train(tmp_path / "whole", target, **settings)
    loop, opened = _loop(tmp_path / "parts", target, **settings)
    for stop_at in (1, 4, 5, 8):
        loop._on_step = lambda state, at=stop_at, own=loop: setattr(own, "_stop", state.step >= at)
        result = loop.run(RunFolder.read(tmp_path / "parts", loop.recipe))
        assert (result.stopped, result.steps) == ("interrupted", stop_at)
        opened.close()
        loop, opened = _loop(tmp_path / "parts", target, resume=True, **settings)
    result = loop.run(RunFolder.read(tmp_path / "parts", loop.recipe))
    opened.close()
    assert result.stopped == "complete" and result.steps == whole.step == 9
    assert _same(tmp_path / "whole" / "drafter", tmp_path / "parts" / "drafter")
    assert _log(tmp_path / "whole") == _log(tmp_path / "parts")
    ours, theirs = (torch.load(tmp_path / n / "state.pt", weights_only=True) for n in ("whole", "parts"))
    parts = [state["optimiser"].get("parts", [state["optimiser"]]) for state in (ours, theirs)]
    for our_part, their_part in zip(*parts, strict=True):
        assert our_part["state"]
        for key, value in our_part["state"].items():
            assert all(torch.equal(value[name], their_part["state"][key][name]) for name in value)


def test_muon_steps_along_orthogonal_matrices() -> None:
    """Of all singular directions alike, for the maps of the network; tables by token and vectors are AdamW's."""
    module = torch.nn.ModuleDict({"map": torch.nn.Linear(32, 48), "table": torch.nn.Embedding(4096, 8)})
    optimiser = make_optimiser(Optimiser(name="muon", lr=0.01), module)
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for value in module.parameters():
        value.grad = torch.randn(value.shape, generator=generator) * 1e-3
    optimiser.step()
    moved = {name: before[name] - value.detach() for name, value in module.named_parameters()}
    stretch = torch.linalg.svdvals(moved["map.weight"])
    assert stretch.max() < 2 * stretch.min()
    plain = torch.linalg.svdvals(module["map"].weight.grad)
    assert plain.max() > 5 * plain.min()  # negative control
    for name in ("map.bias", "table.weight"):  # AdamW's first step: the sign, times lr
        torch.testing.assert_close(moved[name], 0.01 * module.get_parameter(name).grad.sign(), atol=2e-3, rtol=0)
    with pytest.raises(SpecdoctorError, match="one process, found 2"):
        make_optimiser(Optimiser(name="muon"), module, world=2)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    """Negative control of the bit-equal tests."""
    target = made_target()
    _train(tmp_path / "a", target, length={"steps": 2})
    _train(tmp_path / "b", target, length={"steps": 2}, seed=1)
    assert not _same(tmp_path / "a" / "drafter", tmp_path / "b" / "drafter")


def test_target_is_untouched(tmp_path: Path) -> None:
    target = made_target()
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    _train(tmp_path / "run", target, optimiser={"weight_decay": 0.5})
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())


def test_not_finite_names_step_and_tensor(tmp_path: Path) -> None:
    target = made_target()
    loop, opened = _loop(tmp_path / "run", target)
    loop.source.made[0].taps[3] = float("nan")
    with pytest.raises(SpecdoctorError, match=r"step [1-4]: the batch's taps .* is not finite"):
        loop.run()
    opened.close()
    loop, opened = _loop(tmp_path / "other", target)
    with torch.no_grad():
        loop.objective.module.backbone.fc.weight[0, 0] = float("inf")
    with pytest.raises(SpecdoctorError, match=r"other: step 1: the parameter backbone.fc.weight is not finite"):
        loop.run()
    opened.close()
    loop, opened = _loop(tmp_path / "third", target)
    loop.objective.module.backbone.norm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(SpecdoctorError, match=r"step 1: the gradient of backbone.norm.weight is not finite"):
        loop.run()
    opened.close()


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    target = made_target()
    _train(tmp_path / "run", target)
    with pytest.raises(SpecdoctorError, match="holds a run already; go on with --resume"):
        _loop(tmp_path / "run", target)
    with pytest.raises(SpecdoctorError, match=r"state.pt: seed was 0, the recipe has 3; resume"):
        _train(tmp_path / "run", target, resume=True, seed=3)
    with pytest.raises(SpecdoctorError, match=r"state.pt: draft.markov_rank was 8, the recipe has 4; resume"):
        _train(tmp_path / "run", target, resume=True, draft={"markov_rank": 4})
    more = _train(tmp_path / "run", target, resume=True, length={"steps": 8})
    assert more.step == 8
    _, opened = _loop(tmp_path / "busy", target)
    with pytest.raises(SpecdoctorError, match="another run is at work there"):
        _loop(tmp_path / "busy", target)
    opened.close()
    assert not (tmp_path / "busy").exists()  # nothing was trained


def test_a_calibration_stays_while_the_weights_do(tmp_path: Path) -> None:
    target = made_target()
    _train(tmp_path / "run", target, length={"steps": 2})
    calibration = tmp_path / "run" / "drafter" / "calibration.json"
    calibration.write_text("{}")
    _train(tmp_path / "run", target, resume=True, length={"steps": 2})
    assert calibration.read_text() == "{}"
    _train(tmp_path / "run", target, resume=True, length={"steps": 3})
    assert not calibration.exists()


def test_epochs_end_a_run(tmp_path: Path) -> None:
    loop = _train(tmp_path / "run", made_target(), length={"steps": None, "epochs": 2}, optimiser={"accumulate": 3})
    assert (loop.step, loop.epoch) == (2, 2)  # an epoch of four batches has one step of three


def test_time_budget_ends_a_run(tmp_path: Path) -> None:
    loop = _train(tmp_path / "run", made_target(), length={"steps": None, "minutes": 0.01})
    assert loop.step > 1 and 0.6 <= loop.seconds < 30


def test_tensorboard_has_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _train(tmp_path / "run", made_target(), length={"steps": 3})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/l1", "train/confidence", "accept/accept_1", "match/match_4", "tau/tau_match"} <= tags
    logged = [line["loss"] for line in _log(tmp_path / "run")]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(logged)


def test_schedules() -> None:
    cosine = Optimiser(schedule="cosine", warmup=0.1, floor=0.1)
    assert [rate_factor(cosine, s) for s in (0.05, 0.1, 0.55, 1.0)] == pytest.approx([0.5, 1.0, 0.55, 0.1])
    wsd = Optimiser(schedule="wsd", warmup=0.1, decay=0.2)
    assert [rate_factor(wsd, s) for s in (0.5, 0.8, 0.9, 1.0)] == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_phases() -> None:
    phases = [{"from_share": 0.5, "l1": 1.0}, {"from_step": 90, "kl": 1.0}]
    recipe = made_recipe(losses={"ce": 1.0, "confidence": 0.5}, phases=phases)
    assert recipe.weights_at(0, 0.49).ce == 1.0
    assert recipe.weights_at(50, 0.5).l1 == 1.0 and recipe.weights_at(50, 0.5).ce == 0.0
    assert recipe.weights_at(90, 0.9).kl == 1.0


# The command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target on disk, samples, held-out prompts and a recipe."""
    folder = tmp_path_factory.mktemp("train")
    tiny_target(vocab=40, layers=4).save_pretrained(folder / "target")
    lines = [
        json.dumps({"key": f"{i:03}", "ids": ids, "answer": [[3, len(ids)]]})
        for i, ids in enumerate(made_texts([16, 11, 20, 9, 14, 18, 12, 17]))
    ]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    prompts = [json.dumps({"id": f"p{i}", "category": "made", "prompt_ids": [i + 1, 2, 3]}) for i in range(3)]
    (folder / "held-out.jsonl").write_text("\n".join(prompts) + "\n")
    recipe = made_recipe().model_dump(mode="json", exclude_none=True)
    recipe |= {
        "target": str(folder / "target"),
        "device": "cpu",
        "dtype": "float32",
        "data": {"samples": str(folder / "samples.jsonl"), "tokens_per_batch": 40},
        "held_out": {"prompts": str(folder / "held-out.jsonl"), "max_new_tokens": 8},
        "length": {"steps": 12},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_command_trains_and_measures(workplace: Path, tmp_path: Path) -> None:
    arguments = [str(workplace / "recipe.yaml"), "--output", str(tmp_path / "run"), "--json", "-"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["stopped"], said["steps"], said["schema_version"]) == ("complete", 12, 1)
    assert 1.0 <= said["held_out"]["tau_held_out"] <= 5.0 and "tau_made" in said["held_out"]
    assert _log(tmp_path / "run")[-1]["tau_held_out"] == said["held_out"]["tau_held_out"]
    assert {"recipe.yaml", "state.pt", "log.jsonl", "drafter"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert load_recipe(tmp_path / "run" / "recipe.yaml").length.steps == 12
    assert f"losses go to {tmp_path / 'run' / 'log.jsonl'}" in result.stderr
    assert (said["notes"], said["draft_tokens"], said["confidence"]) == ([], None, True)


def test_what_to_do_next(workplace: Path, tmp_path: Path) -> None:
    """The recipe's target and, where the saved format does not keep it, the length that was trained for."""
    recipe = yaml.safe_load((workplace / "recipe.yaml").read_text())
    recipe |= {"algorithm": "eagle3", "draft": {"block_size": 3}, "losses": {"ce": 1.0}, "length": {"steps": 1}}
    (tmp_path / "eagle3.yaml").write_text(yaml.safe_dump(recipe))
    for path, name in ((workplace / "recipe.yaml", "dspark"), (tmp_path / "eagle3.yaml", "eagle3")):
        said = CliRunner().invoke(app, [str(path), "--output", str(tmp_path / name)]).stdout.splitlines()
        assert any(line.startswith("tau on held-out prompts, greedy: all ") for line in said), said
        drafter, target = tmp_path / name / "drafter", f"--target {workplace / 'target'}"
        if name == "dspark":
            calibrate = f"next: specdoctor calibrate {drafter} {target}"
            assert said[-2:] == [calibrate, f"then: specdoctor bench --draft {drafter} {target}"]
        else:
            assert said[-1] == f"next: specdoctor bench --draft {drafter} {target} -K 3"
            assert said[-2].startswith("note: the format does not keep draft.block_size")


def test_a_refused_run_leaves_no_folder(workplace: Path, tmp_path: Path) -> None:
    arguments = [str(workplace / "recipe.yaml"), "--output", str(tmp_path / "run"), "--data", str(tmp_path / "none")]
    assert isinstance(CliRunner().invoke(app, arguments).exception, SpecdoctorError)
    assert not list(tmp_path.iterdir())


def _start(workplace: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "specdoctor", "train", str(workplace / "recipe.yaml"), "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--output", str(output)], env=environment, stderr=subprocess.PIPE)


def test_sigterm_saves_and_exits_130(workplace: Path, tmp_path: Path) -> None:
    process = _start(workplace, tmp_path / "run")
    while not (tmp_path / "run" / "log.jsonl").exists() and process.poll() is None:
        time.sleep(0.005)
    time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert (tmp_path / "run" / "state.pt").is_file() and not (tmp_path / "run" / "drafter").exists()


# Trains in children that it forks, so that what a run needs is imported once, and kills them.
KILLER = """
import os, random, signal, sys, time, torch
from pathlib import Path
torch.set_num_threads(1)
tests, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, tests)
from test_train_loop import _train
from training_cases import made_target
target, rng, done = made_target(), random.Random(7), 0
while True:
    child = os.fork()
    if not child:
        _train(folder, target, resume=True, length={"steps": 60})
        os._exit(0)
    if done < kills:
        time.sleep(rng.uniform(0.1, 0.5))
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done += status == -signal.SIGKILL
    if status != -signal.SIGKILL:
        print(done, status)
        break
"""


def test_killed_ten_times_ends_bit_equal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLER, str(Path(__file__).parent), str(tmp_path / "killed"), "10"]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.stdout.split()[-1:] == ["0"], ran.stderr
    assert int(ran.stdout.split()[-2]) >= 5  # a fast machine is done before the tenth
    _train(tmp_path / "whole", made_target(), length={"steps": 60})
    assert _same(tmp_path / "whole" / "drafter", tmp_path / "killed" / "drafter")
    assert _log(tmp_path / "whole") == _log(tmp_path / "killed")


@pytest.mark.parametrize(
    "change,line",
    [
        ("optimiser: {lr: 0}", "optimiser.lr is 0, expected greater than 0"),
        ("anchor: 3", "unknown key anchor, expected one of algorithm, target"),
        ("draft: {markow: gated}", r"unknown key draft.markow \(did you mean 'markov'\?\)"),
        ("seed: 1\nseed: 2", "seed is given twice"),
        ("length: {epochs: 2}\noptimiser: {schedule: wsd}", "length.steps or length.minutes"),
        ("data: {}", "exactly one of samples"),
    ],
)
def test_recipes_are_refused_in_one_line(tmp_path: Path, change: str, line: str) -> None:
    base = {"algorithm": "dspark", "target": "t", "output": "o", "data": "{samples: s}", "length": "{steps: 3}"}
    keys = {part.split(":")[0] for part in change.splitlines()}
    text = "\n".join([f"{key}: {value}" for key, value in base.items() if key not in keys] + [change])
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(SpecdoctorError, match=line) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    assert "\n" not in str(caught.value)
