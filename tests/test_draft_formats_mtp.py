"""MTP checkpoints: speculators' own and those inside targets, against a dense recomputation from the formats page."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_mtp import HIDDEN as H
from tiny_mtp import V, dense, mtp_tensors, settings, write_native, write_speculators, write_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import StaticTree
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft

PROMPT = [3, 17, 8, 25, 11, 30, 2]
NATIVE = ["qwen3-next", "qwen3.5", "qwen3.5-moe", "deepseek-v3", "glm-4.5", "mimo"]
LAYERS = {"mimo": 2, "deepseek-v3": 2}  # cases with several MTP layers


class Pair:
    """A target, its MTP drafter, and what the test itself computes from their files."""

    def __init__(self, root: Path, case: str, layers: int = 1) -> None:
        more = {"num_nextn_predict_layers": layers} if layers > 1 else {}
        self.case, self.layers, self.config = case, layers, settings(case, **more)
        self.target_folder = self.folder = root / "target"
        if case.startswith("speculators"):
            write_target(self.target_folder, self.config)
            self.folder = write_speculators(root / "draft", self.config, case)
        else:
            write_native(self.folder, case, layers, **more)
        if case == "mimo":  # the target as transformers can load it
            self.target_folder = root / "as-qwen2"
            write_target(self.target_folder, self.config)
        self.target = Target.load(self.target_folder, device="cpu", dtype="float32")
        self.model = AutoModelForCausalLM.from_pretrained(
            self.target_folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.drafter: Any = load_drafter(self.folder, self.target)
        self.dense = dense(case, self.config, self.folder, self.model)

    def hidden(self, ids: list[int]) -> Tensor:
        """What the drafter reads of `ids` [a]: after the final norm, but before it for speculators [a, H]."""
        raw: list[Tensor] = []
        decoder = self.model.get_decoder()
        module = decoder.layers[-1] if self.case.startswith("speculators") else decoder.norm
        hook = module.register_forward_hook(lambda _m, _a, out: raw.append(out[0] if isinstance(out, tuple) else out))
        with torch.inference_mode():
            self.model(torch.tensor([ids]))
        hook.remove()
        return raw[0].view(len(ids), H).clone()

    def decode(self, sampling: Sampling, length: int, K: int, tree: Any = None) -> tuple[Sequence, list[tuple]]:
        """A sequence decoded, and for each round the ids before it and the draft."""
        seen: list[tuple[list[int], Draft]] = []
        name = "propose" if tree is None else "propose_tree"
        honest = getattr(self.drafter, name)

        def watched(sequences: list[Sequence], *args: Any) -> list[Draft]:
            drafts = honest(sequences, *args)
            seen.append((list(sequences[0].ids), drafts[0]))
            return drafts

        setattr(self.drafter, name, watched)
        engine = Engine(self.target, self.drafter, draft_tokens=None if tree else K, tree=tree)
        sequence = Sequence(PROMPT, max_new_tokens=length, sampling=sampling)
        engine.generate([sequence])
        delattr(self.drafter, name)
        return sequence, seen

    def expected(self, ids: list[int], drafted: list[int], shift: int = 0) -> Tensor:
        with torch.inference_mode():
            return self.dense.logits(ids, self.hidden(ids[:-1]), drafted, self.layers, shift)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Pair]:
    return {}


def pair(pairs: dict, tmp_path_factory: pytest.TempPathFactory, case: str, layers: int = 1) -> Pair:
    if (case, layers) not in pairs:
        pairs[case, layers] = Pair(tmp_path_factory.mktemp("mtp"), case, layers)
    return pairs[case, layers]


ALL = [*((case, 1) for case in NATIVE), ("speculators", 1), ("speculators-moe", 1), *LAYERS.items()]


@pytest.mark.parametrize(("case", "layers"), ALL)
def test_rounds_equal_a_dense_recomputation(
    pairs: dict, tmp_path_factory: pytest.TempPathFactory, case: str, layers: int
) -> None:
    """q of every draft token in the first and the later rounds, after accepted, partly accepted and refused drafts."""
    one = pair(pairs, tmp_path_factory, case, layers)
    sequence, rounds = one.decode(Sampling(temperature=1.5, seed=4), length=14, K=3)
    accepted = [record.accepted for record in sequence.records]
    assert len(rounds) >= 3 and any(0 < n < 3 for n in accepted), accepted
    for ids, draft in rounds:
        drafted = draft.tokens.tolist()
        q = (one.expected(ids, drafted) / 1.5).softmax(-1)
        assert torch.allclose(draft.probs, q, atol=1e-5)
        assert q.max() > 0.1, "a flat q would hide errors"


@pytest.mark.parametrize(("case", "layers"), ALL)
def test_greedy_text_is_the_targets_own(
    pairs: dict, tmp_path_factory: pytest.TempPathFactory, case: str, layers: int
) -> None:
    one = pair(pairs, tmp_path_factory, case, layers)
    sequence, rounds = one.decode(Sampling(), length=10, K=3)
    ids, draft = rounds[0]
    assert draft.tokens.tolist() == one.expected(ids, draft.tokens.tolist()).argmax(-1).tolist()
    plain = Sequence(PROMPT, max_new_tokens=10)
    Engine(one.target).generate([plain])
    with torch.inference_mode():
        own = list(PROMPT)
        for _ in range(10):
            own.append(int(one.model(torch.tensor([own])).logits[0, -1].argmax()))
    assert sequence.completion_ids == plain.completion_ids == own[len(PROMPT) :]


@pytest.mark.parametrize(("case", "layers"), [("qwen3-next", 1), ("deepseek-v3", 1), ("deepseek-v3", 2)])
def test_two_requests_at_once_draft_as_alone(
    pairs: dict, tmp_path_factory: pytest.TempPathFactory, case: str, layers: int
) -> None:
    one = pair(pairs, tmp_path_factory, case, layers)
    prompts = [PROMPT, [1, 2, 3]]

    def run(chosen: list[list[int]]) -> list[list[int]]:
        sequences = [Sequence(p, max_new_tokens=9, sampling=Sampling(1.0, seed=len(p))) for p in chosen]
        Engine(one.target, one.drafter, draft_tokens=3).generate(sequences)
        return [s.completion_ids for s in sequences]

    assert run(prompts) == [*run(prompts[:1]), *run(prompts[1:])]


def test_positions_may_shift_together(pairs: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The pairing at position i or i + 1 is the same drafter (formats page 1.12): only distances count."""
    one = pair(pairs, tmp_path_factory, "deepseek-v3")
    assert torch.allclose(one.expected(PROMPT, [4, 5, 6]), one.expected(PROMPT, [4, 5, 6], shift=37), atol=1e-4)


