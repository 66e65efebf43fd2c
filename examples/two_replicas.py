"""One engine over two replicas. When one dies, the other takes over its requests.

python examples/two_replicas.py
"""

from nanovllm import LLM, SamplingParams

MODEL = "demo"


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [f"Story {number}: once upon a time" for number in range(8)]
    with LLM(MODEL, data_parallel_size=2) as llm:  # on one GPU: share_gpus=True, num_kvcache_blocks=64
        for request_id in [llm.add_request(prompt, params) for prompt in prompts]:
            print("queued:", request_id)
        texts: dict[int, list[int]] = {}
        while llm.has_unfinished_requests():
            for gained in llm.step():
                texts.setdefault(gained.request_id, []).extend(gained.new_token_ids)
        for request_id, ids in sorted(texts.items()):
            print(request_id, repr(llm.tokenizer.decode(ids)))


if __name__ == "__main__":
    main()
