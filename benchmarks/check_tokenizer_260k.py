"""How long `check-tokenizer` takes on the largest vocabularies, imports excluded; the slowest case, both parsed whole.

    python benchmarks/check_tokenizer_260k.py [--entries 262144]

Two made byte-level BPE files of that size that differ in two ids and in the normaliser. Prints wall and CPU seconds.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from specdoctor.checks.tokenizer_examination import examine_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny_tokenizers as tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=262_144)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = tiny.large_pair(Path(folder) / "small", 2_000)
        large = tiny.large_pair(Path(folder) / "large", options.entries)
        examine_tokenizers(*small)  # imports
        wall, cpu = time.perf_counter(), time.process_time()
        document = examine_tokenizers(*large)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{options.entries:,} entries: {document['summary']}")
    print(f"{wall:.2f} s wall, {cpu:.2f} s CPU (at most 3)")


if __name__ == "__main__":
    main()