def test_own_steps_never_stay_in_the_cache(pairs: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two proposals from the same state are the same, whatever was drafted in between; so are two chunks and one."""
    for layers in (1, 2):
        drafter = pair(pairs, tmp_path_factory, "deepseek-v3", layers).drafter
        states = torch.randn(6, H, generator=torch.Generator().manual_seed(0))

        def proposal(chunks: list[int], between: int, drafter: Any = drafter, states: Tensor = states) -> list[int]:
            sequence = Sequence(PROMPT, max_new_tokens=1)
            drafter.begin([sequence])
            first = 0
            for chunk in chunks:
                sequence.ids = PROMPT[: first + chunk + 1]
                drafter.observe([sequence], states[first : first + chunk], [chunk])
                first += chunk
                if between and first < len(states):
                    drafter.propose([sequence], between)
            tokens = drafter.propose([sequence], 3)[0].tokens.tolist()
            drafter.end(sequence)
            return tokens

        with torch.inference_mode():
            assert proposal([6], 0) == proposal([2, 4], 0) == proposal([2, 1, 3], 4) == proposal([1] * 6, 1)


def test_a_tree_of_one_layer_holds_its_paths(pairs: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    one = pair(pairs, tmp_path_factory, "qwen3-next")
    tree = StaticTree((-1, -1, 0, 0, 1, 2), sampled=False)
    _, rounds = one.decode(Sampling(), length=6, K=3, tree=tree)
    for ids, draft in rounds[:2]:
        tokens = draft.tokens.tolist()
        chain = [tokens[0], tokens[2], tokens[5]]
        logits = one.expected(ids, chain)
        assert logits.argmax(-1).tolist() == chain
        assert [tokens[0], tokens[1]] == logits[0].topk(2).indices.tolist()
        assert [tokens[2], tokens[3]] == logits[1].topk(2).indices.tolist()
        assert tokens[4] == int(one.expected(ids, [tokens[1], 0])[1].argmax())


def test_several_layers_draft_chains_only(pairs: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    one = pair(pairs, tmp_path_factory, "mimo", 2)
    with pytest.raises(SpecdoctorError, match=r"2 MTP layers, which draft chains only"):
        one.decode(Sampling(), length=6, K=3, tree=StaticTree((-1, -1), sampled=False))


@pytest.mark.parametrize("case", NATIVE)
def test_every_tensor_of_a_target_folder_is_accounted_for(
    pairs: dict, tmp_path_factory: pytest.TempPathFactory, case: str
) -> None:
    one = pair(pairs, tmp_path_factory, case)
    checkpoint = read_draft(one.folder)
    assert checkpoint.spec.algorithm == "mtp" and checkpoint.spec.block_class == one.config["model_type"]
    assert checkpoint.title == "native MTP layers" and not checkpoint.remarks
    used = {stored.name for stored in checkpoint.tensors.values()}
    assert used == set(mtp_tensors(case, one.config)) | {n for n in used if "embed_tokens" in n or "shared_head.h" in n}
    assert set(checkpoint.ignored) == set(checkpoint.source.names()) - used
    assert set(checkpoint.ignored.values()) == {"the target's own"}
    assert checkpoint.spec.recurrent_normed == (case not in ("deepseek-v3", "glm-4.5"))
    assert checkpoint.spec.hidden_first == (case == "mimo") and not checkpoint.spec.tap_final_is_prenorm
    assert checkpoint.spec.norm_offset == case.startswith("qwen3")


def test_only_mtp_tensors_are_loaded(
    pairs: dict, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair(pairs, tmp_path_factory, "qwen3-next")
    checkpoint = read_draft(one.folder)
    asked: list[str] = []
    honest = checkpoint.source.load
    monkeypatch.setattr(checkpoint.source, "load", lambda names: (asked.extend(names), honest(names))[1])
    checkpoint.load()
    assert asked and all(name.startswith("mtp.") for name in asked)


def test_speculators_spec(pairs: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    spec = read_draft(pair(pairs, tmp_path_factory, "speculators").folder).spec
    assert spec.taps == (2,) and spec.tap_final_is_prenorm and spec.draft_tokens == 4 and spec.recurrent_normed
    assert spec.target_name == "someone/target" and spec.embed_source == spec.head_source == "target"


def test_speculators_steps_from_the_proposal_method(tmp_path: Path) -> None:
    folder = write_speculators(tmp_path, settings("speculators"), num_speculative_steps=None)
    checkpoint = read_draft(folder)
    assert checkpoint.spec.draft_tokens == 4
    assert checkpoint.spec.origin["draft_tokens"] == "config key speculators_config.proposal_methods"
    assert [(r.kind, r.subject, r.fatal) for r in checkpoint.remarks] == [("unverified", "taps", False)]


def test_speculators_own_depth_of_one(tmp_path: Path) -> None:
    checkpoint = read_draft(write_speculators(tmp_path, settings("speculators", num_hidden_layers=1)), 2)
    assert checkpoint.spec.taps == (2,) and checkpoint.spec.num_target_layers is None
    assert [(r.kind, r.subject) for r in checkpoint.remarks] == [
        ("unverified", "taps"),
        ("unverified", "transformer_layer_config.num_hidden_layers"),
    ]


def test_two_layers_of_speculators_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecdoctorError, match=r"num_nextn_predict_layers is 2, expected 1"):
        read_draft(write_speculators(tmp_path, settings("speculators"), num_nextn_predict_layers=2))


def rewritten(folder: Path, change: Any, **keys: Any) -> Path:
    """The folder with other tensors, and keys of its config set."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def test_text_config_of_a_multimodal_target(tmp_path: Path) -> None:
    folder = write_native(tmp_path, "qwen3.5")
    text = settings("qwen3.5")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text})
    )
    checkpoint = read_draft(folder)
    assert checkpoint.spec.block_class == "qwen3_5_text" and not checkpoint.remarks
    assert checkpoint.spec.origin["hidden_size"] == "config key text_config.hidden_size"


