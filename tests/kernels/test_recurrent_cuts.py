"""Outputs and last states of a text are those of the whole however it is cut, in each recurrent kernel."""

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from nanovllm.kernels.recurrent.conv import causal_conv
from nanovllm.kernels.recurrent.delta import DeltaWeights, gated_delta_rule
from nanovllm.kernels.recurrent.delta_prompt import DeltaSizes
from nanovllm.kernels.recurrent.mamba import MambaSizes, MambaWeights, mamba
from nanovllm.kernels.recurrent.rows import Lines, StepRows

LENGTH = 70
Kernel = Callable[[torch.Tensor, torch.Tensor, StepRows], torch.Tensor]
"""Takes places of a text int64 [tokens], states by line, and the rows of these tokens; returns outputs [tokens, ..]."""


def random_cuts(seed: int) -> list[int]:
    rng = random.Random(seed)
    ends = sorted({LENGTH, *(rng.randrange(1, LENGTH) for _ in range(rng.randint(2, 6)))})
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


CUTS = [[LENGTH], *([at, LENGTH - at] for at in range(1, LENGTH)), *map(random_cuts, range(6)), *[[63, *[1] * 7]] * 2]
"""Lengths of the pieces of a text: it whole, cut once anywhere, a few times, and decoded from somewhere on."""


def test_every_text_is_cut_whole() -> None:
    assert {sum(pieces) for pieces in CUTS} == {LENGTH} and all(min(pieces) > 0 for pieces in CUTS)


def outputs_of(kernel: Kernel, states: torch.Tensor, cuts: list[list[int]]) -> torch.Tensor:
    """Outputs [ways to cut, LENGTH, ..]; a way's states are in the line of its number. A piece of one token behind
    others is a decode in every other way."""
    device, found = states.device, [list[torch.Tensor]() for _ in cuts]
    for number in range(max(map(len, cuts))):
        ways = [way for way, pieces in enumerate(cuts) if number < len(pieces)]
        is_decode = {way: number > 0 and cuts[way][number] == 1 and way % 2 > 0 for way in ways}
        ways.sort(key=lambda way: not is_decode[way])
        counts = [cuts[way][number] for way in ways]
        begins = [sum(cuts[way][:number]) for way in ways]
        read = ways if number else [-1] * len(ways)
        columns = (read, ways, [-1] * len(ways), [0] * len(ways))
        lines = Lines(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))
        ends = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        rows = StepRows(ends, sum(is_decode.values()), sum(counts), lines, False)
        places = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(begins, counts, strict=True)])
        for way, out in zip(ways, kernel(places.to(device), states, rows).split(counts), strict=True):
            found[way].append(out)
    return torch.stack([torch.cat(pieces) for pieces in found])


def check(
    kernel: Kernel, shape: tuple[int, ...], device: torch.device, tolerance: float, cuts: list[list[int]] = CUTS
) -> None:
    """shape: of the state in one line."""
    states = torch.randn(len(cuts) + 1, *shape, device=device)
    for each in (outputs_of(kernel, states, cuts), states[: len(cuts)]):
        torch.testing.assert_close(each, each[:1].expand_as(each), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gated", [False, True])
def test_the_convolution(gated: bool, device: torch.device) -> None:
    x, weight = torch.randn(LENGTH, 3 * 40, device=device), torch.randn(40, 4, device=device)

    def kernel(places: torch.Tensor, states: torch.Tensor, rows: StepRows) -> torch.Tensor:
        return causal_conv(x[places] if gated else x[places, :40], weight, states, rows, gated=gated)

    check(kernel, (3, 40), device, 0.0, CUTS[::4])


def test_the_delta_rule(device: torch.device) -> None:
    sizes, heads = DeltaSizes(1, 1, 16, 32), 1
    x, z, of_heads = (torch.randn(LENGTH, n, device=device) for n in (sizes.channels, heads * 32, 2 * heads))
    x[:, :32] = torch.nn.functional.normalize(x[:, :32].unflatten(1, (2, 16)), dim=-1).flatten(1)
    weights = DeltaWeights(*torch.randn(2, heads, device=device), torch.randn(32, device=device), 1e-6, 1.0)

    def kernel(places: torch.Tensor, states: torch.Tensor, rows: StepRows) -> torch.Tensor:
        a, b = of_heads[places].split(heads, 1)
        return gated_delta_rule(x[places], a, b, z[places], weights, sizes, states, rows)

    check(kernel, (heads, 16, 32), device, 2e-5)


def test_mamba(device: torch.device) -> None:
    sizes = MambaSizes(2, 1, 16, 32)
    x, dt = (torch.randn(LENGTH, n, device=device) for n in (sizes.channels, sizes.heads))
    of_heads = torch.randn(3, sizes.heads, device=device)
    weights = MambaWeights(of_heads[0], of_heads[1] - 3, of_heads[2], 0.02)

    def kernel(places: torch.Tensor, states: torch.Tensor, rows: StepRows) -> torch.Tensor:
        return mamba(x[places], dt[places], weights, sizes, states, rows)

    check(kernel, (sizes.heads, sizes.state, sizes.dim), device, 1e-4)
