from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nanovllm.kernels.pointwise.mean_squares import qk_mean_squares, qk_mean_squares_reference
from nanovllm.kernels.pointwise.rope import (
    QKNormRope,
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
)
from tests.kernels.conftest import poison

EPS = 1e-6
BLOCKS = 6
MAX_POSITION = 100


@dataclass
class Case:
    """Arguments of qk_norm_rope_store."""

    qkv: torch.Tensor
    how: QKNormRope
    positions: torch.Tensor
    slots: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    options: dict[str, torch.Tensor]

    def run(self, function) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return function(self.qkv, self.how, self.positions, self.slots, self.k_cache, self.v_cache, **self.options)

    def clone(self) -> "Case":
        return replace(self, qkv=self.qkv.clone(), k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())


def cos_sin_table(head_dim: int, device: torch.device) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(MAX_POSITION, device=device)[:, None] * frequency
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def make_case(
    num_tokens: int, q_heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype,
    device: torch.device, **how: Any,
) -> Case:  # fmt: skip
    """Random tokens, a third of them without a slot; caches are all NaN, with a layout other than the usual one."""
    rotary_dim, norm = how.pop("rotary_dim", head_dim), how.pop("norm", "head")
    has_bias, has_scale = how.pop("bias", False), how.pop("query_scale", False)
    rules = QKNormRope(q_heads, kv_heads, head_dim, rotary_dim, norm, EPS, **how)
    width = (q_heads + (2 - rules.values_are_keys) * kv_heads) * head_dim
    made: dict[str, Any] = {"dtype": dtype, "device": device}
    slots = torch.randperm(BLOCKS * block_size)[:num_tokens]
    slots[torch.rand(num_tokens) < 0.3] = -1
    cache_shape = (BLOCKS, block_size, kv_heads, head_dim)
    k_cache, v_cache = (poison(*cache_shape, **made).transpose(1, 2) for _ in range(2))
    options = {}
    if rotary_dim:
        options["cos_sin"] = cos_sin_table(rotary_dim, device)
    if norm is not None:
        counts = (1, 1) if norm == "head" else (q_heads, kv_heads)
        options["q_norm_weight"], options["k_norm_weight"] = (torch.randn(n * head_dim, **made) for n in counts)
    if norm == "width":
        options["mean_squares"] = torch.rand(num_tokens, 2, device=device)
    if has_bias:
        options["bias"] = torch.randn(width, **made)
    if has_scale:
        options["query_scale"] = torch.rand(MAX_POSITION, device=device) + 1
    return Case(
        qkv=torch.randn(num_tokens, width, **made) * 2,
        how=rules,
        positions=torch.randint(0, MAX_POSITION, (num_tokens,), dtype=torch.int32, device=device),
        slots=slots.to(torch.int32).to(device),
        k_cache=k_cache,
        v_cache=v_cache.contiguous(),
        options=options,
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 3e-6 if actual.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if actual.dtype != torch.float32 and actual.numel():
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        assert (~same).float().mean() < 0.01


SHAPES = [(1, 4, 2, 64, 16), (7, 6, 2, 128, 16), (5, 5, 1, 32, 32), (3, 16, 8, 128, 16), (3, 6, 3, 80, 16),
          (70, 20, 2, 16, 16), (0, 4, 2, 64, 16), (2, 3, 1, 256, 16), (2, 20, 10, 512, 16),
          (6, 0, 2, 64, 16)]  # fmt: skip
# A norm's order, its rounding, what is rotated and what is added, as the families mix them.
RULES: list[dict[str, Any]] = [
    {"norm": None},
    {"norm": None, "rotary_dim": 0},
    {"norm": None, "bias": True},
    {"norm": None, "rotary_dim": 16, "bias": True, "query_scale": True},
    {"rotary_dim": 0},
    {"rotary_dim": 32, "norm_in_float32": True, "bias": True},
    {"rotary_dim": 24, "norm_after_rope": True},
    {"norm_after_rope": True},
    {"rope_in_float32": True, "query_scale": True},
    {"norm": "width", "norm_in_float32": True, "rope_in_float32": True},
    {"norm": "width", "rotary_dim": 32, "bias": True},
    {"value_norm": True},
    {"values_are_keys": True},
    {"values_are_keys": True, "value_norm": True, "rotary_dim": 32, "bias": True},
]


@pytest.mark.parametrize(
    ("shape", "rules"), [*((shape, {}) for shape in SHAPES), *(((5, 6, 2, 48, 16), rules) for rules in RULES)]
)
def test_equals_its_twin(
    shape: tuple[int, ...], rules: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, q_heads, _, head_dim, _ = shape
    case = make_case(*shape, dtype, device, **rules)
    twin = case.clone()
    kv_before = case.qkv[:, q_heads * head_dim :].clone()
    q, expected = case.run(qk_norm_rope_store), twin.run(qk_norm_rope_store_reference)
    assert q.shape == (num_tokens, q_heads, head_dim)
    assert not q_heads or q.data_ptr() == case.qkv.data_ptr()
    assert_close(q, expected)
    assert torch.equal(case.qkv[:, q_heads * head_dim :], kv_before)
    assert_close(case.k_cache, twin.k_cache)  # NaN wherever nothing belongs
    if case.how.value_norm:
        assert_close(case.v_cache, twin.v_cache)
    else:
        torch.testing.assert_close(case.v_cache, twin.v_cache, rtol=0, atol=0, equal_nan=True)


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


def with_fp8_cache(case: Case) -> Case:
    k_cache, v_cache = (torch.zeros_like(x, dtype=torch.uint8).view(torch.float8_e4m3fn) for x in (case.k_cache,) * 2)
    blocks, kv_heads, block_size, _ = k_cache.shape
    scales = torch.zeros(blocks, 3 + kv_heads, block_size, 2, dtype=torch.bfloat16, device=case.qkv.device)[:, 3:]
    return replace(case, k_cache=k_cache, v_cache=v_cache, options={**case.options, "kv_scales": scales})


@pytest.mark.parametrize(
    ("shape", "rules"), [((7, 6, 2, 128, 16), {}), ((5, 20, 3, 80, 16), {"rotary_dim": 24, "bias": True}),
                         ((3, 4, 2, 8, 16), {"norm": None, "rotary_dim": 0}), ((5, 0, 2, 64, 16), {"bias": True})]
)  # fmt: skip
def test_an_fp8_cache_equals_its_twins(
    shape: tuple[int, ...], rules: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """To a step of e4m3 (of the interpreter, which rounds some to a half, nearly all)."""
    case = make_case(*shape, dtype, device, **rules)
    twin, case = with_fp8_cache(case.clone()), with_fp8_cache(case)
    q, expected = case.run(qk_norm_rope_store), twin.run(qk_norm_rope_store_reference)
    assert q.dtype == expected.dtype == (torch.float16 if dtype == torch.bfloat16 else dtype)
    assert_close(q, expected)
    for number, (cache, of_twin) in enumerate(((case.k_cache, twin.k_cache), (case.v_cache, twin.v_cache))):
        scale, twin_scale = (x.options["kv_scales"][..., number, None].float() for x in (case, twin))
        torch.testing.assert_close(scale, twin_scale, rtol=2**-7, atol=0)
        stored, wanted = cache.float() * scale, of_twin.float() * twin_scale
        step = wanted.abs() / 8 + twin_scale * (2**-9 if device.type == "cuda" else 2**-6)
        assert ((stored - wanted).abs() <= 1.1 * step).float().mean() > (0.99999 if device.type == "cuda" else 0.995)
        if device.type == "cuda":
            assert (stored == wanted).float().mean() > (0.98 if number == 0 else 0.999999)


@pytest.mark.parametrize("function", [qk_norm_rope_store, qk_norm_rope_store_reference])
def test_an_fp8_cache_is_as_near_as_e4m3_allows(function: Any, device: torch.device) -> None:
    """Of values of any size; what is not finite is in the key's scale, and zeros stay zeros. No byte of a value's scale
    is a NaN of e4m3."""
    case = with_fp8_cache(make_case(6, 4, 2, 64, 16, torch.float32, device))
    case.slots[:] = torch.arange(6, dtype=torch.int32)
    values = case.how.heads(case.qkv)[:, 6:]
    values *= (10.0 ** torch.tensor([-9, -3, 0, 3, 9, 0], device=device))[:, None, None]
    values[2, 0], values[5, 1, 3] = 0, float("inf")
    values[0, 0] = 448 * (2 - 2**-7)
    case.run(function)
    scales = case.options["kv_scales"][0, :, :6].float()
    stored = (case.v_cache[0, :, :6].float() * scales[..., 1:]).transpose(0, 1)
    half_step = values.abs() / 16 + values.abs().amax(-1, keepdim=True) / 448 * 2**-9
    is_near = ((stored - values).abs() <= half_step)[:5]
    rounds = device.type == "cuda" or function is qk_norm_rope_store_reference
    assert is_near.all() if rounds else is_near.float().mean() > 0.3
    assert not stored[2, 0].any() and stored.isfinite().all()
    assert scales[..., 1].isfinite().all()
    assert (scales[..., 1].bfloat16().view(torch.uint8) & 127 != 127).all()
    assert scales[..., 0].isnan().nonzero().tolist() == [[1, 5]]


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

    cos_sin = case.options["cos_sin"][case.positions.long()]
    cos, sin = (half.repeat(1, 2).to(dtype)[None] for half in cos_sin.chunk(2, dim=1))
    q, k = normed(heads[:, :4], case.options["q_norm_weight"]), normed(heads[:, 4:6], case.options["k_norm_weight"])
    q, k = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(case.run(qk_norm_rope_store_reference), q[0].transpose(0, 1), **tolerance)
    torch.testing.assert_close(case.k_cache[0, :, :9], k[0], **tolerance)
    assert torch.equal(case.v_cache[0, :, :9], heads[:, 6:].transpose(0, 1))


@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize("rotary_dim", [48, 16])
@pytest.mark.parametrize("spoiled", [float("nan"), float("-inf")])
def test_the_cache_never_holds_a_value_that_is_not_finite(
    spoiled: float, rotary_dim: int, value_norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Its key says so instead, and the token's other heads are as they were."""
    case = make_case(6, 4, 3, 48, 16, dtype, device, rotary_dim=rotary_dim, value_norm=value_norm)
    case.slots[:] = torch.arange(6, dtype=torch.int32)
    clean = case.clone()
    heads = case.how.heads(case.qkv)
    heads[2, 4 + 3 + 1, 5], heads[4, 4 + 3 + 2, 47] = spoiled, spoiled
    for function in (qk_norm_rope_store, qk_norm_rope_store_reference):
        case.run(function), clean.run(function)
        stored = torch.arange(6)
        assert case.v_cache[0, :, stored].isfinite().all()
        same = torch.ones(3, 6, dtype=torch.bool)
        same[1, 2] = same[2, 4] = False
        assert torch.equal(case.k_cache[0, :, :6].isnan().any(-1).cpu(), ~same)
        for cache, expected in ((case.k_cache, clean.k_cache), (case.v_cache, clean.v_cache)):
            assert torch.equal(cache[0, :, :6][same], expected[0, :, :6][same])


def test_mean_squares_equal_their_twin(dtype: torch.dtype, device: torch.device) -> None:
    """Of keys that are held twice, one is counted."""
    case = make_case(7, 6, 3, 40, 16, dtype, device, norm="width", bias=True)
    shares = torch.tensor([1 / 80, 0, 1 / 80], device=device)
    args = (case.qkv, case.how, 1 / 240, shares, case.options["bias"])
    expected = qk_mean_squares_reference(*args)
    torch.testing.assert_close(qk_mean_squares(*args), expected, rtol=1e-5, atol=1e-5)
    heads = (case.qkv + case.options["bias"]).view(7, 12, 40).float()
    torch.testing.assert_close(expected[:, 0], heads[:, :6].square().flatten(1).mean(1))
    torch.testing.assert_close(expected[:, 1], heads[:, [6, 8]].square().flatten(1).mean(1))
