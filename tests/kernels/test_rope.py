from dataclasses import dataclass, replace

import pytest
import torch

from nanovllm.kernels.pointwise.rope import (
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
    store_kv,
    store_kv_reference,
)
from tests.kernels.conftest import poison

EPS = 1e-6
BLOCKS = 6
MAX_POSITION = 100


@dataclass
class Case:
    """Arguments of qk_norm_rope_store, in its order but for eps."""

    qkv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    q_heads: int
    kv_heads: int

    def run(self, function) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return function(
            self.qkv, self.q_weight, self.k_weight, EPS, self.cos_sin, self.positions, self.k_cache, self.v_cache,
            self.slots, self.q_heads, self.kv_heads,
        )  # fmt: skip

    def clone(self) -> "Case":
        return replace(self, qkv=self.qkv.clone(), k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())


def cos_sin_table(head_dim: int, device: torch.device) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(MAX_POSITION, device=device)[:, None] * frequency
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def make_case(
    num_tokens: int, q_heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype,
    device: torch.device,
) -> Case:  # fmt: skip
    """Random tokens, a third of them without a slot; caches are all NaN, with a layout other than the usual one."""
    width = (q_heads + 2 * kv_heads) * head_dim
    slots = torch.randperm(BLOCKS * block_size)[:num_tokens]
    slots[torch.rand(num_tokens) < 0.3] = -1
    cache_shape = (BLOCKS, block_size, kv_heads, head_dim)
    k_cache, v_cache = (poison(*cache_shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
    return Case(
        qkv=torch.randn(num_tokens, width, dtype=dtype, device=device) * 2,
        q_weight=torch.randn(head_dim, dtype=dtype, device=device),
        k_weight=torch.randn(head_dim, dtype=dtype, device=device),
        cos_sin=cos_sin_table(head_dim, device),
        positions=torch.randint(0, MAX_POSITION, (num_tokens,), dtype=torch.int32, device=device),
        k_cache=k_cache,
        v_cache=v_cache.contiguous(),
        slots=slots.to(torch.int32).to(device),
        q_heads=q_heads,
        kv_heads=kv_heads,
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 3e-6 if actual.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if actual.dtype != torch.float32 and actual.numel():
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        assert (~same).float().mean() < 0.01


@pytest.mark.parametrize(
    ("num_tokens", "q_heads", "kv_heads", "head_dim", "block_size"),
    [(1, 4, 2, 64, 16), (7, 6, 2, 128, 16), (5, 5, 1, 32, 32), (3, 16, 8, 128, 16), (3, 6, 3, 80, 16),
     (70, 20, 2, 16, 16), (0, 4, 2, 64, 16)],
)  # fmt: skip
def test_equals_its_twin(
    num_tokens: int, q_heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    case = make_case(num_tokens, q_heads, kv_heads, head_dim, block_size, dtype, device)
    twin = case.clone()
    kv_before = case.qkv[:, q_heads * head_dim :].clone()
    q, expected = case.run(qk_norm_rope_store), twin.run(qk_norm_rope_store_reference)
    assert q.shape == (num_tokens, q_heads, head_dim)
    assert q.data_ptr() == case.qkv.data_ptr()
    assert_close(q, expected)
    assert torch.equal(case.qkv[:, q_heads * head_dim :], kv_before)
    assert_close(case.k_cache, twin.k_cache)  # NaN wherever nothing belongs
    assert torch.equal(case.v_cache.isnan(), twin.v_cache.isnan())
    assert torch.equal(case.v_cache.nan_to_num(), twin.v_cache.nan_to_num())


def test_a_token_does_not_depend_on_its_step(dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(20, 16, 8, 128, 16, dtype, device)
    alone = case.clone()
    q = case.run(qk_norm_rope_store)
    for token in (0, 11, 19):
        part = slice(token, token + 1)
        single = replace(alone, qkv=alone.qkv[part], positions=alone.positions[part], slots=alone.slots[part])
        assert torch.equal(single.run(qk_norm_rope_store)[0], q[token])
        slot = int(case.slots[token])
        if slot >= 0:
            place = (slot // 16, slice(None), slot % 16)
            assert torch.equal(alone.k_cache[place], case.k_cache[place])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twin_equals_hugging_face(dtype: torch.dtype) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    case = make_case(9, 4, 2, 64, 16, dtype, torch.device("cpu"))
    case.slots[:] = torch.arange(9, dtype=torch.int32)
    heads = case.qkv.clone().view(9, 8, 64)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm = qwen3.Qwen3RMSNorm(64, eps=EPS)
        norm.weight.data = weight
        return norm(x).detach().transpose(0, 1)[None]

    cos, sin = (half.repeat(1, 2).to(dtype)[None] for half in case.cos_sin[case.positions.long()].chunk(2, dim=1))
    q, k = normed(heads[:, :4], case.q_weight), normed(heads[:, 4:6], case.k_weight)
    q, k = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(case.run(qk_norm_rope_store_reference), q[0].transpose(0, 1), **tolerance)
    torch.testing.assert_close(case.k_cache[0, :, :9], k[0], **tolerance)
    assert torch.equal(case.v_cache[0, :, :9], heads[:, 6:].transpose(0, 1))


def test_store_kv_equals_its_twin(dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(11, 4, 3, 48, 16, dtype, device)
    twin = case.clone()
    _, k, v = case.qkv.view(11, -1, 48).split([4, 3, 3], dim=1)
    store_kv(k, v, case.k_cache, case.v_cache, case.slots)
    store_kv_reference(k, v, twin.k_cache, twin.v_cache, case.slots)
    for written, expected in ((case.k_cache, twin.k_cache), (case.v_cache, twin.v_cache)):
        torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)
