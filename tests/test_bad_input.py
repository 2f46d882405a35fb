"""Bad input is one clear line and the documented exit code: never a traceback, never a run that fails at its end."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_family, tiny_target, write_drafter
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError

V = 32


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_target(V).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return Target.load(target_folder, "cpu", "float32")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "draft", vocab=V)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4, 5, 6, 7]}\n')
    return path


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def edit_config(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refused(*arguments: object, code: ExitCode = ExitCode.USAGE) -> str:
    """Run the command line; it must end with `code` and one line, which is returned."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("specdoctor: "), result.stderr
    assert "internal error" not in lines[0] and "Traceback" not in result.stderr
    return lines[0].removeprefix("specdoctor: ")


def bench(target: Path, prompts: Path, *more: object) -> tuple[object, ...]:
    return "bench", "--target", target, "--prompts", prompts, "--max-new-tokens", 4, *more


# The target -----------------------------------------------------------------------------------------------------------


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def broken_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


BROKEN_TARGETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (without_weights, "config.json but no weights; expected *.safetensors"),
    "truncated": (truncated, "model.safetensors: cut off: "),
    "broken json": (broken_json, "config.json: not valid JSON"),
    "no model type": (lambda f: edit_config(f, lambda c: c.pop("model_type")), "Should have a `model_type` key"),
    "unknown model type": (lambda f: edit_config(f, lambda c: c.update(model_type="nosuch")), "model type `nosuch`"),
    "no causal LM": (lambda f: edit_config(f, lambda c: c.update(model_type="t5")), "T5Config"),
    "wrong kind": (lambda f: edit_config(f, lambda c: c.update(hidden_size="big")), "'hidden_size' expected int"),
    "missing tensor": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "tensor model.layers.1.mlp.up_proj.weight is missing (1 in all)",
    ),
    "wrong shape": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        "tensor model.norm.weight has shape [3], expected [64]",
    ),
}


@pytest.mark.parametrize("name", BROKEN_TARGETS)
def test_broken_target(target_folder: Path, prompts: Path, tmp_path: Path, name: str) -> None:
    breaking, line = BROKEN_TARGETS[name]
    folder = copy_of(target_folder, tmp_path / "broken")
    breaking(folder)
    found = refused(*bench(folder, prompts))
    assert str(folder) in found and line in found


def test_missing_target(prompts: Path, tmp_path: Path) -> None:
    assert "nope: no such folder; expected a Hugging Face model folder" in refused(*bench(tmp_path / "nope", prompts))
    assert "no such folder and no known model" in refused(*bench(Path("smollm3"), prompts))


def test_a_real_process_prints_that_line_alone(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """transformers would add a table of its own to stderr, and go on with random weights."""
    folder = copy_of(target_folder, tmp_path / "broken")
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    command = [sys.executable, "-m", "specdoctor", *map(str, bench(folder, prompts))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.USAGE and done.stdout == ""
    assert done.stderr == (
        f"specdoctor: {folder}: tensor lm_head.weight is missing (1 in all), and its config.json promises it; fetch "
        "the model again\n"
    )


@pytest.mark.parametrize("family", ["Falcon", "Mamba"])
def test_a_target_that_the_engine_cannot_run(prompts: Path, tmp_path: Path, family: str) -> None:
    tiny_family(family).save_pretrained(tmp_path / "other")
    line = refused(*bench(tmp_path / "other", prompts))
    assert "MambaMixer" in line if family == "Mamba" else "does not call transformers' attention interface" in line


# The drafter ----------------------------------------------------------------------------------------------------------


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, lambda c: c.update(changes))


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def sharded(folder: Path, *, leave_out: bool) -> None:
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:] if leave_out else names[4:]}
    for file, mine in parts.items():
        save_file({name: whole[name] for name in mine}, folder / file)
    if leave_out:
        weight_map = {name: file for file, mine in parts.items() for name in mine}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (folder / "b.safetensors").unlink()


