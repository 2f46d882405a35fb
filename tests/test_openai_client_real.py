"""Answers of a real OpenAI-compatible server: llama-server with SmolLM2, beside our own engine's."""

import json
from pathlib import Path

import pytest
import torch
from llama_server import find_llama_server, llama_server
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdoctor.errors import EnvironmentMissingError
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.prompts import load_tokenizer
from specdoctor.training.answers import AnswerSettings
from specdoctor.training.regenerate import RegenerateRequest, regenerate

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Its weights meet activations rounded to 8 bits, which moves logits by a tenth or so: texts part at near ties.
NEAR_TIE = 0.3
QUESTIONS = ("What is the capital of France?", "Say hello.", "Name three colours.", "What is two plus two?")


def answers(folder: Path) -> dict[str, dict]:
    return {row["prompt_id"]: row for row in map(json.loads, (folder / "samples.jsonl").read_text().splitlines())}


def test_llama_server_answers_as_our_engine_does(tmp_path: Path) -> None:
    binary = find_llama_server()
    try:
        folder = resolve_model("smollm2-135m")
    except EnvironmentMissingError as error:
        pytest.skip(str(error))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"q{i}", "prompt": q}) + "\n" for i, q in enumerate(QUESTIONS)))
    settings, notes = AnswerSettings(24), list[str]()
    regenerate(RegenerateRequest(prompts, str(folder), tmp_path / "ours", settings, dtype="float32"))
    with llama_server(binary, tmp_path / "log", "-m", folder / "smollm2-135m.gguf", "-c", "1024") as server:
        for api in ("completions", "chat"):
            out = tmp_path / api
            request = RegenerateRequest(prompts, str(folder), out, settings, server=server.url, server_api=api)
            request.concurrency = 2
            assert regenerate(request, on_note=notes.append)["written"] == len(QUESTIONS)
    assert notes == [], "it takes every option that we send"
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    ours, theirs, chat = answers(tmp_path / "ours"), answers(tmp_path / "completions"), answers(tmp_path / "chat")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    foreign = []
    for name, row in ours.items():
        start = row["answer"][0][0]
        assert theirs[name]["ids"] == chat[name]["ids"], "our template and the server's are the same one"
        assert theirs[name]["ids"][:start] == row["ids"][:start] and len(theirs[name]["ids"]) - start <= 25
        if theirs[name]["stop"] == "stop":
            assert theirs[name]["ids"][-1] == tokenizer.eos_token_id
        assert gap_where_they_part(model, row["ids"], theirs[name]["ids"]) < NEAR_TIE
        other = theirs["q3" if name == "q0" else "q0"]
        answer = other["ids"][other["answer"][0][0] :]
        foreign.append(gap_where_they_part(model, row["ids"], [*row["ids"][:start], *answer]))
    assert max(foreign) > 10 * NEAR_TIE, "the answer to another question is no near tie"


def gap_where_they_part(model: PreTrainedModel, ours: list[int], theirs: list[int]) -> float:
    """Log-probability by which our token is the likelier one where two texts first differ; 0 if they do not."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return 0.0
    with torch.no_grad():
        logits = model(torch.tensor([ours[:at]])).logits[0, -1]
    return float(logits[ours[at]] - logits[theirs[at]])
