"""How much sooner does `accept` know tau than rolling out, and do both say the same?

Runs the same prompts three ways, in turns so that a drifting machine hits all alike: rounds of real decoding, one
prompt at a time as `bench` does; texts written by the target in batches; `accept` on those texts. Prints the seconds
that each needs until the 95 % interval of tau_step is within +-PRECISION of it (measured if it got there, else scaled
by the square root law and marked), tau by category against the joint interval of both, and in greedy whether the
accepted lengths of every round are identical.

    python benchmarks/accept_vs_rollout.py --target smollm2-135m --draft FOLDER [--temperature 0.8] [--threads 1]

Rollouts in batches (--rollout-batch) are faster a prompt and belong into a fair comparison where one has many prompts.
A GPU decodes bound by memory and prefills bound by arithmetic, so the gain there should be larger; this script claims
nothing about it until it is run there.
"""

import argparse
import json
import math
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
from specdoctor.metrics.accept_summary import AcceptanceFigures
from specdoctor.metrics.acceptance import tau_step
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.record import RoundRecord
from specdoctor.metrics.text_acceptance import TextAcceptance
from specdoctor.metrics.whatif import Variant

GROUP = 32


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
    completions: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        manifest = Manifest.of(target, template_record(tokenizer), sampling, target.stop_ids, options.seed)
        corpus = Corpus(Path(scratch) / "corpus", manifest)
        depth = drafter.max_draft
        one_pass = AcceptancePass(target, drafter, sampling, PassOptions(depth, depth, drafted_paths=False))
        engine = Engine(target, drafter)
        # Warm up, with as many cache slots as are needed later.
        engine.generate([_sequence(prompts[0], options, 0, target.stop_ids, 8) for _ in range(options.rollout_batch)])
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
            sequences = [_sequence(p, options, i, target.stop_ids) for i, p in enumerate(group, first)]
            for begin in range(0, len(sequences), options.rollout_batch):
                engine.generate(sequences[begin : begin + options.rollout_batch])
            rollout.seconds += time.perf_counter() - start
            records += [record for sequence in sequences for record in sequence.records]
            completions |= {sequence.prompt_id: sequence.completion_ids for sequence in sequences}
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
        "identical_rounds": _identical(texts, records, completions) if sampling.greedy else None,
    }
    _print(result, options.precision)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _sequence(
    prompt: Prompt, options: argparse.Namespace, index: int, stops: frozenset[int], tokens: int | None = None
) -> Sequence:
    return Sequence(
        prompt.ids,
        max_new_tokens=tokens or options.max_new_tokens,
        sampling=Sampling(options.temperature, seed=options.seed + index),
        stop_ids=stops,
        prompt_id=prompt.id,
        category=prompt.category,
    )


def _agreement(texts: list[TextAcceptance], records: list[RoundRecord], variant: Variant) -> dict[str, dict]:
    """By category and overall: tau both ways, and whether they differ by less than both intervals together allow."""
    rows = {}
    for category in ["all", *sorted({text.category for text in texts})]:
        mine = [t for t in texts if category in ("all", t.category)]
        theirs = [r for r in records if category in ("all", r.category)]
        ours, rolled = AcceptanceFigures(mine, variant).tau(), tau_step(theirs)
        joint = math.hypot(half_width(ours) * (ours.value or 0), half_width(rolled) * (rolled.value or 0))
        difference = (ours.value or 0) - (rolled.value or 0)
        rows[category] = {
            "accept": ours.to_json(),
            "rollout": rolled.to_json(),
            "difference": difference,
            "joint_half_width": joint,
            "within": abs(difference) <= joint + 1e-9,
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
    print("\ntau_step          accept   rollout   difference (joint 95 % interval)")
    for name, row in result["agreement"].items():
        inside = "" if row["within"] else "   OUTSIDE"
        print(
            f"  {name:<14} {row['accept']['value']:8.3f}  {row['rollout']['value']:8.3f}   "
            f"{row['difference']:+.3f} (+-{row['joint_half_width']:.3f}){inside}"
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
    parser.add_argument("--rollout-batch", type=int, default=1, help="prompts rolled out together; bench takes 1")
    parser.add_argument("--precision", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
