"""How much sooner does `accept` know tau than rolling out, and do both say the same?

Runs the same prompts three ways, in turns so that a drifting machine hits all alike: rounds of real decoding, one
prompt at a time as `bench` does; texts written by the target in batches; `accept` on those texts. Prints the seconds
that each needs until the 95 % interval of tau_step is within +-PRECISION of it (measured if it got there, else scaled
by the square root law and marked), tau by category with the paired difference, and in greedy whether the accepted
lengths of every round are identical.

    python benchmarks/accept_vs_rollout.py --target smollm2-135m --draft FOLDER [--temperature 0.8] [--threads 1]

On a CPU a forward over many rows costs nearly as much a row as one over few, so batching helps little. A GPU decodes
bound by memory and prefills bound by arithmetic; the gain there is larger, but this script claims nothing about it.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.accept import FEWEST, LOOKAHEAD, half_width
from specdoctor.measure.accept_pass import AcceptancePass, PassOptions
from specdoctor.measure.corpus import Corpus, Manifest
from specdoctor.measure.prompts import Prompt, load_bundled, load_jsonl, load_tokenizer, render, template_record
from specdoctor.metrics.accept_summary import AcceptanceFigures, prompt_sums
from specdoctor.metrics.acceptance import tau_step
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.record import RoundRecord
from specdoctor.metrics.statistics import committed_and_rounds, paired_difference
from specdoctor.metrics.text_acceptance import TextAcceptance
from specdoctor.metrics.whatif import Variant

GROUP = 16


@dataclass
class Arm:
    """Seconds so far, and what they bought: (prompts, seconds, relative half-width) after each group."""

    name: str
    seconds: float = 0.0
    path: list[tuple[int, float, float]] = field(default_factory=list)

    def to_precision(self, precision: float) -> tuple[float, bool]:
        """Seconds until the interval is narrow enough, and whether that was seen rather than scaled."""
        for prompts, seconds, width in self.path:
            if prompts >= FEWEST and width <= precision:
                return seconds, True
        _, seconds, width = self.path[-1]
        return seconds * (width / precision) ** 2, False


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    folder = resolve_model(options.target)
    target = Target.load(folder, options.device, options.dtype)
    drafter = load_drafter(options.draft, target)
    tokenizer = load_tokenizer(folder)
    raw = load_jsonl(options.prompts)[: options.max_prompts] if options.prompts else None
    raw = raw or load_bundled(options.categories.split(","), options.max_prompts)
    prompts = render(raw, tokenizer)
    sampling = Sampling(options.temperature)
    variant = Variant("headline", drafter.max_draft)
    rollout, writing, looking = Arm("rollout"), Arm("accept, texts written now"), Arm("accept, texts there")
    records: list[RoundRecord] = []
    texts: list[TextAcceptance] = []
    rounds_of: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        manifest = Manifest.of(target, template_record(tokenizer), sampling, target.stop_ids, options.seed)
        corpus = Corpus(Path(scratch) / "corpus", manifest)
        depth = drafter.max_draft
        one_pass = AcceptancePass(target, drafter, sampling, PassOptions(depth, depth, drafted_paths=False))
        engine = Engine(target, drafter)
        _rollout(engine, prompts[0], sampling, 8, target.stop_ids)  # warm up
        for first in range(0, len(prompts), GROUP):
            group = prompts[first : first + GROUP]
            start = time.perf_counter()
            written = corpus.ensure(target, [(p, 0) for p in group], options.max_new_tokens, max(LOOKAHEAD, depth))
            writing.seconds += time.perf_counter() - start
            start = time.perf_counter()
            texts += [one_pass.run(text, text.length(options.max_new_tokens)) for text in written]
            took = time.perf_counter() - start
            looking.seconds += took
            writing.seconds += took
            start = time.perf_counter()
            for i, prompt in enumerate(group, first):
                own = Sampling(options.temperature, seed=options.seed + i)
                done = _rollout(engine, prompt, own, options.max_new_tokens, target.stop_ids)
                records += done.records
                rounds_of[prompt.id] = done.completion_ids
            rollout.seconds += time.perf_counter() - start
            _note(rollout, first + len(group), tau_step(records))
            tau = AcceptanceFigures(texts, variant).tau()
            for arm in (looking, writing):
                _note(arm, first + len(group), tau)
            print(
                f"{first + len(group)} prompts: rollout {_shown(tau_step(records))}, accept {_shown(tau)}", flush=True
            )
    result = {
        "settings": {key: str(value) for key, value in vars(options).items()},
        "seconds_to_precision": {arm.name: arm.to_precision(options.precision) for arm in (rollout, looking, writing)},
        "paths": {arm.name: arm.path for arm in (rollout, looking, writing)},
        "agreement": _agreement(texts, records, variant),
        "identical_rounds": _identical(texts, records, rounds_of) if sampling.greedy else None,
    }
    _print(result, options.precision)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _rollout(engine: Engine, prompt: Prompt, sampling: Sampling, tokens: int, stops: frozenset[int]) -> Sequence:
    sequence = Sequence(
        prompt.ids,
        max_new_tokens=tokens,
        sampling=sampling,
        stop_ids=stops,
        prompt_id=prompt.id,
        category=prompt.category,
    )
    engine.generate([sequence])
    return sequence


def _agreement(texts: list[TextAcceptance], records: list[RoundRecord], variant: Variant) -> dict[str, dict]:
    """By category and overall: tau both ways and the difference, paired by prompt."""
    rows = {}
    for category in ["all", *sorted({text.category for text in texts})]:
        mine = [t for t in texts if category in ("all", t.category)]
        theirs = [r for r in records if category in ("all", r.category)]
        sums = {s.id: (s.expected_committed or 0.0, s.expected_rounds or 0.0) for s in prompt_sums(mine, variant)}
        difference = paired_difference(sums, committed_and_rounds(theirs))
        rows[category] = {
            "accept": AcceptanceFigures(mine, variant).tau().to_json(),
            "rollout": tau_step(theirs).to_json(),
            "difference": difference.to_json(),
            "within": difference.low is None or difference.low <= 0 <= (difference.high or 0.0),
        }
    return rows


def _identical(
    texts: list[TextAcceptance], records: list[RoundRecord], completions: dict[str, list[int]]
) -> dict[str, int]:
    """Greedy texts whose rounds accepted exactly as predicted, of those whose text is the corpus's own."""
    same = parted = equal = 0
    for text in texts:
        if completions[text.prompt_id] != text.tokens[: text.length].tolist():
            parted += 1  # a near tie between batched and single decoding: another text
            continue
        same += 1
        real = [r.accepted for r in records if r.prompt_id == text.prompt_id]
        equal += text.rounds is not None and text.rounds.accepted.tolist() == real
    return {"texts_equal": same, "texts_parted": parted, "all_rounds_identical": equal}


