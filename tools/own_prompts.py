"""Print prompts that a chat model wrote itself, from what it says where the user's turn begins.

    echo '{"prompt_ids": [...], "category": "own"}' > begin.jsonl      # the template up to the user's text
    specdoctor data regenerate begin.jsonl --target T --temperature 1 --samples 4000 --max-new-tokens 96 --out begun
    python tools/own_prompts.py begun T > prompts.jsonl

A model that was aligned on chats writes, after the opening of a user's turn, a user's text (Xu et al. 2024, "Magpie").
Such prompts are as varied as the chats it learnt from. Kept are texts of 20 to 600 characters that came to their end,
each once; the category is guessed from words.
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
    seen: set[str] = set()
    for file in sorted(Path(folder).glob("samples*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            sample = json.loads(line)
            (start, end), *_ = sample["answer"]
            text = tokenizer.decode(sample["ids"][start:end], skip_special_tokens=True).strip()
            if sample["stop"] != "stop" or not 20 <= len(text) <= 600 or text in seen:
                continue
            seen.add(text)
            category = "code" if CODE.search(text) else "math" if MATH.search(text) else "chat"
            print(json.dumps({"id": f"own-{len(seen):05d}", "category": category, "prompt": text}))


if __name__ == "__main__":
    main()