def test_a_target_saved_without_its_mtp_layers(tmp_path: Path) -> None:
    folder = write_native(tmp_path, "deepseek-v3")
    rewritten(folder, lambda t: {n: x for n, x in t.items() if not n.startswith("model.layers.2.")})
    with pytest.raises(SpecdoctorError, match=r"num_nextn_predict_layers promises MTP layers, .* drops them"):
        read_draft(folder)


def test_a_missing_and_an_unknown_tensor(tmp_path: Path) -> None:
    folder = write_native(tmp_path, "mimo")
    rewritten(folder, lambda t: t | {"model.mtp_layers.0.extra.weight": torch.ones(2)})
    remarks = read_draft(folder).remarks
    assert [(r.kind, r.subject, r.fatal) for r in remarks] == [
        ("unknown-tensor", "model.mtp_layers.0.extra.weight", True)
    ]
    keep = lambda t: {n: x for n, x in t.items() if not n.endswith(("extra.weight", "mtp_layers.0.mlp.up_proj.weight"))}  # noqa: E731
    with pytest.raises(SpecdoctorError, match=r"tensor model\.mtp_layers\.0\.mlp\.up_proj\.weight is missing"):
        read_draft(rewritten(folder, keep))


def test_another_number_of_layers_than_promised(tmp_path: Path) -> None:
    folder = write_native(tmp_path, "deepseek-v3", num_nextn_predict_layers=3)
    fatal = [r for r in read_draft(folder).remarks if r.fatal]
    assert len(fatal) == 1 and "is 3, but the folder holds the tensors of 1 MTP layers" in fatal[0].evidence


