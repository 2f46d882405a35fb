"""Readers of block drafters: origins, defaults, accounting, and what is recognised and refused, each by its line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from block_layouts import (
    LAYOUTS,
    MASK,
    REDUCED,
    Facts,
    V,
    changed,
    dflash_08_bidirectional,
    dflash_from_anchor,
    dflash_reduced,
    dspark_narrow,
    dspark_vanilla_reduced,
    layer_config,
    speculators,
    written,
    zlab,
    zlab_last_layer,
)
from safetensors.torch import load_file, save_file
from tiny_models import tiny_target, write_drafter

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft

DEPTH = 8


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, layers=DEPTH))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_key_and_tensor_is_accounted_for(tmp_path: Path, layout: Callable[[Path], Facts]) -> None:
    layout(tmp_path)
    checkpoint = read_draft(tmp_path, DEPTH)
    assert [r.line() for r in checkpoint.remarks if r.kind != "unverified"] == []
    assert set(load_file(tmp_path / "model.safetensors")) == {s.name for s in checkpoint.tensors.values()} | set(
        checkpoint.ignored
    )
    assert set(checkpoint.spec.origin) >= {"taps", "block_size", "row_offset", "mask_id", "embed_source", "head_source"}


def test_values_and_their_origins(tmp_path: Path) -> None:
    dspark_vanilla_reduced(tmp_path)
    changed(tmp_path, block_size=None, aux_hidden_state_layer_ids=None)
    spec = read_draft(tmp_path, DEPTH).spec
    assert (spec.family, spec.algorithm, spec.block_size, spec.max_draft) == ("speculators", "dspark", 8, 8)
    assert (spec.taps, spec.vocab_size, spec.draft_vocab_size, spec.target_name) == ((2, 4, 5), V, 22, "some/target")
    assert spec.origin["block_size"] == "default of speculators dspark (no key block_size)"
    assert spec.origin["hidden_size"] == "config key transformer_layer_config.hidden_size"
    assert spec.origin["embed_source"] == "no tensor embed_tokens.weight in the file"
    assert spec.origin["head_source"] == "tensor lm_head.weight"


def test_speculators_ids_are_hidden_state_indices_and_zlabs_are_layers(tmp_path: Path) -> None:
    """The same features: ids that differ by one (formats page 3.1)."""
    speculators(tmp_path / "a", Facts(offset=0), "dflash")
    zlab(tmp_path / "b", Facts(offset=0))
    stored = [json.loads((tmp_path / n / "config.json").read_text()) for n in "ab"]
    assert stored[0]["aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert stored[1]["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    assert read_draft(tmp_path / "a").spec.taps == read_draft(tmp_path / "b").spec.taps == (2, 4, 5)


def test_tap_on_the_last_layer_is_assumed_normed_for_zlab_and_raw_for_speculators(
    target: Target, tmp_path: Path
) -> None:
    zlab_last_layer(tmp_path / "z")
    dflash_from_anchor(tmp_path / "s")
    assert [r.kind for r in read_draft(tmp_path / "z").remarks] == ["unverified"]
    assert "after the final norm" in read_draft(tmp_path / "z").remarks[0].line()
    assert load_drafter(tmp_path / "z", target).taps == (1, -1)
    assert load_drafter(tmp_path / "s", target).taps == (0, 3, 8)


def test_speculators_default_taps_need_the_target(tmp_path: Path) -> None:
    dflash_08_bidirectional(tmp_path)
    with pytest.raises(SpecdoctorError, match=r"aux_hidden_state_layer_ids is missing.*give the target"):
        read_draft(tmp_path)
    with pytest.raises(SpecdoctorError, match=r"\[2, 2, 1\] is no rising list"):
        read_draft(tmp_path, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_sink_bias": True}, "attention_sink_bias is True: attention sinks"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is False"),
        ({"layer_ids": [1, 3, 4]}, "layer_ids"),
        ({"attention_mode": "mla"}, "attention_mode is 'mla', expected 'gqa' or 'mha'"),
        ({"use_swa": True, "swa_window_size": 0}, "swa_window_size is 0, expected 1 or more"),
    ],
    ids=str,
)
def test_what_derived_zlab_checkpoints_have_and_no_engine_here_computes(
    target: Target, tmp_path: Path, change: dict, message: str
) -> None:
    zlab(tmp_path, Facts(offset=0), **change)
    with pytest.raises(SpecdoctorError, match=message) as caught:
        load_drafter(tmp_path, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"), [("mask_embedding", "a mask row of its own"), ("encoder.fc.weight", "a context encoder")]
)
def test_derived_tensors_are_refused_by_name(target: Target, tmp_path: Path, name: str, message: str) -> None:
    f = zlab(tmp_path, Facts(offset=0))
    save_file(f.t | {name: torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(SpecdoctorError, match=f"tensor {name} is {message}"):
        load_drafter(tmp_path, target)


V4 = "DeepSeek-V4 DSpark", "hyper-connections"
NOT_RUNNABLE = {
    "domino": ({"dflash_config": {"projector_type": "domino"}}, "prefix_gru.weight_ih_l0", "SpecForge domino", "GRU"),
    "xpress": ({"speculators_model_type": "xpress"}, "mix_l", "speculators xpress", "Jacobi"),
    "deepseek-v4": (
        {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5},
        "mtp.0.main_norm.weight",
        *V4,
    ),
    "deepseek-v4 by tensors": ({"architectures": ["DeepseekV4ForCausalLM"]}, "mtp.0.main_proj.weight", *V4),
    "nemotron": (
        {"architectures": ["Qwen3DSparkModel"], "dspark_bonus_anchor": True, "dflash_config": {"causal": True}},
        "fc.weight",
        "Nemotron DSpark",
        "attention sinks",
    ),
}


@pytest.mark.parametrize(("keys", "tensor", "title", "reason"), NOT_RUNNABLE.values(), ids=NOT_RUNNABLE)
def test_known_families_that_cannot_run_say_so_by_name(
    tmp_path: Path, keys: dict, tensor: str, title: str, reason: str
) -> None:
    written(tmp_path, layer_config(Facts()) | keys, Facts(t={tensor: torch.zeros(2)}))
    with pytest.raises(SpecdoctorError, match=f"recognised as .*{title}.*cannot be run.*{reason}"):
        read_draft(tmp_path)


def test_deepspec_files_with_the_bonus_key_off_are_deepspec(tmp_path: Path) -> None:
    write_drafter(tmp_path, vocab=V, config_changes={"dspark_bonus_anchor": False})
    assert read_draft(tmp_path).spec.family == "deepspec"


def test_a_domino_head_on_speculators_dflash_is_refused(target: Target, tmp_path: Path) -> None:
    speculators(tmp_path, Facts(offset=0), "dflash", projector_type="domino")
    with pytest.raises(SpecdoctorError, match="projector_type is 'domino'"):
        load_drafter(tmp_path, target)


def test_an_rnn_head_with_an_idle_row_0_is_refused(target: Target, tmp_path: Path) -> None:
    f = Facts(offset=0, markov="rnn")
    keys = {"markov_rank": 8, "markov_head_type": "rnn", "enable_confidence_head": False}
    speculators(tmp_path, f, "dspark", sample_from_anchor=False, **keys)
    with pytest.raises(SpecdoctorError, match="sample_from_anchor is false: its training runs the state over row 0"):
        load_drafter(tmp_path, target)


def test_a_reduced_vocabulary_without_its_head_is_refused(tmp_path: Path) -> None:
    f = dflash_reduced(tmp_path)
    del f.t["lm_head.weight"]
    save_file(f.t, tmp_path / "model.safetensors")
    with pytest.raises(SpecdoctorError, match="draft_vocab_size is 22 of 40, but the file has no tensor lm_head"):
        read_draft(tmp_path)


def test_absolute_ids_where_offsets_belong_are_refused(target: Target, tmp_path: Path) -> None:
    f = dflash_reduced(tmp_path)
    save_file(f.t | {"d2t": REDUCED}, tmp_path / "model.safetensors")
    with pytest.raises(SpecdoctorError, match="d2t holds target ids"):
        load_drafter(tmp_path, target)


def test_a_narrow_drafter_needs_its_own_embedding(target: Target, tmp_path: Path) -> None:
    f = dspark_narrow(tmp_path)
    del f.t["embed_tokens.weight"]
    save_file(f.t, tmp_path / "model.safetensors")
    with pytest.raises(SpecdoctorError, match=r"the embedding of .* is 64 wide, expected hidden_size, 32"):
        load_drafter(tmp_path, target)


def test_mask_ids_beyond_the_embedding_are_refused(target: Target, tmp_path: Path) -> None:
    zlab(tmp_path, Facts(offset=0), mask_token_id=MASK + 1)
    with pytest.raises(SpecdoctorError, match="mask_token_id is 40"):
        load_drafter(tmp_path, target)
