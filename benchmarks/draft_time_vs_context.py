"""Does drafting get slower with context? Time of a whole draft behind a long and a short context, in turns.

    python benchmarks/draft_time_vs_context.py --target smollm2-135m --draft FOLDER [--short 200 --long 2000]

A draft is what a round pays: the features of the tokens committed last (two), the block and the heads. Prints medians
and their ratio; attention over the features is the only part that may grow.
"""

import argparse
from pathlib import Path
from statistics import median

import torch

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import PREFILL_ROWS, Target
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.cost_table import timed

KEPT_ROWS = 2


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--short", type=int, default=200)
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    target = Target.load(resolve_model(options.target), "auto", options.dtype)
    drafter = load_drafter(options.draft, target)
    width = len(drafter.taps) * target.hidden_size

    def features(rows: int) -> torch.Tensor:
        return torch.randn(rows, width, dtype=target.dtype, device=target.device)

    requests = {}
    for context in (options.short, options.long):
        request = requests[context] = Sequence([0] * (context + 1), max_new_tokens=1)
        drafter.begin([request])
        for start in range(0, context, PREFILL_ROWS):
            rows = min(PREFILL_ROWS, context - start)
            drafter.observe([request], features(rows), [rows])
    fresh, seconds = features(KEPT_ROWS), {context: list[float]() for context in requests}
    for turn in range(options.repeats + 3):
        for context, request in requests.items():

            def draft(request: Sequence = request) -> None:
                drafter.observe([request], fresh, [KEPT_ROWS])
                drafter.propose([request], drafter.max_draft)

            took = timed(target.device, draft)
            if turn >= 3:  # the first turns warm up
                seconds[context].append(took)
    short, long = median(seconds[options.short]), median(seconds[options.long])
    print(f"{drafter.name}, {target.device} {options.dtype}, {options.repeats} drafts each, in turns")
    print(f"context {options.short}: {1000 * short:.2f} ms a draft; context {options.long}: {1000 * long:.2f} ms")
    print(f"ratio {long / short:.3f} (at most 1.3)")


if __name__ == "__main__":
    main()