BROKEN_DRAFTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken json": (broken_json, "config.json: not valid JSON"),
    "no object": (lambda f: (f / "config.json").write_text("[1]"), "config.json: holds a list, expected a JSON object"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing; expected the config.json of a draft"),
    "no weights": (
        without_weights,
        "has a config.json but no *.safetensors, *.bin or *.pt; expected the drafter's weights beside it",
    ),
    "truncated": (truncated, "model.safetensors: not a complete safetensors file"),
    "lost shard": (lambda f: sharded(f, leave_out=True), "b.safetensors: named by model.safetensors.index.json but"),
    "tensor twice": (lambda f: sharded(f, leave_out=False), "is also in a.safetensors; expected it once"),
    "missing tensor": (tensors(lambda t: t.pop("fc.weight")), "tensor fc.weight is missing (1 in all)"),
    "extra tensor": (
        tensors(lambda t: t.update({"encoder.fc.weight": torch.ones(2)})),
        "tensor encoder.fc.weight is not used by this format",
    ),
    "wrong shape": (
        tensors(lambda t: t.update({"norm.weight": torch.ones(3)})),
        "norm.weight has shape [3], expected [64] by its config",
    ),
    "unknown format": (config(architectures=["Whatever"]), "architectures is Whatever, and no other marker"),
    "known by name only": (config(dspark_bonus_anchor=True), "NVIDIA Nemotron DSpark"),
    "taps out of range": (
        config(target_layer_ids=[0, 5]),
        "target_layer_ids ends with layer 5, but the target tiny has layers 0 to 1",
    ),
    "taps falling": (config(target_layer_ids=[1, 0]), "target_layer_ids is [1, 0], expected rising layer numbers"),
    "taps below": (
        config(target_layer_ids=[-2, 0]),
        "target_layer_ids is [-2, 0], expected rising layer numbers of -1",
    ),
    "no taps": (config(target_layer_ids=[]), "target_layer_ids is [], expected a list of layer numbers"),
    "taps of text": (config(target_layer_ids=["0", "1"]), "target_layer_ids is ['0', '1'], expected a list of layer"),
    "another depth": (config(num_target_layers=36), "num_target_layers is 36, but the target tiny has 2 layers"),
    "mask beyond": (config(mask_token_id=V), "mask_token_id is 32, but the embedding has rows 0 to 31"),
    "mask below": (config(mask_token_id=-1), "mask_token_id is -1, but the embedding has rows 0 to 31"),
    "block of text": (config(block_size="7"), "block_size is '7', expected a whole number"),
    "block of truth": (config(block_size=True), "block_size is True, expected a whole number"),
    "no block": (config(block_size=0), "block_size is 0, expected a whole number of 1 or more"),
    "unknown head": (
        config(markov_head_type="lstm"),
        "markov_head_type is 'lstm', expected one of vanilla, gated, rnn",
    ),
    "negative rank": (config(markov_rank=-8), "markov_rank is -8, expected 0 (no head) or more"),
    "confident without rank": (config(markov_rank=0), "confidence_head_with_markov is true but markov_rank is 0"),
    "layer types": (config(layer_types=["full_attention"]), "layer_types is ['full_attention'], expected 2 of"),
    "unknown layer type": (config(layer_types=["linear"] * 2), "layer_types is ['linear', 'linear'], expected 2 of"),
    "sliding without window": (config(layer_types=["sliding_attention"] * 2), "key sliding_window is missing"),
    "heads": (config(num_key_value_heads=3), "num_key_value_heads is 3, expected a divisor of num_attention_heads, 4"),
    "activation": (config(hidden_act="gelu"), "hidden_act is 'gelu', expected 'silu'"),
    "two thetas": (config(rope_theta=5e5), "rope_parameters.rope_theta is 10000.0 but rope_theta is 500000.0"),
    "no theta": (config(rope_parameters=None), "neither rope_parameters.rope_theta nor rope_theta is there"),
}
NEEDED = [
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
]


