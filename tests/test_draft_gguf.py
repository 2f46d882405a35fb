"""Drafters in llama.cpp's GGUF layout: recognised, accounted for, and computed as the formats page says (1.14)."""

import math
from pathlib import Path
from typing import Any

import dflash2_drafts
import pytest
import torch
from dense_drafter import Dense
from dense_eagle import DenseEagle
from eagle_models import AUX, TARGET_LAYERS, Case, specforge, write_eagle
from gguf_drafts import convert, write_gguf
from test_draft_formats_eagle import PROMPT, Rounds
from test_drafter_invariances import ALL_SLIDING, SLIDING, block, some_taps, zlab
from tiny_models import tiny_target, write_drafter

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.gguf_rope import llama3_factors
from specdoctor.formats.drafts.read import open_draft, read_draft

V = 24


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


# One round against the dense computation, and the round after a partial acceptance ------------------------------------

BLOCKS: dict[str, dict] = {
    "dspark": {"head": "vanilla"},
    "dspark without confidence": {
        "head": "vanilla",
        "config_changes": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    },
    "dspark with the target's embedding": {"head": "vanilla", "own_embedding": False},
    "dspark with the embedding output": {"taps": (-1, 0, 1)},
    "dflash": {"family": "zlab"},
    "dflash causal windows": {"family": "zlab", "config_changes": ALL_SLIDING | {"is_causal": True}},
    "dflash windows": {"family": "zlab", "config_changes": SLIDING | {"is_causal": False}},
    "dflash scales": {
        "family": "zlab",
        "config_changes": zlab(input_embedding_scale=8.0, output_multiplier=0.25, final_logit_softcapping=1.5),
    },
}


@pytest.mark.parametrize("case", BLOCKS)
def test_two_rounds_equal_the_dense_computation(target: Target, tmp_path: Path, case: str) -> None:
    folder = write_drafter(tmp_path / "folder", vocab=V, block=5, **BLOCKS[case])
    drafter = load_drafter(convert(folder, tmp_path / "draft.gguf"), target)
    dense = Dense(folder, target)
    taps, more = some_taps(9, len(drafter.taps)), some_taps(2, len(drafter.taps), seed=1)
    hidden, sequence = block(drafter, taps, 7)
    check_round(drafter, dense, hidden, taps, 7)
    with torch.inference_mode():
        drafter.observe([sequence], more, [2])  # the anchor and one draft were committed
        sequence.ids += [5, 3]
        again = drafter.block_hidden([sequence], torch.tensor([3]))[0]
    check_round(drafter, dense, again, torch.cat([taps, more]), 3)


def check_round(drafter: Any, dense: Dense, hidden: torch.Tensor, taps: torch.Tensor, anchor: int) -> None:
    expected = dense.hidden(taps, anchor)
    torch.testing.assert_close(hidden, expected[1:] if dense.zlab else expected, atol=2e-5, rtol=1e-4)
    tokens, _, confidence = dense.greedy(expected, anchor)
    with torch.inference_mode():
        base = drafter.base_logits(hidden[None])
        found, _ = drafter.choose(torch.tensor([anchor]), hidden[None], base, Sampling(), None)
        sure = drafter.confidences(torch.tensor([anchor]), hidden[None], found)
    assert found[0].tolist() == tokens
    assert (sure is None) == (not confidence)
    if sure is not None:
        torch.testing.assert_close(sure[0], torch.tensor(confidence), atol=1e-5, rtol=1e-4)


def test_dflash2_equals_the_dense_computation(tmp_path: Path) -> None:
    target = Target(tiny_target(dflash2_drafts.V, layers=dflash2_drafts.LAYERS))
    folder = dflash2_drafts.write_zlab(tmp_path / "folder", ["full_attention"] * 2)
    path = convert(folder, tmp_path / "draft.gguf")
    assert read_draft(path).spec.algorithm == "dflash2" and read_draft(path).remarks == []
    taps = torch.randn(9, 2 * dflash2_drafts.H, generator=torch.Generator().manual_seed(0))
    found = [block(load_drafter(place, target), taps, 7)[0] for place in (folder, path)]
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)  # the folder's own test compares with the dense one
    dense = dflash2_drafts.Dense(folder, target)
    torch.testing.assert_close(found[1], dense.hidden(taps, 7)[1:], atol=2e-5, rtol=1e-4)


