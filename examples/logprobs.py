"""Log-probabilities of sampled tokens, of their alternatives, and of given answers.

python examples/logprobs.py
"""

from nanovllm import LLM, SamplingParams

MODEL = "demo"
QUESTION, ANSWERS = "The capital of France is", [" Paris.", " London.", " a"]


def main() -> None:
    with LLM(MODEL) as llm:
        (request,) = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=5, logprobs=3), use_tqdm=False)
        for entries in request.outputs[0].logprobs or ():
            print("  ".join(f"{entry.decoded_token!r} {entry.logprob:.2f}" for entry in entries.values()))

        begin = len(llm.tokenizer.encode(QUESTION))  # score the answer only
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=begin)
        outputs = llm.generate([QUESTION + answer for answer in ANSWERS], params, use_tqdm=False)
        for answer, output in zip(ANSWERS, outputs, strict=True):
            scores = [next(iter(entries.values())).logprob for entries in output.prompt_logprobs or () if entries]
            print(f"{answer!r}: {sum(scores):.2f} in total, {sum(scores) / len(scores):.2f} per token")


if __name__ == "__main__":
    main()
