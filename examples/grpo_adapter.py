"""GRPO of a LoRA adapter in a loop of your own: the engine samples with each version of the adapter, and is the
reference policy without it. Needs peft (pip install '.[trl]').

python examples/grpo_adapter.py
"""

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

MODEL, PROMPTS = "assets/demo-qwen3", ["Once upon a time", "The capital of France is"]
GROUP, BETA = 8, 0.05
SAMPLED = SamplingParams(n=GROUP, max_tokens=12, logprobs=0)


def reward(text: str) -> float:
    return -float(len(text))


def logprobs_of(policy: torch.nn.Module, ids: list[int], start: int) -> torch.Tensor:
    """Log-probabilities of ids[start:]."""
    logits = policy(torch.tensor([ids], device=policy.device)).logits[0, start - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[start:], device=policy.device)[:, None])[:, 0]


def main() -> None:
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"), config)
    optimizer = torch.optim.AdamW((part for part in policy.parameters() if part.requires_grad), 1e-3)
    with LLM(MODEL, dtype="float32", enable_lora=True, max_loras=1, max_lora_rank=8) as llm:
        for step in range(3):
            tensors, entries = get_peft_model_state_dict(policy), policy.peft_config["default"].to_dict()
            version = llm.load_adapter(f"policy@{step}", tensors=tensors, config=entries)
            losses, rewards, differences = [], [], []
            for output in llm.generate(PROMPTS, SAMPLED, use_tqdm=False, lora_request=version):
                start, group = len(output.prompt_token_ids), output.outputs
                scores = torch.tensor([reward(one.text) for one in group])
                rewards.append(scores.mean().item())
                texts = [output.prompt_token_ids + one.token_ids for one in group]
                scored = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=start)
                references = llm.generate(texts, scored, use_tqdm=False)  # of the base
                for one, ids, score, reference in zip(group, texts, scores, references, strict=True):
                    own, before, sampled = logprobs_of(policy, ids, start), reference.prompt_logprobs, one.logprobs
                    base = own.new_tensor([before[at][ids[at]].logprob for at in range(start, len(ids))])
                    old = own.new_tensor([at[token].logprob for token, at in zip(one.token_ids, sampled, strict=True)])
                    advantage = (score - scores.mean()) / (scores.std() + 1e-4)
                    divergence = (base - own).exp() - (base - own) - 1
                    losses.append((BETA * divergence - (own - old).exp() * advantage).mean())
                    differences.append((own - old).abs().max().item())
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            llm.remove_adapter(version.lora_name)
            print(f"policy@{step}: reward {sum(rewards) / len(rewards):.2f}, ratios off by {max(differences):.0e}")


if __name__ == "__main__":
    main()