EAGLES: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (Case(specforge(**AUX), taps=(1, 4, 7)), {}),
    "own embedding": (
        Case(specforge(**AUX), taps=(1, 4, 7), tensors=("norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t")),
        {},
    ),
    "norms": (
        Case(
            specforge(**AUX),
            taps=(1, 4, 7),
            tensors=("norm.weight", "lm_head.weight", "d2t", "t2d", "input_norm.weight"),
            facts={"residual_normed": True, "feature_norm": "before_fc"},
        ),
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
}


@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_equals_the_dense_computation(tmp_path: Path, name: str) -> None:
    """q and k rows in llama.cpp's order, `d2t` absolute, the norm before fc under `enc.output_norm`."""
    case, flags = EAGLES[name]
    model, target = tiny_target(40, layers=TARGET_LAYERS), Target(tiny_target(40, layers=TARGET_LAYERS))
    folder = write_eagle(tmp_path / "folder", case)
    drafter = load_drafter(convert(folder, tmp_path / "draft.gguf", "eagle3", **flags), target)
    dense = DenseEagle(folder, case, model)
    rounds = Rounds(target, drafter, PROMPT, truth=2)
    for _ in range(2):
        ids, tokens, logits = rounds.step()
        expected_tokens, expected = dense.draft(ids, 3)
        torch.testing.assert_close(logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)
        assert tokens == expected_tokens
    rounds.engine.release([rounds.sequence])


def test_eagle3_rows_in_another_order_would_show(tmp_path: Path) -> None:
    case, _ = EAGLES["plain"]
    model, target = tiny_target(40, layers=TARGET_LAYERS), Target(tiny_target(40, layers=TARGET_LAYERS))
    folder = write_eagle(tmp_path / "folder", case)
    path = convert(folder, tmp_path / "draft.gguf", "eagle3")
    drafter, dense = load_drafter(path, target), DenseEagle(folder, case, model)
    weight = drafter.network.layers[0].self_attn.q_proj.weight
    weight.data = weight.view(4, 2, 8, -1).swapaxes(1, 2).reshape(weight.shape)
    ids, _, logits = Rounds(target, drafter, PROMPT).step()
    assert not torch.allclose(logits, dense.draft(ids, 3)[1], atol=1e-3)


# What the reader makes of a file -------------------------------------------------------------------------------------


def spec_of(path: Path, **fields: Any) -> None:
    found = read_draft(path).spec
    assert {name: getattr(found, name) for name in fields} == fields


def test_every_tensor_and_key_is_accounted_for(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "f", vocab=V, block=5, head="vanilla")
    checkpoint = read_draft(convert(folder, tmp_path / "d.gguf"))
    assert checkpoint.remarks == [] and checkpoint.title == "GGUF DSpark"
    assert {s.name for s in checkpoint.tensors.values()} == set(checkpoint.source.names())
    assert {key: why for key, why in checkpoint.ignored_keys.items() if not why} == {}
    assert "tokenizer.chat_template.tools" in checkpoint.ignored_keys
    spec_of(tmp_path / "d.gguf", family="gguf", algorithm="dspark", taps=(1, 2), row_offset=1, block_size=5)
    spec_of(tmp_path / "d.gguf", mask_id=V - 1, rms_norm_eps=1e-6, vocab_size=V, markov="vanilla", markov_rank=8)
    origin = checkpoint.spec.origin
    assert origin["taps"] == "config key dflash.target_layers" and origin["markov"] == "tensor markov_w1.weight"


def test_rows_follow_the_markov_head_and_its_key(tmp_path: Path) -> None:
    """draft-dflash reads anchor + k whatever `sample_from_anchor` says; with a Markov head the key decides."""
    dspark, dflash = (write_drafter(tmp_path / n, vocab=V, block=5, head=h) for n, h in (("a", "vanilla"), ("b", None)))
    assert read_draft(convert(dspark, tmp_path / "1.gguf", sample_from_anchor=False)).spec.row_offset == 0
    assert read_draft(convert(dspark, tmp_path / "2.gguf", drop=("sample_from_anchor",))).spec.row_offset == 1
    spec_of(convert(dflash, tmp_path / "3.gguf"), row_offset=0, algorithm="dflash", markov=None)


