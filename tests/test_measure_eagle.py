"""`bench`, `profile` and `accept` with a recurrent drafter, on the golden DeepSpec EAGLE-3 pair."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.measure.cost_table import measure_drafter
from specdoctor.measure.costs import BareCosts, sample_costs
from specdoctor.measure.phases import PhaseLog, drafter_steps, logged_phases

PROMPT = list(b"def insert(self, item):")


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Engine:
    golden: Path = request.getfixturevalue("golden")
    target = Target.load(golden / "target", "cpu", "float32")
    return Engine(target, load_drafter(golden / "deepspec-eagle3", target))


def command(golden: Path, *more: str) -> list[str]:
    pair = ["--target", str(golden / "target"), "--draft", f"e={golden / 'deepspec-eagle3'}"]
    return [*pair, "--template", "bytes", "--max-prompts", "2", "--max-new-tokens", "16", *more]


def test_bench_end_to_end(golden: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", *command(golden, "--json", str(tmp_path / "b.json"))])
    assert result.exit_code == 0, result.output
    arm = json.loads((tmp_path / "b.json").read_text())["arms"][1]
    assert {key: arm["draft"][key] for key in ("family", "algorithm", "head", "block_size", "layers")} == {
        "family": "deepspec",
        "algorithm": "eagle3",
        "head": None,
        "block_size": None,
        "layers": 1,
    }
    assert arm["greedy_mismatches"] == 0
    assert arm["draft"]["draft_tokens"] == 5
    assert arm["expected_speedup"]["value"] > 0 and arm["bare"] is not None


def test_profile_end_to_end(golden: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["profile", *command(golden, "--json", str(tmp_path / "p.json"))])
    assert result.exit_code == 0, result.output
    profile = json.loads((tmp_path / "p.json").read_text())
    phases = {row["phase"]: row for row in profile["phases"]}
    assert {"draft context", "draft backbone", "draft LM head", "draft sampling", "verify", "host"} <= set(phases)
    assert sum(row["share"] for row in phases.values()) == pytest.approx(1)
    assert all(row["seconds_per_round"] > 0 for name, row in phases.items() if name.startswith("draft"))
    assert profile["cost_table"]["drafts"]["e"]


def test_accept_names_the_drafter_before_it_loads_a_target(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: object) -> None:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(Target, "load", loaded)
    result = CliRunner().invoke(app, ["accept", *command(golden)])
    assert result.exit_code == 2
    said = "e is DeepSpec EAGLE-3, Qwen3 backbone (eagle3), expected a DSpark or DFlash drafter"
    assert said in " ".join(result.output.split())


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(columns kept, tokens known) at the end of each proposal: a drafter keeps all tokens but the anchor."""
    seen: list[tuple[int, int]] = []
    drafter, propose = engine.drafter, engine.drafter.propose

    def watched(sequences: list[Sequence], budget: int) -> list:
        drafts = propose(sequences, budget)
        seen.extend((drafter.cache.lengths[s.drafter_state.slot], len(s.ids)) for s in sequences)
        return drafts

    monkeypatch.setattr(drafter, "propose", watched, raising=False)
    return seen


def test_bare_costs_feed_the_drafter_what_a_round_would(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, costs = watch(pair, monkeypatch), BareCosts()
    sample_costs(pair, PROMPT, costs, kept_rows=3, sampling=Sampling())
    n = len(PROMPT)
    assert seen == [(n, n + 1), (n + 3, n + 4)]
    assert len(costs.draft) == len(costs.target_block) == 1 and costs.context == [n]


def test_the_drafters_cost_table_commits_a_round_at_a_time(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(pair, monkeypatch)
    (point,) = measure_drafter(pair.target, pair.drafter, 5, 2, contexts=(64, 510), repeats=3)  # 510: no room
    assert seen == [(64 + 2 * k, 65 + 2 * k) for k in range(1, 5)]
    assert (point.rows, point.context) == (5, 64) and point.seconds > 0


def test_a_step_within_a_step_counts_once() -> None:
    log = PhaseLog(torch.device("cpu"))
    moments = iter([0.0, 1.0, 4.0, 9.0])  # outer begins, inner begins, inner ends, outer ends
    log._now = lambda: next(moments)  # type: ignore[method-assign]
    inner = log.timed("inner", lambda: None)
    log.timed("outer", inner)()
    assert dict(log.seconds) == {"inner": 3.0, "outer": 6.0}


def test_profiling_leaves_the_drafter_as_it_was(pair: Engine) -> None:
    plain, logged = (Sequence(PROMPT, max_new_tokens=12) for _ in range(2))
    pair.generate([plain])
    log = PhaseLog(pair.target.device)
    with logged_phases(pair, log):
        pair.generate([logged])
    assert logged.ids == plain.ids
    assert not set(drafter_steps(pair.drafter)) & set(vars(pair.drafter))
    assert set(drafter_steps(pair.drafter).values()) < set(log.seconds)
