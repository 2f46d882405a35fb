"""`specdoctor generate`: complete one prompt."""

import typer

from specdoctor.cli import options

app = typer.Typer()


@app.command()
def generate(
    prompt: str = typer.Argument(..., help="The user's message, or plain text with --template none."),
    target: str = typer.Option(..., help="Target: folder, Hugging Face id, or a known name (smollm2-135m)."),
    draft: str | None = typer.Option(
        None, help="Drafter folder, or ngram[:N] for prompt lookup; without one, plain decoding."
    ),
    max_new_tokens: int = typer.Option(128, min=1, help="Longest answer."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_k: int = typer.Option(0, help="0 is off."),
    top_p: float = typer.Option(1.0, help="1 is off."),
    draft_temperature: str = typer.Option("1x", help="0.5, or a factor of the target's: 0.7x."),
    draft_tokens: int | None = typer.Option(
        None, "-K", "--draft-tokens", min=1, help="Tokens drafted a round; the most where it varies."
    ),
    dynamic_k: str = typer.Option("constant", help="constant, threshold, or adaptive."),
    confidence_threshold: float | None = typer.Option(None, help="End a draft before the first confidence below this."),
    vocabulary: str = typer.Option(
        "auto", help="Of a causal LM drafter with another tokenizer: auto, intersection, retokenize."
    ),
    draft_quantize: str | None = typer.Option(None, help="Weights of a causal LM drafter: int8 (needs torchao)."),
    draft_vocabulary: str | None = options.draft_vocabulary(),
    template: str = typer.Option("auto", help="auto (the target's chat template), none, or bytes."),
    seed: int = typer.Option(0, help="Seed of the sampler."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:N, mps."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Complete one prompt and say on stderr how the drafter did."""
    from specdoctor.engine.sampling import Sampling
    from specdoctor.measure.drafting import Drafting
    from specdoctor.measure.generate import generate_text
    from specdoctor.reports.output import stderr_console, write_json

    sampling = Sampling(temperature, top_k, top_p, draft_temperature, seed)
    drafting = Drafting(
        draft_tokens, dynamic_k, confidence_threshold, vocabulary, draft_quantize, draft_vocabulary=draft_vocabulary
    )
    result = generate_text(prompt, target, draft, template, max_new_tokens, sampling, device, dtype, drafting)
    if result["vocabulary"] and result["vocabulary"]["note"]:
        stderr_console().print(f"note: {draft}: {result['vocabulary']['note']}")
    if json_path:
        write_json(result, json_path)
    if json_path != "-":
        print(result["text"])
        tau = "" if draft is None else f", tau_step {result['tau_step']:.2f}" if result["rounds"] else ", no rounds"
        tokens, speed = len(result["completion_ids"]), f"{result['tokens_per_s']:.1f} tokens/s"
        stderr_console().print(f"{tokens} tokens ({result['stop_reason']}), {speed}{tau}")
