"""MTP and Medusa keep the target's own law; Medusa's typical acceptance does not, and says so."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_lossless_sampling
import torch
from bench_runs import DFLASH, arm, bench, invoke, write_prompts
from safetensors.torch import save_file
from test_lossless_sampling import P_FAIL, K, V, cheap_draws, draw, exact_law, p_value, target
from tiny_mtp import mtp_tensors, settings, write_speculators

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling, probabilities
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import StaticTree
from specdoctor.engine.typical import verify_typical
from specdoctor.engine.verify import verify
from specdoctor.errors import ExitCode, SpecdoctorError

__all__ = ["cheap_draws", "target"]  # fixtures

PLAIN, ODD = (1.0, "1x", 0, 1.0), (0.9, "1.5x", 4, 0.95)
SMALL = {"hidden_size": 32, "vocab_size": V, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module", autouse=True)
def fewer_draws() -> Iterator[None]:
    """The drafters differ little in how they are verified, so half the draws are enough; the controls still fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_lossless_sampling, "DRAWS", 8_000)
        yield


def medusa(folder: Path) -> Path:
    torch.manual_seed(1)
    tensors = {}
    for i in range(K):
        tensors |= {f"{i}.0.linear.weight": torch.randn(32, 32) * 0.1, f"{i}.0.linear.bias": torch.randn(32) * 0.2}
        tensors[f"{i}.1.weight"] = torch.randn(V, 32) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": K, "medusa_num_layers": 1}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def mtp(folder: Path) -> Path:
    return write_speculators(folder, settings("speculators", **SMALL))


def layered_mtp(folder: Path) -> Path:
    """Two layers, as MiMo lays them out, without the target that they would be beside."""
    config = settings("mimo", num_nextn_predict_layers=2, **SMALL)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(mtp_tensors("mimo", config, 2), folder / "model.safetensors")
    return folder


WRITERS: dict[str, Any] = {"medusa": medusa, "mtp": mtp, "mtp of two layers": layered_mtp}


@pytest.mark.parametrize("setting", [PLAIN, ODD], ids=str)
@pytest.mark.parametrize("kind", WRITERS)
def test_sampled_text_has_the_targets_law(target: Target, tmp_path: Path, kind: str, setting: tuple) -> None:
    engine = Engine(target, load_drafter(WRITERS[kind](tmp_path), target), draft_tokens=K)
    assert p_value(draw(engine, *setting), exact_law(target, Sampling(*setting[:1], *setting[2:]))) > P_FAIL


@pytest.mark.parametrize("kind", ["medusa", "mtp"])
def test_trees_have_the_targets_law(target: Target, tmp_path: Path, kind: str) -> None:
    engine = Engine(target, load_drafter(WRITERS[kind](tmp_path), target), tree=StaticTree((-1, -1, 0, 1, 1)))
    assert p_value(draw(engine, *PLAIN), exact_law(target, Sampling(1.0))) > P_FAIL


@pytest.mark.parametrize("kind", WRITERS)
def test_a_planted_bug_is_found(target: Target, tmp_path: Path, kind: str) -> None:
    """Negative control: drafts drawn from q, but verified as if each had been drawn from the next one's q."""
    drafter: Any = load_drafter(WRITERS[kind](tmp_path), target)
    honest = drafter.propose

    def lying(sequences: list[Sequence], budget: int) -> list[Draft]:
        drafts = honest(sequences, budget)
        for draft in drafts:
            draft.probs = draft.probs.roll(1, dims=-1)
        return drafts

    drafter.propose = lying
    assert p_value(draw(Engine(target, drafter, draft_tokens=K), *PLAIN), exact_law(target, Sampling(1.0))) < 1e-6


def test_typical_acceptance_is_not_lossless(target: Target, tmp_path: Path) -> None:
    """The same drafter and the same draws, but for the rule: another law."""
    drafter = load_drafter(medusa(tmp_path), target)
    law = exact_law(target, Sampling(1.0))
    assert p_value(draw(Engine(target, drafter, acceptance="typical"), *PLAIN), law) < 1e-6


def test_typical_acceptance_by_hand() -> None:
    """p(x) > min(0.09, 0.3 exp(-H)), the first that fails ends the draft; of two requests, each its own rows."""
    torch.manual_seed(0)
    logits = torch.randn(7, 6) * 2
    best, worst = logits.argmax(-1), logits.argmin(-1)
    drafts = [
        Draft(torch.stack([best[0], best[1], worst[2]]), chain_parents(3)),
        Draft(torch.stack([worst[4], best[5]]), chain_parents(2)),
    ]
    sequences = [Sequence([1], max_new_tokens=9, sampling=Sampling(0.8, seed=s)) for s in (1, 2)]
    p = probabilities(logits, 0.8)
    expected = []
    for first, draft in ((0, drafts[0]), (4, drafts[1])):
        taken = []
        for i, token in enumerate(draft.tokens.tolist()):
            law = p[first + i]
            entropy = -float((law * law.log()).sum())
            if not float(law[token]) > min(0.09, 0.3 * 2.718281828459045**-entropy):
                break
            taken.append(token)
        expected.append(taken)
    verdicts = verify_typical(sequences, drafts, logits)
    assert [v.tokens[:-1] for v in verdicts] == expected and [len(v.path) for v in verdicts] == [*map(len, expected)]
    assert [len(e) for e in expected] == [2, 0]


def test_typical_acceptance_draws_the_next_token_from_p() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.3], [0.2, 0.8]]))
    draft = Draft(torch.tensor([0]), (-1,))
    sequences = [Sequence([1], max_new_tokens=9, sampling=Sampling(1.0, seed=s)) for s in range(400)]
    ends = [verify_typical([s], [draft], logits)[0].tokens for s in sequences]
    assert all(tokens[0] == 0 for tokens in ends)
    assert 0.72 < sum(tokens[1] for tokens in ends) / 400 < 0.88


def test_typical_acceptance_leaves_greedy_alone_and_refuses_trees() -> None:
    logits, sequence = torch.randn(3, 6), Sequence([1], max_new_tokens=9)
    chain = Draft(torch.tensor([2, 0]), (-1, 0))
    assert verify_typical([sequence], [chain], logits) == verify([sequence], [chain], logits)
    with pytest.raises(SpecdoctorError, match="chains only"):
        verify_typical([sequence], [Draft(torch.tensor([2, 0]), (-1, -1))], logits)


def test_bench_marks_a_lossy_run(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    flags = ("--draft", DFLASH, "--temperature", 1, "--lossy-typical-acceptance")
    result = bench(prompts, *flags)
    acceptance = {"rule": "typical", "lossless": False, "threshold": 0.09, "alpha": 0.3}
    assert result["settings"]["acceptance"] == acceptance
    assert "LOSSY: typical acceptance (threshold 0.09, alpha 0.3)" in invoke(prompts, *flags).stdout
    plain = bench(prompts, "--draft", DFLASH, "--temperature", 1)
    assert plain["settings"]["acceptance"] == {"rule": "lossless", "lossless": True}
    assert arm(result, "ar")["tau_step"]["value"] == 1.0


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--draft", DFLASH), "the temperature is 0; give --temperature"),
        (("--temperature", 1), "no drafter to apply it to"),
    ],
)
def test_bench_refuses_a_lossy_run_without_meaning(tmp_path: Path, flags: tuple, line: str) -> None:
    result = invoke(write_prompts(tmp_path), *flags, "--lossy-typical-acceptance")
    assert result.exit_code == ExitCode.USAGE and line in " ".join(result.output.split())
