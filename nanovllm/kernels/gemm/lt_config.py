"""An algorithm of cuBLASLt as a value: its attributes, and the short text that a table or a report is read by."""

import re
from dataclasses import dataclass
from functools import cache

NO_REDUCTION, REDUCTION_IN_WORKSPACE = 0, 2
"""Reduction schemes of split K that sum in float32 and in a fixed order."""

_STAGES = (
    "auto 16x1 16x2 16x3 16x4 16x5 16x6 32x1 32x2 32x3 32x4 32x5 32x6 64x1 64x2 64x3 64x4 64x5 64x6 128x1 128x2 128x3 "
    "128x4 128x5 128x6 32x10 8x4 16x10 8x5 - - 8x3 8xA 16xA 32xA 64xA 128xA 256xA 768xA"
).split()
_CLUSTERS = "auto - 1x1 2x1 4x1 1x2 2x2 4x2 1x4 2x4 4x4 8x1 1x8 8x2 2x8 16x1 1x16".split()

_TEXT = r"(\d+):(\S+) s(\S+) c(\S+) k(\d+)(?:/(\d+))? o(\d+)(?: i(\d+))?(?: w(\d+))?(?: r(\d+))?(?: raw(\w+))?"


@dataclass(frozen=True)
class LtConfig:
    """An algorithm of cuBLASLt by the library's own numbers (cublasLt.h), and how it is used.

    split_k: parts of K that the library itself sums up. parts: those that it leaves to the consumer, as SplitConfig.
    opaque: the algorithm as the library wrote it, in hex, where the numbers above do not say all of it.

    As text, 66:176x128 s64xA c1x2 k1 o2: the algorithm, its tile as weight rows x rows of x, stages, cluster, split_k
    with /parts behind it, the custom option; then what else is not 0. Numbers without a name stand for themselves.
    """

    algorithm: int
    tile: int
    stages: int
    cluster: int
    custom: int = 0
    inner: int = 0
    swizzle: int = 0
    split_k: int = 1
    reduction: int = NO_REDUCTION
    parts: int = 1
    opaque: str = ""

    def __str__(self) -> str:
        tile = "x".join(map(str, self.tile_size or (self.tile,)))
        stages, cluster = _name(_STAGES, self.stages), _name(_CLUSTERS, self.cluster)
        parts = f"/{self.parts}" if self.parts > 1 else ""
        words = [f"{self.algorithm}:{tile}", f"s{stages}", f"c{cluster}", f"k{self.split_k}{parts}", f"o{self.custom}"]
        words += [f"i{self.inner}"] * bool(self.inner) + [f"w{self.swizzle}"] * bool(self.swizzle)
        words += [f"r{self.reduction}"] * (self.reduction != _reduction(self.split_k))
        return " ".join(words + [f"raw{self.opaque}"] * bool(self.opaque))

    @classmethod
    def parse(cls, text: str) -> "LtConfig":
        """The configuration that str() gives as `text`."""
        found = re.fullmatch(_TEXT, text)
        if found is None:
            raise ValueError(f"{text!r}: an algorithm such as '66:176x128 s64xA c1x2 k1 o2' expected")
        algorithm, tile, stages, cluster, split_k, parts, custom, inner, swizzle, reduction, opaque = found.groups()
        numbers = {"x".join(map(str, size)): number for number, size in tile_sizes().items()}
        return cls(
            int(algorithm),
            numbers[tile] if "x" in tile else int(tile),
            _number(_STAGES, stages),
            _number(_CLUSTERS, cluster),
            int(custom),
            int(inner or 0),
            int(swizzle or 0),
            int(split_k),
            int(reduction or _reduction(int(split_k))),
            int(parts or 1),
            opaque or "",
        )

    @property
    def tile_size(self) -> tuple[int, int] | None:
        """(weight rows, rows of x), where the tile's number is known."""
        return tile_sizes().get(self.tile)


def _reduction(split_k: int) -> int:
    return REDUCTION_IN_WORKSPACE if split_k > 1 else NO_REDUCTION


def _name(names: list[str], number: int) -> str:
    return names[number] if number < len(names) and names[number] != "-" else str(number)


def _number(names: list[str], name: str) -> int:
    return names.index(name) if name in names else int(name)


@cache
def tile_sizes() -> dict[int, tuple[int, int]]:
    """cublasLtMatmulTile_t: number -> (weight rows, rows of x). The header lists them in this order."""
    first = (
        "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 "
        "64x256 128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 "
        "32x256 256x32"
    )
    sizes: dict[tuple[int, int], None] = {}
    for name in first.split():
        height, width = name.split("x")
        sizes[int(height), int(width)] = None
    eights, wide = range(8, 769, 8), range(64, 769, 64)
    sizes |= {(a, b): None for a in eights for b in wide if a * b <= 768 * 64}
    sizes |= {(a, b): None for a in wide for b in eights if a * b <= 128 * 512}
    return dict(enumerate(sizes, start=1))