@pytest.mark.parametrize("name", BROKEN_DRAFTERS)
def test_broken_drafter(target: Target, drafter: Path, name: str) -> None:
    breaking, line = BROKEN_DRAFTERS[name]
    breaking(drafter)
    with pytest.raises(SpecdoctorError) as error:
        load_drafter(drafter, target)
    assert str(drafter) in str(error.value) and line in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(target: Target, drafter: Path, key: str) -> None:
    edit_config(drafter, lambda c: c.pop(key))
    with pytest.raises(SpecdoctorError) as error:
        load_drafter(drafter, target)
    assert str(error.value).startswith(f"{drafter / 'config.json'}: key {key} is missing, expected ")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"hidden": 32}, "hidden_size is 32, but the target tiny has 64; this drafter was made for another target"),
        (
            {"vocab": 40},
            "vocab_size is 40 and the head has 40 rows, but the target tiny has 32; run `specdoctor check-",
        ),
        ({"family": "zlab", "block": 1}, "block_size is 1, expected 2 or more"),
        ({"family": "zlab", "config_changes": {"dflash_config": {}}}, "key dflash_config.mask_token_id is missing"),
    ],
)
def test_drafter_for_another_target(target: Target, tmp_path: Path, settings: dict, line: str) -> None:
    folder = write_drafter(tmp_path, **{"vocab": V} | settings)
    with pytest.raises(SpecdoctorError) as error:
        load_drafter(folder, target)
    assert line in str(error.value)


