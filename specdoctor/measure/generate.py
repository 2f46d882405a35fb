"""One prompt from text to text, for a look at what a pair produces."""

from pathlib import Path
from typing import Any

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.target import Target
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.arms import EngineArm
from specdoctor.measure.prompt_file import RawPrompt
from specdoctor.measure.prompts import load_tokenizer, render


def generate_text(
    prompt: str,
    target_name: str,
    draft: Path | None,
    template: str,
    max_new_tokens: int,
    sampling: Sampling,
    device: str,
    dtype: str,
) -> dict[str, Any]:
    """Complete `prompt`; text, ids and the figures of the run. Raises `SpecdoctorError` as bench does."""
    folder = resolve_model(target_name)
    target = Target.load(folder, device, dtype)
    tokenizer = load_tokenizer(folder)
    raw = RawPrompt("prompt", "", "prompt", messages=({"role": "user", "content": prompt},))
    rendered = render([raw], tokenizer, template)[0]
    drafter = None if draft is None else load_drafter(resolve_model(str(draft)), target)
    arm = EngineArm("ar" if drafter is None else drafter.name, Engine(target, drafter))
    run = arm.run(rendered, max_new_tokens, sampling, target.stop_ids)
    ids = run.completion_ids
    text = (
        bytes(ids).decode("utf-8", "replace") if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
    )
    rounds = len(run.records)
    return {
        "schema_version": 1,
        "text": text,
        "completion_ids": ids,
        "stop_reason": run.stop_reason,
        "rounds": rounds,
        "tau_step": sum(r.committed for r in run.records) / rounds if rounds else None,
        "tokens_per_s": run.decoded / run.decode_seconds if run.decoded else 0.0,
        "prefill_seconds": run.prefill_seconds,
    }
