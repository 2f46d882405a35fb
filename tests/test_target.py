"""The packed forward equals the library's own, family by family; what it cannot express is refused by name."""

import functools
import types

import pytest
import torch
import transformers
from tiny_models import FAMILIES, tiny_family, tiny_llama, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdoctor.engine.engine import Engine
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import FINAL_NORMED, Target
from specdoctor.errors import SpecdoctorError

LENGTHS = (37, 5, 20)


def some_ids(lengths: tuple[int, ...] = LENGTHS, vocab: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


@torch.inference_mode()
def plain(model: PreTrainedModel, ids: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Logits and HS[0..L] (the last one normed) of separate forwards with the library's own attention and masks."""
    outputs = [model(one[None], output_hidden_states=True, use_cache=False) for one in ids]
    return [out.logits[0] for out in outputs], [[h[0] for h in out.hidden_states] for out in outputs]


def assert_close(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_forward_equals_separate_plain_forwards(family: str) -> None:
    ids = some_ids()
    logits, states = plain(tiny_family(family), ids)
    target = Target(tiny_family(family))
    L, H = target.num_layers, target.hidden_size
    slots = [target.open() for _ in ids]
    rows = PackedRows(slots, [0] * len(ids), LENGTHS, target.device)
    output = target.forward(rows, torch.cat(ids), taps=(*range(L + 1), FINAL_NORMED))
    assert_close(output.logits, torch.cat(logits))
    assert output.taps is not None
    found = output.taps.split(H, dim=-1)
    for i in range(L):
        assert_close(found[i], torch.cat([h[i] for h in states]))
    assert_close(found[L + 1], torch.cat([h[L] for h in states]))
    assert float((found[L] - found[L + 1]).abs().max()) > 0.01  # HS[L] is raw, FINAL_NORMED is not


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decode_rows_equal_one_plain_forward(family: str) -> None:
    """A long prompt in chunks and a short one row by row, side by side in the same forwards."""
    ids = some_ids((40, 11))
    logits, _ = plain(tiny_family(family), ids)
    target = Target(tiny_family(family))
    slots = [target.open(), target.open()]
    done, found = [0, 0], [[], []]
    for steps in ((13, 5), (1, 1), (20, 1), (2, 3), (4, 1)):
        rows = PackedRows(slots, list(done), steps, target.device)
        piece = torch.cat([one[at : at + n] for one, at, n in zip(ids, done, steps, strict=True)])
        for r, part in enumerate(target.forward(rows, piece).logits.split(list(steps))):
            found[r].append(part)
            target.cache.keep(slots[r], range(steps[r]))
            done[r] += steps[r]
    for r in range(2):
        assert_close(torch.cat(found[r]), logits[r])


@pytest.mark.parametrize("family", FAMILIES)
def test_sdpa_path_equals_the_matmul_path(family: str) -> None:
    ids = some_ids()
    outputs = []
    for path in ("matmul", "sdpa"):
        target = Target(tiny_family(family), attention=path)
        assert target.attention.name == path
        rows = PackedRows([target.open() for _ in ids], [0] * len(ids), LENGTHS, target.device)
        outputs.append(target.forward(rows, torch.cat(ids)).logits)
    assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "Mistral"])
def test_half_precision_is_close_and_finite(family: str, attention: str, dtype: torch.dtype) -> None:
    """Hidden columns, of short requests beside long ones, hold the lowest number of the type and never -inf."""
    ids = some_ids((37, 1, 70))
    outputs = []
    for kind in (torch.float32, dtype):
        target = Target(tiny_family(family).to(kind), attention=attention)
        rows = PackedRows([target.open() for _ in ids], [0, 0, 0], [37, 1, 70], target.device)
        outputs.append(target.forward(rows, torch.cat(ids)).logits.float())
    assert torch.isfinite(outputs[1]).all()
    error = float((outputs[1] - outputs[0]).abs().max() / outputs[0].abs().max())
    assert error < (0.02 if dtype == torch.float16 else 0.12)


def test_raw_final_state_becomes_the_normed_one_by_the_models_own_norm() -> None:
    target = Target(tiny_llama())
    rows = PackedRows([target.open()], [0], [9], target.device)
    output = target.forward(rows, torch.arange(9), taps=(target.num_layers, FINAL_NORMED))
    assert output.taps is not None
    raw, normed = output.taps.split(target.hidden_size, dim=-1)
    with torch.inference_mode():
        assert_close(target.model.model.norm(raw), normed)
        assert_close(target.lm_head(normed), output.logits)


def test_taps_come_in_the_order_asked_for() -> None:
    target = Target(tiny_target(64))
    H = target.hidden_size

    def taps(*wanted: int) -> Tensor:
        rows = PackedRows([target.open()], [0], [4], target.device)
        output = target.forward(rows, torch.arange(4), taps=wanted)
        assert output.taps is not None
        return output.taps

    assert torch.equal(taps(2, 0), torch.cat([taps(0, 2)[:, H:], taps(0, 2)[:, :H]], dim=-1))
    assert taps(1, 1).shape == (4, 2 * H)


def test_only_the_logit_rows_asked_for() -> None:
    target = Target(tiny_target(64))
    slot = target.open()
    rows = PackedRows([slot], [0], [6], target.device)
    every = target.forward(rows, torch.arange(6)).logits
    some = target.forward(PackedRows([slot], [0], [6], target.device), torch.arange(6), logit_rows=torch.tensor([1, 5]))
    assert_close(some.logits, every[[1, 5]])


def test_modelling_code_that_ignores_logits_to_keep_gives_the_same_rows() -> None:
    model = tiny_target(64)
    forward = model.forward

    @functools.wraps(forward)
    def deaf(*args: object, **kwargs: object) -> object:
        kwargs.pop("logits_to_keep", None)
        return forward(*args, **kwargs)

    model.forward = deaf
    target, honest = Target(model), Target(tiny_target(64))
    for one in (target, honest):
        one.rows = PackedRows([one.open()], [0], [6], one.device)
    keep = torch.tensor([1, 5])
    found = target.forward(target.rows, torch.arange(6), logit_rows=keep).logits
    assert_close(found, honest.forward(honest.rows, torch.arange(6), logit_rows=keep).logits)


# What cannot be a target ----------------------------------------------------------------------------------------------

DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
REFUSED = {
    "Qwen3Next": (DELTA_NET | EXPERTS, "linear_attention"),
    "Qwen3_5Text": (DELTA_NET, "linear_attention"),
    "Mamba": ({}, "MambaMixer"),
    "Mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 16}, "Mamba2Mixer"),
    "Lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "conv"),
    "Bamba": (MAMBA_HEADS | {"attn_layer_indices": [1]}, "Mamba|linear_attention"),
    "Jamba": ({"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}, "JambaMambaMixer"),
    "RecurrentGemma": ({}, "RecurrentGemmaRecurrentBlock"),
    "Rwkv": ({}, "RwkvBlock"),
    "Llama4Text": ({"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 8}, "chunked_attention"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_state_that_cannot_be_cut_back_is_refused_by_its_layer_type(family: str) -> None:
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    settings, layer_type = REFUSED[family]
    model = tiny_family(family, **settings)
    with pytest.raises(SpecdoctorError, match=f"layer type .*({layer_type}).*Use a target without such layers"):
        Target(model)


def test_attention_outside_the_interface_is_refused_at_the_first_forward() -> None:
    """Falcon computes its attention itself: without the check it would run, and mix the sequences of a forward."""
    target = Target(tiny_family("Falcon"))
    with pytest.raises(SpecdoctorError, match="FalconForCausalLM does not call transformers' attention interface"):
        Engine(target).generate([Sequence([1, 2, 3], max_new_tokens=2)])


def test_attention_that_drops_keywords_is_refused() -> None:
    target = Target(tiny_family("StableLm"))
    with pytest.raises(SpecdoctorError, match="StableLmForCausalLM does not hand keywords"):
        target.forward(PackedRows([target.open()], [0], [3], target.device), torch.arange(3))


@pytest.mark.parametrize("family", ["Bloom", "Mpt"])
def test_a_model_without_position_ids_is_refused(family: str) -> None:
    with pytest.raises(SpecdoctorError, match=f"{family}ForCausalLM takes no position_ids"):
        Target(tiny_family(family))


def test_a_layer_with_a_mask_of_its_own_is_refused() -> None:
    """A bias or a sparse pattern in the mask would be lost without a word, as the engine makes its own masks."""
    target = Target(tiny_llama())
    attention = target.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, attention_mask=None, **kwargs: forward(
        *args, attention_mask=attention_mask - 1.0, **kwargs
    )
    with pytest.raises(SpecdoctorError, match=r"LlamaAttention \(layer 1\) makes an attention mask of its own"):
        target.forward(PackedRows([target.open()], [0], [3], target.device), torch.arange(3))


# Facts about the model ------------------------------------------------------------------------------------------------


def test_a_multimodal_target_is_tapped_in_its_text_part() -> None:
    """Its vision tower has as many layers, and stands before them."""
    text = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    target = Target(AutoModelForCausalLM.from_config(config))
    assert type(target.layers[0]).__name__ == "Gemma3DecoderLayer"
    rows = PackedRows([target.open()], [0], [3], target.device)
    taps = target.forward(rows, torch.arange(3), taps=(0, 1, 2, FINAL_NORMED)).taps
    assert taps is not None and taps.shape == (3, 4 * 64)


def test_stop_ids_of_both_configs_together() -> None:
    model = tiny_target(64)
    assert Target(model).stop_ids == frozenset()
    model.generation_config.eos_token_id = [3, 5]
    model.config.eos_token_id = 5
    assert Target(model).stop_ids == {3, 5}
    model.config.eos_token_id = 0  # an id of 0 counts
    model.generation_config.eos_token_id = None
    assert Target(model).stop_ids == {0}


def test_a_model_without_a_length_limit() -> None:
    assert Target(tiny_target(64)).max_positions == 512
    target = Target(tiny_target(64))
    target.config = types.SimpleNamespace()  # as ALiBi models have it
    assert target.max_positions > 10**6