def test_quantised_layers_are_refused(tmp_path: Path) -> None:
    folder = write_native(tmp_path, "mimo")
    name = "model.mtp_layers.0.input_proj.weight"
    rewritten(folder, lambda t: t | {name: t[name].to(torch.float8_e4m3fn)})
    fatal = [r for r in read_draft(folder).remarks if r.fatal]
    assert len(fatal) == 1 and name in fatal[0].evidence and "not quantised" in fatal[0].fix


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    folder = rewritten(write_native(tmp_path, "mimo"), dict, model_type="step3")
    with pytest.raises(SpecdoctorError, match=r"model_type is 'step3'; MTP layers can be run for qwen2, mimo"):
        read_draft(folder)


def test_concatenation_order_is_not_told_by_names(pairs: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Negative control of the recomputation: MiMo's layers read in speculators' order give another q."""
    one = pair(pairs, tmp_path_factory, "mimo")
    _, rounds = one.decode(Sampling(temperature=1.0, seed=4), length=4, K=2)
    ids, draft = rounds[0]
    weight = "model.mtp_layers.0.input_proj.weight"
    stored = one.dense.t[weight]
    try:
        one.dense.t[weight] = torch.cat([stored[:, H:], stored[:, :H]], dim=1)
        wrong = one.expected(ids, draft.tokens.tolist()).softmax(-1)
    finally:
        one.dense.t[weight] = stored
    assert (draft.probs - wrong).abs().max() > 1e-2
    assert draft.probs.shape[1] == V
