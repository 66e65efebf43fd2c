"""One row's joint inside the GEMM after it: the bits of the separate kernels."""

import pytest
import torch

from nanovllm.kernels.gemm import decode, norm_decode
from nanovllm.kernels.gemm.choice import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm, add_norms, add_norms_reference

ON_GPU = torch.cuda.is_available()
CONFIGS = [GemmConfig("decode", 64, 16, 64, 6), GemmConfig("decode", 64, 32, 128, 4)]
SHAPES = [(200, 96, 2), (64, 1000, 1), (128, 512, 4)]
LARGE = [(1024, 1024, 2), (6144, 4096, 2), (3000, 3584, 1), (256, 2880, 2)]


@pytest.mark.parametrize(("n", "k", "parts"), LARGE if ON_GPU else SHAPES)
@pytest.mark.parametrize("gated", [False, True])
def test_it_has_the_bits_of_the_separate_kernels(n: int, k: int, parts: int, gated: bool) -> None:
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    make = torch.Generator().manual_seed(n)

    def rand(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=make).to(device, dtype)

    weight = rand(2 * n if gated else n, k) * k**-0.5
    partial = rand(parts, 1, k, dtype=torch.float32) if parts > 1 else rand(1, k)
    residual, norm = rand(1, k) * 30, Norm(rand(k), 1e-6, in_whole_numbers=True)
    normed, total = add_norms(partial, residual.clone(), norm)
    torch.testing.assert_close(normed, add_norms_reference(partial, residual.clone(), norm)[0], rtol=1e-2, atol=1e-2)
    for config in CONFIGS:
        x = norm_decode.Unnormed(partial, residual, norm, torch.full_like(residual, float("nan")))
        name = "linear_silu_mul" if gated else "linear"
        separate, inside = (getattr(module, name) for module in (decode, norm_decode))
        expected, found = separate(normed, weight, config), inside(x, weight, config)
        assert torch.equal(x.total, total)
        if ON_GPU:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_mean_square_in_whole_numbers_is_one() -> None:
    device = "cuda" if ON_GPU else "cpu"
    make, weight = torch.Generator().manual_seed(1), torch.ones(300, device=device)
    for size in (1e-3, 1.0, 1e4, 0.0):
        x = (torch.randn(3, 300, generator=make) * size).to(device)
        ours, theirs = (add_norms(x, None, Norm(weight, 1e-6, in_whole_numbers=way))[0] for way in (True, False))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
