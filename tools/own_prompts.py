"""Print prompts that a chat model wrote itself, from what it says where the user's turn begins.

    echo '{"prompt_ids": [...]}' > begin.jsonl    # the template up to the user's text; more lines: with first words
    specdoctor data regenerate begin.jsonl --target T --temperature 1 --samples 4000 --max-new-tokens 96 --out begun
    python tools/own_prompts.py begun T > prompts.jsonl

A model that was aligned on chats writes, after the opening of a user's turn, a user's text (Xu et al. 2024, "Magpie").
Such prompts are as varied as the chats it learnt from; first words ("Write a SQL query") steer them. Kept are texts of
20 to 600 characters that came to their end, each once; the category is guessed from words.
"""

import json
import re
import sys
from pathlib import Path

from transformers import AutoTokenizer

CODE = re.compile(r"\b(code|function|python|javascript|java|sql|program|script|class|algorithm|implement)\b|```", re.I)
MATH = re.compile(
    r"\b(solve|equation|calculate|how many|probability|triangle|sum of|percent|integral|prove)\b|\d\s*[-+*/=]", re.I
)


def main() -> None:
    folder, target = sys.argv[1:3]
    tokenizer = AutoTokenizer.from_pretrained(target)
    files = sorted(Path(folder).glob("samples*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    begins = [sample["ids"][: sample["answer"][0][0]] for sample in samples]
    shortest = min(map(len, begins))
    # Where the user's text begins: behind what all of them share, the template.
    start = next((i for i in range(shortest) if len({begin[i] for begin in begins}) > 1), shortest)
    seen: set[str] = set()
    for sample in samples:
        text = tokenizer.decode(sample["ids"][start:], skip_special_tokens=True).strip()
        if sample["stop"] != "stop" or not 20 <= len(text) <= 600 or text in seen:
            continue
        seen.add(text)
        category = "code" if CODE.search(text) else "math" if MATH.search(text) else "chat"
        print(json.dumps({"id": f"own-{len(seen):05d}", "category": category, "prompt": text}))


if __name__ == "__main__":
    main()