def _note(arm: Arm, prompts: int, tau: Estimate) -> None:
    arm.path.append((prompts, arm.seconds, half_width(tau)))


def _print(result: dict, precision: float) -> None:
    base, _ = result["seconds_to_precision"]["rollout"]
    print(f"\nseconds to an interval of tau_step within +-{precision:.0%}")
    for name, (seconds, seen) in result["seconds_to_precision"].items():
        how = "" if seen else " (scaled)"
        print(f"  {name:<28} {seconds:8.1f} s{how}   {base / seconds:.1f} x as fast as rollouts")
    print("\ntau_step          accept   rollout   difference (paired, 95 %)")
    for name, row in result["agreement"].items():
        d = row["difference"]
        inside = "" if row["within"] else "   OUTSIDE"
        low, high = (f"{d[end]:+.3f}" if d[end] is not None else "-" for end in ("low", "high"))
        print(
            f"  {name:<14} {row['accept']['value']:8.3f}  {row['rollout']['value']:8.3f}   "
            f"{d['value']:+.3f} [{low}, {high}]{inside}"
        )
    if result["identical_rounds"]:
        print("\ngreedy:", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in result["identical_rounds"].items()))


def _shown(tau: Estimate) -> str:
    return f"{tau.value:.3f} +-{half_width(tau):.1%}" if tau.value is not None else "-"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, type=Path)
    parser.add_argument("--prompts", type=Path, help="JSONL instead of the bundled prompts")
    parser.add_argument("--categories", default="code,chat,math")
    parser.add_argument("--max-prompts", type=int, default=None)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--precision", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
