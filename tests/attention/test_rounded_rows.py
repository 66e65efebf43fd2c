"""Rows of a layer whose output projection is in e4m3: attention's merge rounds them, but where some alone are wanted,
as of a model that drafts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cases import DEVICE, DTYPE, make_case

from nanovllm.attention.base import AttentionSetup
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.config import EngineConfig
from nanovllm.kernels import select_kernels
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.plan.device import KNOWN
from nanovllm.kernels.plan.plan import Planner, Rules
from nanovllm.layers.context import ModelContext
from nanovllm.layers.step import Call, ForwardStep
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import read_model_config

SIZES = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 32, "eos_token_id": 0}  # fmt: skip


@pytest.mark.parametrize("lengths", [[200], [200, 7, 350, 0]], ids=["one row", "a row without chunks, and padding"])
def test_the_output_projection_takes_what_a_kernel_of_its_own_would_round(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, real = len(lengths), sum(map(bool, lengths))
    options = EngineConfig("Qwen3-0.6B", load_format="dummy", quantization="fp8", hf_overrides=SIZES)
    config, device = read_model_config(options), torch.device(DEVICE)
    group: Any = SimpleNamespace(rank=0, size=1, exact_bits=None, width_multiple=1)
    planner = Planner(Rules(KNOWN[0], own_kernels=True))
    case = make_case([1] * rows, lengths, rows, num_q_heads=2, num_kv_heads=1, head_dim=128, block_size=128)
    context = ModelContext(group, select_kernels(device), DTYPE, device, config, 256, planner=planner)
    with torch.inference_mode():
        attention = DecoderForCausalLM(context).layers[0].self_attn
        attention.bind(case.cache)
        attention.q_norm_weight.fill_(1.0)
        projections: list[torch.Tensor | FP8Rows] = []
        qkv = case.q.new_ones(rows, 512).cumsum(1)
        monkeypatch.setattr(attention.qkv_proj.matrix, "multiply", lambda *_, **__: qkv.clone())

        def multiply(x: torch.Tensor | FP8Rows, *_: Any, **__: Any) -> torch.Tensor:
            projections.append(x)
            return case.q.new_zeros(rows, 128)

        monkeypatch.setattr(attention.o_proj.matrix, "multiply", multiply)
        backend = TritonBackend(AttentionSetup((case.spec,), 128, device, DTYPE, None, 4, 512))
        backend.prepare(case.metadata)
        nowhere = torch.full((rows,), -1, dtype=torch.int32, device=device)
        step = ForwardStep(torch.zeros_like(nowhere), (nowhere,), case.metadata, backend)
        call = Call(step, residual=case.q.new_zeros(rows, 128))
        planned = attention.o_proj.launch(rows, call)
        for rounds, wanted in ((True, None), (False, None), (True, torch.tensor([real - 1], device=device))):
            launch, step.wanted = replace(planned, rounded=rounds), wanted
            monkeypatch.setattr(attention.o_proj, "launch", lambda *_, launch=launch: launch)
            attention(call.residual, call)
        rounded, wide, last = projections
        assert isinstance(rounded, FP8Rows) and isinstance(wide, torch.Tensor) and wide[:real].std() > 0
        assert isinstance(last, torch.Tensor) and torch.equal(last, wide[real - 1 : real])
        want = quantize_rows(wide)
    assert torch.equal(rounded.values[:real].float(), want.values[:real].float())
    assert torch.equal(rounded.scales[:real], want.scales[:real])
