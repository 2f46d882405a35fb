"""Rotary embedding of drafters against the library's own, type by type."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_target, write_drafter
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specdoctor.drafters.load import load_drafter
from specdoctor.drafters.rope import Rope, inverse_frequencies
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError

ROPES: dict[str, dict] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn not truncated": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn betas": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn attention factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.8,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rope_is_the_librarys_own(name: str, head_dim: int) -> None:
    settings = ROPES[name]
    limit = int(settings.get("factor", 1) * settings.get("original_max_position_embeddings", 128))
    config = Qwen3Config(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=limit,
        rope_parameters=settings,
    )
    positions = torch.tensor([0, 1, 5, 63, 64, 300])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    found = Rope(settings | {"max_position_embeddings": limit}, head_dim, torch.device("cpu"), torch.float32)
    mine = found.at(positions, 301)
    torch.testing.assert_close(mine[0], cos[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine[1], sin[0], atol=1e-5, rtol=1e-5)


def test_the_rope_table_grows_and_stays_the_same() -> None:
    rope = Rope(ROPES["default"], 16, torch.device("cpu"), torch.float32)
    few = rope.at(torch.arange(10), 10)[0].clone()
    many = rope.at(torch.arange(5000), 5000)[0]
    assert torch.equal(many[:10], few)
    far = rope.at(torch.tensor([30_000]), 30_001)
    assert float(far[0].abs().max()) <= 1.0


def test_proportional_rope_turns_only_a_part() -> None:
    """Gemma4 (formats page 1.2): a quarter of the pairs turn, with the full width in the exponent."""
    inverse, scale = inverse_frequencies(
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, 64
    )
    expected = [1e6 ** (-2 * j / 64) for j in range(8)] + [0.0] * 24
    torch.testing.assert_close(inverse, torch.tensor(expected))
    assert scale == 1.0


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic', expected default, linear, llama3"),
        ({"rope_type": "linear"}, "the RoPE of type 'linear' has no 'factor'"),
        ({"rope_type": "linear", "factor": "four"}, "the RoPE of type 'linear' has a value of the wrong kind"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1 for a rope_type 'default'"),
    ],
)
def test_a_rope_that_cannot_be_run_is_one_line_with_the_file(tmp_path: Path, change: dict, line: str) -> None:
    target = Target(tiny_target())
    rope = {"rope_type": "default", "rope_theta": 10000.0} | change
    folder = write_drafter(tmp_path, config_changes={"rope_parameters": rope})
    with pytest.raises(SpecdoctorError) as error:
        load_drafter(folder, target)
    assert str(error.value).startswith(f"{folder / 'config.json'}: {line}")
