"""`specdoctor export`: a drafter in the format that another engine loads."""

from pathlib import Path

import typer

app = typer.Typer()


@app.command()
def export(
    draft: str = typer.Argument(..., help="Drafter: folder, GGUF file, or Hugging Face id."),
    format: str = typer.Option(..., help="deepspec, speculators (vLLM), zlab (SGLang, vLLM) or gguf (llama.cpp)."),
    target: str = typer.Option(..., help="Target: folder, GGUF file, Hugging Face id, or a known name (smollm2-135m)."),
    output: Path | None = typer.Option(
        None, help="New folder or .gguf file (default: DRAFT-FORMAT or DRAFT.gguf here)."
    ),
    dtype: str = typer.Option("keep", help="keep, float32, bfloat16 or float16."),
    drop_copies: bool = typer.Option(
        False, "--drop-copies", help="Leave out an embedding or head that equals the target's (gguf, speculators)."
    ),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Write a drafter in another public format, or say why that format cannot express it.

    What is written is read back and compared before it gets its name; a failure leaves nothing behind.
    """
    from specdoctor.formats.drafts.export import export_draft
    from specdoctor.formats.drafts.read import read_draft
    from specdoctor.formats.drafts.target_facts import read_target_facts
    from specdoctor.formats.sources import resolve_model
    from specdoctor.reports.output import refuse_unwritable, write_json

    refuse_unwritable(json_path)

    def local(name: str) -> Path:
        path = Path(name).expanduser()
        return path if path.exists() else resolve_model(name)

    draft_path, target_path = local(draft), local(target)
    facts = read_target_facts(target_path, "" if Path(target).expanduser().exists() else target)
    checkpoint = read_draft(draft_path, facts.shape.num_layers)
    stem = draft_path.stem if draft_path.is_file() else draft_path.resolve().name
    place = output or Path(f"{stem}-{format}" if format != "gguf" else f"{stem}.gguf")
    done = export_draft(checkpoint, format, facts, place, dtype, drop_copies)
    if json_path:
        document = {
            "schema_version": 1,
            "draft": draft,
            "target": target,
            "format": done.format,
            "output": str(done.path),
            "bytes": done.bytes,
            "algorithm": done.spec.algorithm,
            "notes": list(done.notes),
        }
        write_json(document, json_path)
    if json_path != "-":
        print(f"{done.path}: {checkpoint.title} as {done.format}, {done.bytes / 1e6:.1f} MB, read back and equal")
        for note in done.notes:
            print(f"  {note}")
