"""Texts over FP8 keys and values, with prompts that read copies of them and with prompts that do not, by Triton's
interpreter. Run as a script, this file is the engines: the interpreter has to be chosen before triton is imported."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_interpreted

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.plan.device import Device

OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 64, "num_kvcache_blocks": 8, "max_num_batched_tokens": 96, "max_num_seqs": 4,
    "max_model_len": 256, "skip_tokenizer_init": True, "device": "cpu", "kv_cache_dtype": "fp8",
    "attention_backend": "triton", "disable": ("lookahead", "fused_kernels"),
}  # fmt: skip
SHARED = [(7 * i) % 150 for i in range(64)]
CALLS = [[[*SHARED, *range(66)], [*range(40, 58)]], [[*SHARED, 3, 4]]]  # chunks, rows side by side, and a prefix hit


def serve(folder: str, copies: bool) -> tuple[list[Any], int]:
    """Texts with their log-probabilities, and how many times a layer's keys were copied."""
    from nanovllm.attention import triton_backend
    from nanovllm.kernels.attention import widened

    class Counted(widened.WidenedPages):
        def __call__(self, *args: Any) -> None:
            made.append(args)
            super().__call__(*args)

    def room(*sizes: Any) -> tuple[int, int]:
        """Room as on a GPU that reads copies faster."""
        return copy_room(*sizes[:4], torch.bfloat16, Device.named("H200")) if copies else (0, 0)

    made: list[Any] = []
    copy_room, triton_backend.copy_room, triton_backend.WidenedPages = widened.copy_room, room, Counted
    config = widened.widened_config(64, 0)
    triton_backend.prefill_config = lambda *_: config  # numpy's sums depend on the number of rows of a tile
    widened.LEAST_QUERIES = widened.LEAST_TOKENS = 1
    params, texts = SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True), []
    with LLM(folder, **OPTIONS) as llm:
        for call in CALLS:
            outputs = llm.generate(call, params, use_tqdm=False)
            texts += [(one.token_ids, one.num_cached_tokens, repr(one.outputs[0].logprobs)) for one in outputs]
    return texts, len(made)


def test_texts_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from checkpoints import make_model, save  # here: the script needs no transformers

    shape = {"hidden_size": 32, "intermediate_size": 20, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 150}
    folder = str(save(make_model(seed=4, weight_std=0.25, **shape), tmp_path))
    (plain, none), (copied, made) = json.loads(run_interpreted(__file__, (folder,)).splitlines()[-1])
    assert none == 0 < made
    assert plain == copied
    assert [cached for _, cached, _ in plain] == [0, 0, 64]


if __name__ == "__main__":
    print(json.dumps([serve(sys.argv[1], copies) for copies in (False, True)]))
