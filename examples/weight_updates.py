"""A policy-gradient loop by hand: sample, score, take a step, load the new weights into the engine.

python examples/weight_updates.py
"""

import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

MODEL = "assets/demo-qwen3"


def main() -> None:
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    params = SamplingParams(n=4, temperature=1.0, max_tokens=16, logprobs=0, ignore_eos=True)
    with LLM(MODEL, logprobs_mode="processed") as llm:
        for step in range(3):
            (request,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
            rewards = torch.tensor([float(-len(set(output.token_ids))) for output in request.outputs])
            loss = torch.zeros(())
            for output, advantage in zip(request.outputs, rewards - rewards.mean(), strict=True):
                ids = torch.tensor([[*request.prompt_token_ids, *output.token_ids]])
                scores = policy(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].log_softmax(-1)
                loss = loss - advantage * scores.gather(1, ids[0, len(request.prompt_token_ids) :, None]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            llm.load_weights(policy.state_dict().items())
            print(f"step {step}: reward {rewards.mean():.2f}, weights are version {llm.weight_version}")


if __name__ == "__main__":
    main()
