"""Phases, cost tables, roofline and traces, on the tiny golden pair."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.cost_table import CostTable, Point
from specdoctor.measure.phases import PhaseLog, counted_host_reads, logged_phases
from specdoctor.measure.roofline import Machine, roofline, weights_read

PROMPT = list(b"def insert(self, item):")


@pytest.fixture
def pair(golden: Path) -> Engine:
    target = Target.load(golden / "target", "cpu", "float32")
    return Engine(target, load_drafter(golden / "deepspec-dspark-vanilla", target))


def command(golden: Path, *more: str) -> list[str]:
    pair = ["--target", str(golden / "target"), "--draft", f"d={golden / 'deepspec-dspark-vanilla'}"]
    return [*pair, "--template", "bytes", "--max-prompts", "2", "--max-new-tokens", "24", *more]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[dict, Path]:
    golden, folder = request.getfixturevalue("golden"), tmp_path_factory.mktemp("profile")
    files = ["--json", str(folder / "p.json"), "--costs", str(folder / "c.json"), "--trace", str(folder / "trace")]
    result = CliRunner().invoke(app, ["profile", *command(golden, *files)])
    assert result.exit_code == 0, result.output
    return json.loads((folder / "p.json").read_text()), folder


def test_phases_cover_the_round(profiled: tuple[dict, Path]) -> None:
    phases = {row["phase"]: row for row in profiled[0]["phases"]}
    assert {"draft backbone", "sequential head", "draft LM head", "draft context", "verify", "host"} <= set(phases)
    assert sum(row["share"] for row in phases.values()) == pytest.approx(1)
    assert all(row["seconds_per_round"] >= 0 for row in phases.values())


def test_the_trace_opens_in_the_plugins_own_reader(profiled: tuple[dict, Path]) -> None:
    from torch_tb_profiler.consts import WORKER_PATTERN
    from torch_tb_profiler.profiler.data import RunProfileData

    trace = Path(profiled[0]["trace"]["file"])
    assert WORKER_PATTERN.match(trace.name)  # the plugin lists a folder by this pattern
    parsed = RunProfileData.parse("worker", "1", str(trace), None)
    shown = {op.name: op.calls for op in parsed.op_list_groupby_name}
    reported = {row["operator"]: row["calls"] for row in profiled[0]["trace"]["operators"]}
    assert reported
    assert all(shown[name] == calls for name, calls in reported.items())


def test_bench_takes_its_expected_speed_up_from_the_table(profiled: tuple[dict, Path], golden: Path) -> None:
    folder = profiled[1]
    table = json.loads((folder / "c.json").read_text())
    for row in table["sps"]:
        row["seconds"] = 1.0  # a target whose forward costs the same for any width: expected = tau / (1 + draft)
    for row in table["drafts"]["d"]:
        row["seconds"] = 1.0
    (folder / "flat.json").write_text(json.dumps(table))
    arguments = ["bench", *command(golden, "--costs", str(folder / "flat.json"), "--json", str(folder / "b.json"))]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    arm = json.loads((folder / "b.json").read_text())["arms"][1]
    assert arm["expected_speedup"]["value"] == pytest.approx(arm["tau_step"]["value"] / 2, rel=0.02)


def test_a_table_of_another_pair_is_refused(tmp_path: Path) -> None:
    table = CostTable("a", "cpu", "float32", [Point(1, 64, 0.1)])
    path = tmp_path / "c.json"
    path.write_text(json.dumps(table.to_json()))
    CostTable.read(path).check(path, "a", "cpu", "float32")
    with pytest.raises(SpecdoctorError, match=r"c\.json: key dtype is float32, but this run has bfloat16"):
        CostTable.read(path).check(path, "a", "cpu", "bfloat16")
    path.write_text("{}")
    with pytest.raises(SpecdoctorError, match="not a cost table"):
        CostTable.read(path)


def test_lookup_interpolates_and_holds() -> None:
    points = [Point(1, 100, 1.0), Point(9, 100, 2.0), Point(1, 300, 3.0), Point(9, 300, 4.0)]
    table = CostTable("a", "cpu", "float32", points)
    assert table.target_seconds(5, 100) == pytest.approx(1.5)
    assert table.target_seconds(5, 200) == pytest.approx(2.5)
    assert table.target_seconds(99, 999) == pytest.approx(4.0)


def test_profiling_leaves_the_pair_as_it_was(pair: Engine) -> None:
    plain, logged = (Sequence(PROMPT, max_new_tokens=20) for _ in range(2))
    pair.generate([plain])
    log, reads = PhaseLog(pair.target.device), dict[str, int]()
    with logged_phases(pair, log), counted_host_reads(reads):
        pair.generate([logged])
    assert logged.ids == plain.ids
    assert log.seconds["verify"] > 0
    assert "forward" not in vars(pair.target)
    assert torch.Tensor.tolist is torch._C.TensorBase.tolist or not hasattr(torch.Tensor.tolist, "__wrapped__")


def test_one_round_reads_the_device_twice_at_most(pair: Engine) -> None:
    """Once for the verdict and once for the confidences of the record; a drafter's own choices stay on the device."""
    request = Sequence(PROMPT, max_new_tokens=30)
    pair.prefill([request])
    for _ in range(4):
        reads: dict[str, int] = {}
        with counted_host_reads(reads):
            pair.step([request])
        assert sum(reads.values()) <= 2
    pair.release([request])


def test_host_reads_are_counted() -> None:
    counts: dict[str, int] = {}
    x = torch.arange(3)
    with counted_host_reads(counts):
        x[0].item()
        x.tolist()
        bool(x[1])
    x.tolist()
    assert counts == {"item": 1, "tolist": 1, "__bool__": 1}


def test_roofline_by_hand(pair: Engine) -> None:
    target, machine = pair.target, Machine(bytes_per_second=1e9, operations_per_second=1e12)
    weights = sum(p.numel() for name, p in target.model.named_parameters() if "embed_tokens" not in name)
    assert weights_read(target) == weights
    roof = roofline(target, machine, rows=4, context=100, measured=1.0)
    cache = 2 * 6 * 2 * 16 * 100 * 4  # K and V, layers, KV heads, head dim, columns, bytes
    assert roof.bytes == weights * 4 + cache
    assert roof.operations == 2 * weights * 4 + 4 * 4 * 100 * 4 * 16 * 6
    assert roof.bound == "host"
