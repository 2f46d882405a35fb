"""One prompt from text to text, for a look at what a pair produces."""

from typing import Any

from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.target import Target
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.arms import EngineArm
from specdoctor.measure.drafting import Drafting, drafting_engine, find_draft, open_drafter, vocabulary_facts
from specdoctor.measure.prompt_file import RawPrompt
from specdoctor.measure.prompts import load_tokenizer, render


def generate_text(
    prompt: str,
    target_name: str,
    draft: str | None,
    template: str,
    max_new_tokens: int,
    sampling: Sampling,
    device: str,
    dtype: str,
    drafting: Drafting | None = None,
) -> dict[str, Any]:
    """Complete `prompt`; text, ids and the figures of the run. Raises `SpecdoctorError` as bench does."""
    drafting = drafting or Drafting()
    source = None if draft is None else find_draft(draft)
    drafting.check([] if source is None else [source])
    folder = resolve_model(target_name)
    target = Target.load(folder, device, dtype)
    tokenizer = load_tokenizer(folder)
    raw = RawPrompt("prompt", "", "prompt", messages=({"role": "user", "content": prompt},))
    rendered = render([raw], tokenizer, template)[0]
    drafter = None if source is None else open_drafter(source, target, drafting)
    if drafter is not None:
        drafting.check_drafters([drafter])
    engine = Engine(target) if drafter is None else drafting_engine(target, drafter, drafting)
    arm = EngineArm(engine.arm, engine)
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
        "vocabulary": vocabulary_facts(drafter),
    }
