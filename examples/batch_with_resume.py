"""Writes answers to a list of prompts to a JSON Lines file. If it is interrupted, run it again to continue.

    python examples/batch_with_resume.py [OUT.jsonl]
"""

import json
import sys
from pathlib import Path

from nanovllm import LLM, SamplingParams

MODEL = "demo"
PROMPTS = [f"Story {number}: once upon a time" for number in range(20)]
AT_ONCE = 8  # prompts per call: at most as many are lost when it is interrupted


def main(path: Path) -> None:
    done = {json.loads(line)["number"] for line in path.read_text().splitlines()} if path.exists() else set()
    waiting = [number for number in range(len(PROMPTS)) if number not in done]
    print(f"{len(done)} of {len(PROMPTS)} already done")
    if not waiting:
        return
    with LLM(MODEL) as llm, path.open("a") as file:
        for begin in range(0, len(waiting), AT_ONCE):
            numbers = waiting[begin : begin + AT_ONCE]
            params = [SamplingParams(max_tokens=32, seed=number) for number in numbers]  # the same texts in any run
            for number, output in zip(numbers, llm.generate([PROMPTS[n] for n in numbers], params), strict=True):
                file.write(json.dumps({"number": number, "text": output.text}) + "\n")
            file.flush()
    print(f"{len(waiting)} answered")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "answers.jsonl"))
