"""What the engine adds: a round against its bare forwards, and plain decoding against transformers' generate.

    python benchmarks/overhead.py --target smollm2-135m --draft FOLDER [--max-prompts 9 --max-new-tokens 48]

Both from one bench run, arms in turns: the round is compared with the bare forwards sampled between the requests, and
`hf` is transformers' generate with whichever of its attention forms is fastest here. Prints shares and ratios only.
"""

import argparse

from specdoctor.measure.bench_command import BenchRequest, run_bench_request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, action="append")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-prompts", type=int, default=9)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    result = run_bench_request(
        BenchRequest(
            target=options.target,
            drafts=options.draft,
            dtype=options.dtype,
            hf_baseline=True,
            max_prompts=options.max_prompts,
            max_new_tokens=options.max_new_tokens,
            ignore_stop=True,
        )
    )
    for arm in result["arms"]:
        if arm["name"] == "hf":
            ratio = arm["speedup"]
            span = f"[{1 / ratio['high']:.3f}, {1 / ratio['low']:.3f}]"
            print(
                f"ar over transformers generate ({arm['attention']}): {1 / ratio['value']:.3f} {span} (at least 0.97)"
            )
        elif arm["draft"]:
            bare = arm["bare"]
            forwards = bare["target_block_seconds"] + bare["draft_seconds"]
            print(
                f"{arm['name']}: round {1000 * bare['round_seconds']:.2f} ms, bare forwards {1000 * forwards:.2f} ms: "
                f"{1 - forwards / bare['round_seconds']:.1%} more; in neither forward by the round's own marks: "
                f"{arm['overhead_share']['value']:.1%} (at most 5 %)"
            )


if __name__ == "__main__":
    main()