def test_a_folder_with_one_gguf_and_no_config_is_that_file(target: Target, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "folder", vocab=V, block=5)
    place = tmp_path / "place"
    place.mkdir()
    convert(folder, place / "draft.gguf")
    assert read_draft(place).spec.family == "gguf"
    assert load_drafter(place, target).max_draft == 5
    convert(folder, place / "other.gguf")
    with pytest.raises(SpecdoctorError, match=r"holds 2 \*\.gguf files; give the drafter's own path"):
        read_draft(place)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_other_dtypes_are_read(target: Target, tmp_path: Path, kind: str) -> None:
    from gguf import GGMLQuantizationType, dequantize, quantize
    from safetensors.torch import load_file

    folder = write_drafter(tmp_path / "folder", vocab=V, block=5)
    checkpoint = read_draft(convert(folder, tmp_path / "draft.gguf", quantised=kind))
    want, kinds = load_file(folder / "model.safetensors")["fc.weight"], GGMLQuantizationType[kind]
    found = checkpoint.load()["fc.weight"]
    expected = torch.from_numpy(dequantize(quantize(want.numpy(), kinds), kinds).copy())
    assert found.float().equal(expected) and found.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(
        kind, torch.float32
    )
    assert checkpoint.source.dtype("fc.weight") == {"F16": "float16", "BF16": "bfloat16"}.get(kind, kind.lower())
    load_drafter(tmp_path / "draft.gguf", target)


