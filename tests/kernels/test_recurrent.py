"""Recurrent kernels against their twins: rows of every length around a piece, mixed steps, lines of all kinds."""

import pytest
import torch

from nanovllm.kernels.recurrent.conv import causal_conv, causal_conv_reference
from nanovllm.kernels.recurrent.delta import DeltaWeights, gated_delta_rule, gated_delta_rule_reference
from nanovllm.kernels.recurrent.delta_prompt import DeltaSizes
from nanovllm.kernels.recurrent.gated_norm import (
    gated_mean_squares,
    gated_mean_squares_reference,
    gated_norm,
    gated_norm_reference,
)
from nanovllm.kernels.recurrent.mamba import MambaSizes, MambaWeights, mamba, mamba_reference
from nanovllm.kernels.recurrent.rows import Lines, StepRows

NUM_LINES = 12


def step_rows(
    num_decodes: int, chunks: list[int], device: torch.device, keep_at: dict[int, int] | None = None
) -> StepRows:
    """Decode rows, the last of them padding where there are several, then chunks of so many tokens. Some rows begin
    with zeros, some move to another line; of eight some go on from the row before. keep_at: by row, where its state is
    kept."""
    counts, keep_at = [1] * num_decodes + chunks, keep_at or {}
    write = [(5 * row + 2) % 8 for row in range(len(counts))]
    read = [(line, -1, 8 + row % 2)[row % 3] for row, line in enumerate(write)]
    if num_decodes == 8:
        read[:5] = 8, write[0], write[1], -1, write[3]
    if num_decodes > 1:
        write[num_decodes - 1] = NUM_LINES
    keep = [10 + row % 2 if row in keep_at else -1 for row in range(len(counts))]
    columns = (read, write, keep, [keep_at.get(row, 0) for row in range(len(counts))])
    lines = Lines(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return StepRows(ends.to(device), num_decodes, sum(counts), lines, num_decodes == 8)


STEPS = [
    (3, [], {}),
    (8, [], {}),
    (0, [1, 128], {1: 128}),
    (0, [64], {0: 64}),
    (2, [63, 65, 2], {2: 16, 3: 64}),
    (0, [129, 0, 5, 191], {0: 112, 3: 128}),
    (1, [17, 40], {1: 1, 2: 39}),
]


@pytest.mark.parametrize(("num_decodes", "chunks", "keep_at"), STEPS)
@pytest.mark.parametrize("unit", [(64, 32), (96, 48)])
def test_convolution_equals_its_twin(
    num_decodes: int, chunks: list[int], keep_at: dict[int, int], unit: tuple[int, int], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    rows = step_rows(num_decodes, chunks, device, keep_at)
    tokens, channels, width = rows.num_tokens, unit[0] + 70, 4
    x = torch.randn(tokens, channels + 9, dtype=dtype, device=device)[:, :channels]
    weight, bias = (torch.randn(*shape, dtype=dtype, device=device) for shape in ((channels, width), (channels,)))
    last = torch.randn(NUM_LINES + 1, width - 1, channels, dtype=dtype, device=device)
    mine, twins = last.clone(), last.clone()
    out = causal_conv(x, weight, mine, rows, bias, unit)
    wanted = causal_conv_reference(x, weight, twins, rows, bias, unit)
    tolerance = 3e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(mine[:NUM_LINES], twins[:NUM_LINES])


@pytest.mark.parametrize(("num_decodes", "chunks", "keep_at"), STEPS)
def test_convolution_between_gates_equals_its_twin(
    num_decodes: int, chunks: list[int], keep_at: dict[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    rows = step_rows(num_decodes, chunks, device, keep_at)
    channels, width = 70, 3
    x = torch.randn(rows.num_tokens, 3 * channels + 9, dtype=dtype, device=device)[:, : 3 * channels]
    weight = torch.randn(channels, width, dtype=dtype, device=device)
    last = torch.randn(NUM_LINES + 1, width - 1, channels, dtype=dtype, device=device)
    mine, twins = last.clone(), last.clone()
    out = causal_conv(x, weight, mine, rows, gated=True)
    wanted = causal_conv_reference(x, weight, twins, rows, gated=True)
    tolerance = 3e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(mine[:NUM_LINES], twins[:NUM_LINES])


@pytest.mark.parametrize(("num_decodes", "chunks", "keep_at"), STEPS)
@pytest.mark.parametrize(("sizes", "most"), [(DeltaSizes(1, 2, 16, 32), 1.0), (DeltaSizes(2, 2, 48, 80), 2.0)])
def test_delta_rule_equals_its_twin(
    num_decodes: int, chunks: list[int], keep_at: dict[int, int], sizes: DeltaSizes, most: float, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    rows = step_rows(num_decodes, chunks, device, keep_at)
    tokens, heads, width = rows.num_tokens, sizes.value_heads, sizes.value_heads * sizes.value_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    x = random(tokens, sizes.channels)
    vectors = x[:, : sizes.unit[0]].unflatten(1, (-1, sizes.key_dim))
    x[:, : sizes.unit[0]] = torch.nn.functional.normalize(vectors, dim=-1).flatten(1)
    a, b, z = (*random(tokens, 2 * heads).split(heads, 1), random(tokens, width))
    weights = DeltaWeights(random(heads), random(heads), random(sizes.value_dim).to(dtype), 1e-6, most)
    states = random(NUM_LINES + 1, heads, sizes.key_dim, sizes.value_dim)
    mine, twins = states.clone(), states.clone()
    args = [each.to(dtype) for each in (x, a, b, z)]
    out = gated_delta_rule(*args, weights, sizes, mine, rows)
    wanted = gated_delta_rule_reference(*args, weights, sizes, twins, rows)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine[:NUM_LINES], twins[:NUM_LINES], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_decodes", "chunks", "keep_at"), STEPS)
@pytest.mark.parametrize("sizes", [MambaSizes(4, 1, 16, 32), MambaSizes(2, 2, 48, 16)])
def test_mamba_equals_its_twin(
    num_decodes: int, chunks: list[int], keep_at: dict[int, int], sizes: MambaSizes, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    rows, heads = step_rows(num_decodes, chunks, device, keep_at), sizes.heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    x, dt = (random(rows.num_tokens, size).to(dtype) for size in (sizes.channels, heads + 5))
    bias = random(heads) - 3  # steps as models have them: what is summed up in a piece is no large number
    weights = MambaWeights(random(heads), bias, random(heads), 0.02)
    states = random(NUM_LINES + 1, heads, sizes.state, sizes.dim)
    mine, twins = states.clone(), states.clone()
    out = mamba(x, dt[:, :heads], weights, sizes, mine, rows)
    wanted = mamba_reference(x, dt[:, :heads], weights, sizes, twins, rows)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine[:NUM_LINES], twins[:NUM_LINES], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_gated_norm_equals_its_twin_and_that_of_its_shares(
    groups: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Of two ranks for each group."""
    x, wide, weight = (torch.randn(*shape, dtype=dtype, device=device) for shape in ((5, 96), (5, 100), (96,)))
    z, each = wide[:, :96], 96 // groups // 2
    wanted = gated_norm_reference(x, z, weight, 1e-6, groups)
    parts = [(x[:, at : at + each].contiguous(), z[:, at : at + each], at // each // 2) for at in range(0, 96, each)]
    squares = [gated_mean_squares(a, b, 1 / (2 * each), group, groups) for a, b, group in parts]
    for found, (a, b, group) in zip(squares, parts, strict=True):
        torch.testing.assert_close(found, gated_mean_squares_reference(a, b, 1 / (2 * each), group, groups))
    total, weights = torch.stack(squares).sum(0), weight.split(each)
    shares = [(a, b, one, 1e-6, 1, total, group) for (a, b, group), one in zip(parts, weights, strict=True)]
    tolerance = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    for norm in (gated_norm_reference, gated_norm):
        torch.testing.assert_close(torch.cat([norm(*share) for share in shares], 1), wanted, **tolerance)
    torch.testing.assert_close(gated_norm(x, z, weight, 1e-6, groups), wanted, **tolerance)


def test_keys_that_are_all_equal_and_nothing_forgotten(device: torch.device) -> None:
    """The hardest triangle: powers of it grow beyond float32 before they vanish."""
    rows, sizes = step_rows(0, [150], device), DeltaSizes(1, 1, 16, 16)
    heads = torch.full((150, 1), 30.0, device=device)
    x = torch.randn(150, sizes.channels, device=device)
    x[:, 16:32] = torch.nn.functional.normalize(torch.ones(16, device=device), dim=0)
    a, b, z = -heads, heads, torch.randn(150, 16, device=device)
    weights = DeltaWeights(*torch.zeros(2, 1, device=device), torch.ones(16, device=device), 1e-6)
    mine, twins = torch.zeros(2, NUM_LINES + 1, 1, 16, 16, device=device)
    out = gated_delta_rule(x, a, b, z, weights, sizes, mine, rows)
    wanted = gated_delta_rule_reference(x, a, b, z, weights, sizes, twins, rows)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
