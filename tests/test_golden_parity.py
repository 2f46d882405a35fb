"""The outputs of the public reference implementations, reproduced exactly (data: tests/data/golden/README.md)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target

GOLDEN = Path(__file__).parent / "data" / "golden"
BLOCK_DRAFTERS = [
    "deepspec-dspark-vanilla",
    "deepspec-dspark-gated",
    "deepspec-dspark-rnn",
    "deepspec-dflash",
    "zlab-dflash",
]
DRAFTERS = [*BLOCK_DRAFTERS, "deepspec-eagle3"]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(GOLDEN / "target", "cpu", "float32")


def expected_prompts(folder: str) -> list[dict]:
    return json.loads((GOLDEN / folder / "expected_greedy.json").read_text())["prompts"]


@pytest.mark.parametrize("folder", DRAFTERS)
@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_greedy_ids_and_accepted_lengths(target: Target, folder: str, batched: bool) -> None:
    engine = Engine(target, load_drafter(GOLDEN / folder, target))
    prompts = expected_prompts(folder)
    sequences = [Sequence(p["prompt_ids"], max_new_tokens=48) for p in prompts]
    for batch in [sequences] if batched else [[s] for s in sequences]:
        engine.generate(batch)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.ids == prompt["output_ids"]
        assert [r.accepted + 1 for r in sequence.records] == prompt["acceptance_lengths_with_bonus"]
        if "proposal_lengths" in prompt:
            assert [r.drafted for r in sequence.records] == prompt["proposal_lengths"]


def test_plain_decoding_gives_the_same_ids(target: Target) -> None:
    prompts = expected_prompts("deepspec-dflash")
    sequences = [Sequence(p["prompt_ids"], max_new_tokens=48) for p in prompts]
    Engine(target).generate(sequences)
    assert [s.ids for s in sequences] == [p["output_ids"] for p in prompts]
    assert all(r.drafted == 0 and len(r.committed_ids) == 1 for s in sequences for r in s.records)


@pytest.mark.parametrize("folder", [f for f in BLOCK_DRAFTERS if f.startswith("deepspec")])
@pytest.mark.parametrize("index", range(4))
def test_first_round_tensors(target: Target, folder: str, index: int) -> None:
    drafter = load_drafter(GOLDEN / folder, target)
    want = load_file(GOLDEN / folder / "expected_first_round.safetensors")
    sequence = Sequence(expected_prompts(folder)[index]["prompt_ids"], max_new_tokens=8)
    n = sequence.prompt_length
    slot = target.open()
    output = target.forward(PackedRows([slot], [0], [n], target.device), torch.tensor(sequence.ids), taps=drafter.taps)
    target.close(slot)

    def close(value: torch.Tensor, name: str) -> None:
        torch.testing.assert_close(value, want[f"{index}.{name}"], atol=1e-4, rtol=1e-4)

    close(output.taps, "context_features")
    anchors = output.logits[-1:].argmax(-1)
    assert anchors.tolist() == want[f"{index}.anchor"].tolist()
    with torch.inference_mode():
        drafter.begin([sequence])
        drafter.observe([sequence], output.taps, [n])
        hidden = drafter.block_hidden([sequence], anchors)
        base = drafter.base_logits(hidden)
        tokens, _ = drafter.choose(anchors, hidden, base, Sampling(), None)
        confidence = drafter.confidences(anchors, hidden, tokens)
    close(hidden[0], "block_hidden")
    close(base[0], "base_logits")
    assert tokens[0].tolist() == want[f"{index}.draft_tokens"].tolist()
    if confidence is not None:
        close(torch.logit(confidence[0]), "confidence_logits")