def test_tied_head_and_reduced_vocabulary(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_drafter(tmp_path / "f", vocab=V, block=5, drop=("lm_head.weight",))
    checkpoint = read_draft(convert(folder, tmp_path / "tied.gguf"))
    assert checkpoint.spec.head_source == "checkpoint"
    assert checkpoint.load()["lm_head.weight"].equal(checkpoint.load()["embed_tokens.weight"])
    whole = write_drafter(tmp_path / "g", vocab=V, block=5)
    tensors = load_file(whole / "model.safetensors")
    ids = torch.tensor([0, 3, 4, 9, 23])
    rows = ("lm_head.weight", "markov_head.markov_w2.weight")
    tensors |= {name: tensors[name][ids] for name in rows} | {"d2t": ids - torch.arange(5)}
    save_file(tensors, whole / "model.safetensors")
    reduced = read_draft(convert(whole, tmp_path / "reduced.gguf"))
    assert reduced.spec.draft_vocab_size == 5 and reduced.load()["d2t"].tolist() == ids.tolist()


def test_early_designs_are_read_with_a_warning(target: Target, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "folder", vocab=V, block=5)
    for arch in ("dspark", "dflash-draft"):
        path = convert(folder, tmp_path / f"{arch}.gguf", arch, markov_rank=8)
        (remark,) = read_draft(path).remarks
        assert remark.kind == "unverified" and f"general.architecture is '{arch}'" in remark.line()
        assert load_drafter(path, target).max_draft == 5


def test_other_architectures_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {"llama.block_count": 2}, {"x.weight": torch.ones(2, 2)})
    with pytest.raises(SpecdoctorError, match="a GGUF of architecture 'llama'"):
        read_draft(path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hyper_connection.count": 4}, "dflash.hyper_connection.count: a DSpark of DeepSeek-V4"),
        ({"attention.value_scale": 0.5}, "key dflash.attention.value_scale is 0.5"),
        ({"hidden_act": "gelu"}, "key dflash.hidden_act is 'gelu'"),
        ({"rope.dimension_count": 8}, "dflash.rope.dimension_count is 8"),
        ({"rope.scaling.type": "longrope"}, "dflash.rope.scaling.type is 'longrope', expected none, linear or yarn"),
        ({"attention.value_length": 8}, "dflash.attention.value_length differs from key_length, 16"),
        ({"attention.sliding_window": 6, "attention.sliding_window_pattern": [True]}, "1 entries in"),
        ({"target_layers": [2, 1]}, r"dflash.target_layers is \[2, 1\], expected rising layer numbers"),
    ],
)
def test_what_cannot_be_run_is_refused_by_its_key(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    folder = write_drafter(tmp_path / "folder", vocab=V, block=5)
    with pytest.raises(SpecdoctorError, match=said):
        read_draft(convert(folder, tmp_path / "draft.gguf", **more))


@pytest.mark.parametrize("key", ["target_layers", "mask", "embedding_length"])
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    folder = write_drafter(tmp_path / "folder", vocab=V, block=5)
    with pytest.raises(SpecdoctorError, match=rf"{key}\w* is missing"):
        read_draft(convert(folder, tmp_path / "draft.gguf", drop=(key,)))


def test_unknown_tensors_and_cut_files_are_refused(target: Target, tmp_path: Path) -> None:
    config, tensors = open_draft(convert(write_drafter(tmp_path / "f", vocab=V, block=5), tmp_path / "d.gguf"))
    entries = {k: v for k, v in _flat(config.values).items() if not k.startswith(("GGUF.", "general."))}
    stored = {name: tensors.load([name])[name].clone() for name in tensors.names()}
    sinks = write_gguf(tmp_path / "s.gguf", "dflash", entries, stored | {"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(SpecdoctorError, match=r"tensor blk.0.attn_sinks.weight is not used by this format"):
        load_drafter(sinks, target)
    del stored["blk.1.attn_q.weight"]
    with pytest.raises(SpecdoctorError, match=r"tensor blk.1.attn_q.weight is missing"):
        read_draft(write_gguf(tmp_path / "m.gguf", "dflash", entries, stored))
    whole = (tmp_path / "d.gguf").read_bytes()
    (tmp_path / "c.gguf").write_bytes(whole[: len(whole) // 4])
    with pytest.raises(SpecdoctorError, match="cut off or damaged"):
        read_draft(tmp_path / "c.gguf")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def test_eagle3_with_other_than_three_taps_is_refused(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path / "folder", EAGLES["plain"][0])
    with pytest.raises(SpecdoctorError, match=r"eagle3.target_layers has 2 entries, expected 1 and 3"):
        read_draft(convert(folder, tmp_path / "d.gguf", "eagle3", target_layers=[1, 4]))


# RoPE -----------------------------------------------------------------------------------------------------------------


def test_rope_scaling_keys(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "folder", vocab=V, block=5)
    more = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    rope = read_draft(convert(folder, tmp_path / "y.gguf", **more)).spec.rope
    assert rope == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "max_position_embeddings": 512,
    }
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert read_draft(convert(folder, tmp_path / "l.gguf", **linear)).spec.rope["factor"] == 2.0


def test_llama3_frequency_factors_give_their_parameters_back(tmp_path: Path) -> None:
    """llama.cpp's converter stores the factors alone; against transformers' own function."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=settings, max_position_embeddings=512)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    factors = (plain / inverse).float()
    torch.testing.assert_close(torch.tensor(llama3_factors(10000.0, settings, 16)), factors, atol=1e-4, rtol=1e-4)
    path = convert(write_drafter(tmp_path / "f", vocab=V, block=5), tmp_path / "d.gguf")
    config_of, tensors = open_draft(path)
    entries = {k: v for k, v in _flat(config_of.values).items() if not k.startswith(("GGUF.", "general."))}
    stored = {name: tensors.load([name])[name].clone() for name in tensors.names()} | {"rope_freqs.weight": factors}
    checkpoint = read_draft(write_gguf(tmp_path / "r.gguf", "dflash", entries, stored))
    assert checkpoint.spec.rope == settings | {"max_position_embeddings": 512} and checkpoint.remarks == []
    stored["rope_freqs.weight"] = torch.linspace(1, math.pi, 8)
    with pytest.raises(SpecdoctorError, match="frequency factors of no known Llama-3 scaling"):
        read_draft(write_gguf(tmp_path / "o.gguf", "dflash", entries, stored))
