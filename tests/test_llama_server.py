"""Exported drafters served for real by llama.cpp: the same text, and the same drafts as our reference computes.

Three comparisons, from exact to statistical:

1. Tiny trained pairs (data/golden) in float32 with float32 caches: text and accepted tokens equal the outputs of the
   public reference implementations, token for token.
2. A DFlash under the other `--spec-type`, the negative control: rows shifted by one must show.
3. SmolLM2 (its own GGUF, Q4_1) with the drafters of real size: texts with and without drafter are equal up to near
   ties, and the accepted tokens per position are those of our reference on the same prompts and texts. llama.cpp
   multiplies quantised weights with activations rounded to 8 bits, our reference has float32 throughout, so a draft's
   argmax may flip where two tokens are close: up to 3 % of the rounds (and at least 3 rounds) may differ at a position,
   less than one standard error of such counts. The server does not draft beyond the length asked for; neither does the
   count here.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_targets import write_target_gguf
from llama_server import LlamaServer, find_llama_server, llama_server
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import EnvironmentMissingError
from specdoctor.formats.drafts.export import export_draft
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.drafts.target_facts import read_target_facts
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.accept_pass import AcceptancePass, PassOptions
from specdoctor.measure.corpus import CorpusText
from specdoctor.measure.prompts import load_bundled, load_tokenizer, render

GOLDEN = Path(__file__).parent / "data" / "golden"
EXACT = ("-c", "512", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32")
DRAFT_THREADS = ("-td", "1", "-tbd", "1")
ROUNDS_THAT_MAY_DIFFER = 0.03
NEAR_TIE = 0.1  # natural log of the ratio of two probabilities; 8-bit activations move logits by about that much

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def binary() -> Path:
    return find_llama_server()


def accepted_by_position(rounds: Iterable[list[int]], tokens: int) -> Counter[int]:
    """How many rounds accepted more than k drafts, for texts of `tokens` tokens of which none may be overshot."""
    counts: Counter[int] = Counter()
    for accepted in rounds:
        written = 1  # the prefill's token
        for count in accepted:
            kept = min(count, tokens - written - 1)
            counts.update(range(kept))
            written += kept + 1
    return counts


def reported(metrics: dict[str, float]) -> Counter[int]:
    """What /metrics says of the same."""
    counts = {int(key[9:-1]): int(value) for key, value in metrics.items() if key.startswith("accepted[")}
    return Counter({position: count for position, count in counts.items() if count})


class TestGoldenPairs:
    """The target is a Qwen3 of six layers; four prompts, 48 tokens, greedy."""

    TOKENS = 48

    @pytest.fixture(scope="class")
    def target(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32)
        return write_target_gguf(model, tmp_path_factory.mktemp("golden") / "target.gguf")

    def serve(self, binary: Path, target: Path, draft: Path, spec_type: str, folder: Path) -> Any:
        """A server with `draft` exported to GGUF."""
        exported = export_draft(read_draft(draft, 6), "gguf", read_target_facts(target), folder / f"{draft.name}.gguf")
        options = ("--spec-type", spec_type, "--spec-draft-n-max", "5", *EXACT, *DRAFT_THREADS)
        return llama_server(binary, folder / "server.log", "-m", target, "-md", exported.path, *options)

    def expected(self, name: str) -> list[dict[str, Any]]:
        prompts: list[dict[str, Any]] = json.loads((GOLDEN / name / "expected_greedy.json").read_text())["prompts"]
        return prompts

    @pytest.mark.parametrize(
        ("name", "spec_type"),
        [
            ("deepspec-dspark-vanilla", "draft-dspark"),
            ("deepspec-dflash", "draft-dspark"),  # with a Markov head of zeros: its row k predicts anchor + k + 1
            ("zlab-dflash", "draft-dflash"),
        ],
    )
    def test_as_the_reference_implementation(
        self, binary: Path, target: Path, tmp_path: Path, name: str, spec_type: str
    ) -> None:
        prompts = self.expected(name)
        with self.serve(binary, target, GOLDEN / name, spec_type, tmp_path) as server:
            for prompt in prompts:
                answer = server.greedy(prompt["prompt_ids"], self.TOKENS)
                assert answer["tokens"] == prompt["output_ids"][len(prompt["prompt_ids"]) :]
            found = reported(server.metrics())
        rounds = [[n - 1 for n in prompt["acceptance_lengths_with_bonus"]] for prompt in prompts]
        assert found == accepted_by_position(rounds, self.TOKENS)

    def test_dflash_served_as_draft_dflash_would_be_shifted(self, binary: Path, target: Path, tmp_path: Path) -> None:
        """Negative control, and why the exporter adds the head of zeros (formats page 3.2)."""
        prompts = self.expected("deepspec-dflash")
        with self.serve(binary, target, GOLDEN / "deepspec-dflash", "draft-dflash", tmp_path) as server:
            for prompt in prompts:
                answer = server.greedy(prompt["prompt_ids"], self.TOKENS)
                assert answer["tokens"] == prompt["output_ids"][len(prompt["prompt_ids"]) :]  # lossless all the same
            shifted = reported(server.metrics())
        rounds = [[n - 1 for n in prompt["acceptance_lengths_with_bonus"]] for prompt in prompts]
        assert shifted.total() < 0.7 * accepted_by_position(rounds, self.TOKENS).total()

    @pytest.mark.parametrize("reduced", [False, True], ids=["full-vocabulary", "reduced-vocabulary"])
    def test_eagle3(self, binary: Path, target: Path, tmp_path: Path, reduced: bool) -> None:
        """The golden EAGLE-3 without its q/k norms, which llama.cpp has none of, against our engine."""
        draft = self.eagle3_without_norms(tmp_path / "eagle3", reduced)
        prompts = self.expected("deepspec-eagle3")
        with self.serve(binary, target, draft, "draft-eagle3", tmp_path) as server:
            answers = [server.greedy(prompt["prompt_ids"], self.TOKENS)["tokens"] for prompt in prompts]
            found = reported(server.metrics())
        model = Target.load(GOLDEN / "target", "cpu", "float32")
        drafter = load_drafter(tmp_path / "eagle3.gguf", model)
        sequences = [Sequence(p["prompt_ids"], max_new_tokens=self.TOKENS) for p in prompts]
        Engine(model, drafter).generate(sequences)
        assert answers == [sequence.completion_ids for sequence in sequences]
        rounds = [[record.accepted for record in sequence.records] for sequence in sequences]
        assert found == accepted_by_position(rounds, self.TOKENS)
        assert found[0] > 10  # it drafts for this target still

    def eagle3_without_norms(self, folder: Path, reduced: bool) -> Path:
        """SpecForge's layout; `reduced`: with a draft vocabulary that lacks every fifth id."""
        config = json.loads((GOLDEN / "deepspec-eagle3" / "config.json").read_text())
        tensors = {
            name.replace("layers.0.", "midlayer."): value
            for name, value in load_file(GOLDEN / "deepspec-eagle3" / "model.safetensors").items()
            if "q_norm" not in name and "k_norm" not in name
        }
        ids = torch.tensor([i for i in range(256) if i % 5 or not reduced])
        if reduced:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][ids].contiguous()
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(256, dtype=torch.bool)
            tensors["t2d"][ids] = True
        kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        kept += ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "num_hidden_layers", "hidden_act")
        own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 256}
        own |= {"draft_vocab_size": len(ids), "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({key: config[key] for key in kept} | own))
        save_file(tensors, folder / "model.safetensors")
        return folder


class TestRealPair:
    """SmolLM2-135M and its drafters: six prompts, 48 tokens, as a user would start the server."""

    TOKENS, DRAFTS = 48, 7

    @pytest.fixture(scope="class")
    def folder(self) -> Path:
        try:
            return resolve_model("smollm2-135m")
        except EnvironmentMissingError as error:
            pytest.skip(str(error))

    @pytest.fixture(scope="class")
    def prompts(self, folder: Path) -> list[list[int]]:
        return [p.ids for p in render(load_bundled(["code", "chat", "math"], 6), load_tokenizer(folder))]

    @pytest.fixture(scope="class")
    def plain(self, binary: Path, folder: Path, prompts: list[list[int]], tmp_path_factory: Any) -> list[list[int]]:
        """The server's own text without a drafter."""
        log = tmp_path_factory.mktemp("plain") / "server.log"
        with llama_server(binary, log, "-m", folder / "smollm2-135m.gguf", "-c", "1024") as server:
            return [server.greedy(ids, self.TOKENS)["tokens"] for ids in prompts]

    @pytest.fixture(scope="class")
    def target(self, folder: Path) -> Target:
        return Target.load(folder, "cpu", "float32")

    @pytest.mark.parametrize("name", ["dspark-smollm2-135m", "dflash-smollm2-135m"])
    def test_text_and_acceptance(
        self,
        binary: Path,
        folder: Path,
        prompts: list[list[int]],
        plain: list[list[int]],
        target: Target,
        tmp_path: Path,
        name: str,
    ) -> None:
        exported = export_draft(
            read_draft(resolve_model(name)), "gguf", read_target_facts(folder), tmp_path / f"{name}.gguf"
        )
        options = ("--spec-type", "draft-dspark", "--spec-draft-n-max", str(self.DRAFTS), "-c", "1024", *DRAFT_THREADS)
        gguf = folder / "smollm2-135m.gguf"
        with llama_server(binary, tmp_path / "server.log", "-m", gguf, "-md", exported.path, *options) as server:
            texts = [server.greedy(ids, self.TOKENS)["tokens"] for ids in prompts]
            metrics = server.metrics()
            for ids, drafted, alone in zip(prompts, texts, plain, strict=True):
                self.check_equal_up_to_near_ties(server, ids, drafted, alone)
        drafter = load_drafter(exported.path, target)
        options_of_pass = PassOptions(draft_tokens=self.DRAFTS, depth=self.DRAFTS, drafted_paths=False)
        reference = AcceptancePass(target, drafter, Sampling(), options_of_pass)
        rounds = []
        for i, (ids, text) in enumerate(zip(prompts, texts, strict=True)):
            known = CorpusText(f"{i}", "", 0, ids, text, None, self.TOKENS)
            replayed = reference.run(known, len(text)).rounds
            assert replayed is not None
            rounds.append(replayed.accepted.tolist())
        expected, found = accepted_by_position(rounds, self.TOKENS), reported(metrics)
        slack = max(3, ROUNDS_THAT_MAY_DIFFER * metrics["drafts"])
        for position in range(self.DRAFTS):
            assert abs(found[position] - expected[position]) <= slack, (position, found, expected)
        assert found.total() > 0.5 * metrics["drafts"]

    def check_equal_up_to_near_ties(
        self, server: LlamaServer, prompt: list[int], drafted: list[int], alone: list[int]
    ) -> None:
        """Where two texts part, the server itself must find the two tokens almost equally likely."""
        at = next((i for i, (a, b) in enumerate(zip(drafted, alone, strict=True)) if a != b), None)
        if at is None:
            return
        answer = server.greedy(prompt + alone[:at], 1, n_probs=5)
        found = {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}
        assert {drafted[at], alone[at]} <= set(found)
        assert abs(found[drafted[at]] - found[alone[at]]) < NEAR_TIE
