"""Says hello: continues a few prompts, by default with the small checkpoint that ships with nanovllm."""

import argparse

from nanovllm import LLM, SamplingParams

DEMO_PROMPTS = ["The capital of France is", "1 2 3 4 5", "3 + 4 =", "Monday, Tuesday,", "The opposite of hot is"]
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="a checkpoint folder or a hub id (default: %(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share the model")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    args = parser.parse_args()
    is_demo = args.model == "demo"

    with LLM(args.model, tensor_parallel_size=args.tensor_parallel_size, device=args.device) as llm:
        prompts = DEMO_PROMPTS if is_demo else PROMPTS
        greedy = SamplingParams(temperature=0.0, max_tokens=32)
        for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
            print(f"{prompt!r} => {output['text']!r}")
        if not is_demo:
            return

        messages = [{"role": "user", "content": "What is the capital of Italy?"}]
        [answer] = llm.chat(messages, greedy, use_tqdm=False)
        print(f"user: {messages[0]['content']}\nassistant: {answer.text} ({answer.finish_reason})")

        drawn = SamplingParams(temperature=0.8, max_tokens=160, seed=1)
        [story] = llm.generate("Once upon a time", drawn, use_tqdm=False)
        print(f"story: Once upon a time{story.text}")


if __name__ == "__main__":
    main()