def test_broken_drafters_through_the_command_line(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    other = write_drafter(tmp_path / "other", vocab=V, hidden=32)
    assert "hidden_size is 32" in refused(*bench(target_folder, prompts, "--draft", other))
    assert "no such folder" in refused(*bench(target_folder, prompts, "--draft", tmp_path / "nope"))
    cut = write_drafter(tmp_path / "cut", vocab=V)
    truncated(cut)
    assert "model.safetensors: cut off: " in refused(*bench(target_folder, prompts, "--draft", cut))
    assert "nope: no such folder" in refused(
        "generate", "hi", "--target", target_folder, "--draft", tmp_path / "nope", "--template", "bytes"
    )


# Options --------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[list[object], str]] = {
    "NaN temperature": (["--temperature", "nan"], "--temperature nan: expected a number of 0 or more"),
    "negative temperature": (["--temperature", "-1"], "--temperature -1.0: expected a number of 0 or more"),
    "top-p 0": (["--top-p", 0], "--top-p 0.0: expected a number above 0, at most 1 (1 is off)"),
    "top-k": (["--top-k", -1], "--top-k -1: expected 0 (off) or more"),
    "draft temperature": (["--draft-temperature", "warm"], "--draft-temperature warm: expected a temperature such as"),
    "seed": (["--seed", 2**64], "--seed 18446744073709551616: expected a whole number that fits in 64 bits"),
    "dtype": (["--dtype", "int8"], "--dtype int8: expected auto, float32, bfloat16, float16"),
    "device": (["--device", "tpu"], "--device tpu: expected auto, cpu, cuda, cuda:N or mps"),
    "attention": (["--attention", "flash"], "--attention flash: expected auto, matmul or sdpa"),
    "template": (["--template", "chatml"], "template is 'chatml', expected one of auto, none, bytes"),
    "unknown arm": (["--arms", "ar,nope"], "--arms nope: no such arm, expected some of ar"),
    "categories": (["--categories", "code"], "--prompts and --categories: give one of them"),
    "scenario": (["--scenario", "coed"], "scenario 'coed' is neither a file nor one of chat, code, summarize"),
    "threshold": (["--confidence-threshold", "nan"], "--confidence-threshold nan: expected a probability between"),
}
DRAFT_OPTIONS: dict[str, tuple[list[object], str]] = {
    "K": (["-K", 5], "-K 5: draft proposes 1 to 4 tokens in a round"),
    "draft dtype": (["--draft-dtype", "int8"], "--draft-dtype int8: expected auto, float32, bfloat16, float16"),
    "draft device": (["--draft-device", "npu0"], "--draft-device npu0: expected auto, cpu, cuda, cuda:N or mps"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(target_folder: Path, prompts: Path, name: str) -> None:
    options, line = OPTIONS[name]
    assert line in refused(*bench(target_folder, prompts, *options))


@pytest.mark.parametrize("name", DRAFT_OPTIONS)
def test_options_of_drafters(target_folder: Path, prompts: Path, drafter: Path, name: str) -> None:
    options, line = DRAFT_OPTIONS[name]
    assert line in refused(*bench(target_folder, prompts, "--draft", drafter, *options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there_is_the_machines_fault(target_folder: Path, prompts: Path) -> None:
    line = refused(*bench(target_folder, prompts, "--device", "cuda"), code=ExitCode.ENVIRONMENT)
    assert line.startswith("--device cuda: this machine has no such device")


def test_arm_names(target_folder: Path, prompts: Path, drafter: Path) -> None:
    for drafts, line in (
        ([drafter, drafter], "the arm name draft is taken; name it with --draft NAME="),
        ([f"a={drafter}", f"a={drafter}"], "the arm name a is taken"),
        ([f"ar={drafter}"], "the arm name ar is taken"),
        ([f"hf={drafter}"], "the arm name hf is taken"),
        ([f"={drafter}"], "no name before the ="),
    ):
        options = [option for draft in drafts for option in ("--draft", draft)]
        assert line in refused(*bench(target_folder, prompts, *options))


def test_threshold_without_a_confidence_head(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    headless = write_drafter(tmp_path / "headless", vocab=V, head=None)
    line = refused(*bench(target_folder, prompts, "--draft", headless, "--confidence-threshold", 0.5))
    assert line.startswith("--confidence-threshold 0.5: the drafter headless has no confidence head")


@pytest.mark.parametrize("option", ["--json", "--records"])
def test_a_result_that_cannot_be_written_is_refused_before_decoding(
    target_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def decoded(*_: object) -> None:
        raise AssertionError("decoding began")

    monkeypatch.setattr("specdoctor.engine.engine.Engine.prefill", decoded)
    for path in (tmp_path / "no" / "such" / "file.json", tmp_path):
        line = refused(*bench(target_folder, prompts, option, path))
        assert str(path) in line and "cannot write the result here" in line


# Prompts --------------------------------------------------------------------------------------------------------------

PROMPTS: dict[str, tuple[str, ExitCode, str]] = {
    "empty file": ("\n", ExitCode.NOTHING, "no prompts in the file"),
    "no tokens": ('{"prompt_ids": []}', ExitCode.USAGE, ":1: prompt_ids is [], expected a list with entries"),
    "empty text": ('{"prompt": "  "}', ExitCode.USAGE, ":1: prompt is"),
    "not JSON": ('{"prompt_ids": [1]}\n{"prompt', ExitCode.USAGE, ":2: not JSON"),
    "unknown field": ('{"promt": "hi"}', ExitCode.USAGE, "(did you mean 'prompt'?)"),
    "same id twice": ('{"id": "a", "prompt_ids": [1]}\n{"id": "a", "prompt_ids": [2]}', ExitCode.USAGE, "'a'"),
    "id beyond the vocabulary": ('{"prompt_ids": [1, 99]}', ExitCode.USAGE, "has id 99, expected 0 to 31"),
    "too long": (json.dumps({"prompt_ids": [1] * 512}), ExitCode.USAGE, "has 512 tokens, but tiny has 512 positions"),
    "text without tokenizer": ('{"prompt": "hi"}', ExitCode.USAGE, "the target has no tokenizer files"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(target_folder: Path, tmp_path: Path, name: str) -> None:
    text, code, line = PROMPTS[name]
    path = tmp_path / "prompts.jsonl"
    path.write_text(text + "\n")
    found = refused(*bench(target_folder, path), code=code)
    assert "prompts.jsonl" in found and line in found


def test_no_prompt_file(target_folder: Path, tmp_path: Path) -> None:
    assert "none.jsonl: No such file or directory" in refused(*bench(target_folder, tmp_path / "none.jsonl"))


def test_an_empty_prompt_to_generate(target_folder: Path) -> None:
    assert "gives no token" in refused("generate", "", "--target", target_folder, "--template", "bytes")
