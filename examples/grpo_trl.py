"""GRPO training with TRL: the engine generates in place of vLLM. Install it with pip install '.[trl]'.

python examples/grpo_trl.py
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from nanovllm.integrations.trl import install

MODEL = "assets/demo-qwen3"


def shorter_is_better(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def main() -> None:
    install()
    data = Dataset.from_dict({"prompt": ["Once upon a time", "The capital of France is"] * 4})
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, use_vllm=True, vllm_mode="colocate", num_generations=4, max_steps=2, report_to=[],
            per_device_train_batch_size=8, max_completion_length=16, logging_steps=1,
            use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        )  # fmt: skip
        trainer = GRPOTrainer(model=MODEL, args=args, train_dataset=data, reward_funcs=shorter_is_better)
        trainer.train()
    print([round(entry["reward"], 2) for entry in trainer.state.log_history if "reward" in entry])


if __name__ == "__main__":
    main()
