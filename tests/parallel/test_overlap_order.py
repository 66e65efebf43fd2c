"""The order of launches in a layer cut in halves, and how long a sum holds what it uses."""

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from threads import run_in_threads
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.kernels import select_kernels
from nanovllm.layers.context import LayerContext, ModelContext, Stream
from nanovllm.layers.norm import ReduceAddNorm, RowNorm
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.step import Call
from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.parallel.two_batch import Overlap, run_micro_batches

CPU = torch.device("cpu")
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


EXPECTED = """
sum of 3, begun 0, sum of 2, begun 1,
awaited 0, product of 3, attention of 3, product of 3, sum of 3, begun 2,
awaited 1, product of 2, attention of 2, product of 2, sum of 2, begun 3,
awaited 2, product of 3, product of 3, sum of 3, begun 4,
awaited 3, product of 2, product of 2, sum of 2, begun 5,
awaited 4, awaited 5
"""


class Products(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::linear", "aten::addmm"):
            self._log.append(f"product of {args[0].shape[0]}")
        return func(*args, **(kwargs or {}))


def logged_start(log: list[str]) -> Callable[..., Callable[[], Any]]:
    names, start = itertools.count(), ReduceAddNorm.start

    def begin(*args: Any) -> Callable[[], Any]:
        wait, name = start(*args), next(names)
        log.append(f"begun {name}")

        def logged() -> Any:
            log.append(f"awaited {name}")
            return wait()

        return logged

    return begin


def group_of(all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    calls = {"all_reduce": all_reduce, "fused_all_reduce": lambda rows: None}
    return SimpleNamespace(rank=0, size=1, overlap=Overlap(None), exact_bits=None, width_multiple=1, **calls)


@pytest.mark.parametrize(("device", "is_cut"), [("cpu", True), ("cuda:0", False)])
def test_gpus_without_peer_memory_cut_nothing(device: str, is_cut: bool) -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        group = TensorParallelGroup(rank, 2, torch.device(device), store, overlap=True, share_gpus=True)
        assert (group.overlap is not None) == is_cut

    assert run_in_threads(*(partial(work, rank) for rank in range(2))) == [None, None]


def test_order_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum comes behind its half's product, behind that all that the other half computes, and only then somebody
    waits for it."""
    log: list[str] = []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        log.append(f"sum of {x.shape[0]}")
        return x

    config = parse_config({**PUBLISHED_SHAPES["Qwen3-0.6B"], **TINY})
    monkeypatch.setattr(ReduceAddNorm, "start", logged_start(log))
    group = group_of(all_reduce)
    context = ModelContext(group, select_kernels(CPU), torch.float32, CPU, config, 64)
    layer = DecoderLayer(context, config.layers[0], PositionTables.of(context), None)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)

    def attend(qkv: torch.Tensor, call: Any) -> torch.Tensor:
        log.append(f"attention of {qkv.shape[0]}")
        return qkv[:, :32].contiguous()

    layer.self_attn.attend = attend  # type: ignore[method-assign]
    embedded, norm = torch.randn(5, 32), layer.input_layernorm
    step: Any = SimpleNamespace(wanted=None, adapters=None)
    expected, _ = norm(layer(Stream(embedded.clone()), step))
    log.clear()
    with torch.no_grad(), Products(log):
        halves = embedded[:3].clone(), embedded[3:].clone()
        blocks = [(block.reduce_norm, block.compute) for block in layer.blocks]
        result = run_micro_batches(halves, (Call(step), Call(step)), blocks, norm)
    assert ", ".join(log) == " ".join(EXPECTED.split())
    torch.testing.assert_close(result, expected.detach(), rtol=1e-4, atol=1e-4)


def test_a_half_whose_product_comes_in_parts_is_one_addend() -> None:
    """Copies between GPUs move rows [T, hidden] of the model's dtype."""
    parts, added = torch.randn(3, 5, 8), []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        added.append(x)
        return x

    norm = ReduceAddNorm(LayerContext(group_of(all_reduce), select_kernels(CPU), torch.bfloat16, CPU), None)
    norm.start(parts, torch.zeros(5, 8, dtype=torch.bfloat16), 0)
    [made] = added
    assert made.dtype == torch.bfloat16 and made.shape == (5, 8)
    torch.testing.assert_close(made.float(), parts.sum(0), rtol=1e-2, atol=1e-2)


def test_what_a_sum_uses_lives_until_it_is_awaited() -> None:
    context = LayerContext(group_of(lambda x: x), select_kernels(CPU), torch.float32, CPU)
    norm = ReduceAddNorm(context, RowNorm(context, 8, 1e-6))
    torch.nn.init.ones_(norm.row_norm.weight)
    partial, residual = torch.randn(4, 8), torch.randn(4, 8)
    alive = [weakref.ref(partial), weakref.ref(residual)]
    wait = norm.start(partial, residual, 1)
    del partial, residual
    gc.collect()
    assert all(tensor() is not None for tensor in alive)
    normed, _ = wait()
    del wait, normed, _
    gc.collect()
    assert all(tensor() is None for tensor in alive)


def test_a_rank_on_its_own_sends_nothing() -> None:
    """Kernels are rehearsed on rank 0 alone: what it copied then would pass for its first sum."""
    group = TensorParallelGroup(0, 1, CPU, None)
    sums: Any = SimpleNamespace(enabled=True)
    group.overlap = Overlap(sums)
    with group.muted():
        assert not sums.enabled
    assert sums.enabled
