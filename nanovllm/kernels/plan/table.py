"""Tables of what was measured: JSON files for some devices, `tuned/*.json` or the one that EngineConfig.kernel_choices
names. A table gives for each GEMM of a model ranges of rows, each with the kernel that made whole steps shortest
(scripts/tune_steps.py writes one). Whole steps, because our kernels fetch weights while the kernel before them ends:
the best GEMM by itself is not the best one among attention, norms and all-reduces. No torch.
"""

import json
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from nanovllm.kernels.plan.config import KERNELS, KINDS, LIBRARY, Gemm, GemmConfig, Ranges
from nanovllm.kernels.plan.fits import why_not

_SHIPPED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class GemmTable:
    """Measured choices of kernels, for some devices."""

    devices: tuple[str, ...]
    """Beginnings of their names, as torch.cuda.get_device_name gives them."""
    entries: Mapping[Gemm, Ranges]
    near: tuple[str, ...] = ()
    """Devices alike, which take it for what their own tables lack; nothing was measured on them."""
    base: "GemmTable | None" = None
    """Table of a device alike, for GEMMs that this one has no entry of."""

    def describe(self, gemms: Collection[Gemm]) -> str:
        """Says how many of these were measured here or on a device alike: "3 of 5 tuned, 2 on NVIDIA H200"."""
        own = sum(bool(self._own(gemm)) for gemm in gemms)
        lent = sum(bool(self.measured(gemm)) for gemm in gemms) - own
        return f"{own} of {len(gemms)} tuned" + (f", {lent} on {self.base.devices[0]}" if lent and self.base else "")

    def measured(self, gemm: Gemm) -> Ranges:
        """The entry of this very GEMM, for float16 that of bfloat16; empty where there is none."""
        return self._own(gemm) or (self.base.measured(gemm) if self.base else ())

    def _own(self, gemm: Gemm) -> Ranges:
        return self.entries.get(_key(gemm), ())

    def nearest(self, gemm: Gemm) -> Ranges:
        """The entry, here or of a device alike, of the GEMM of this kind whose shape is nearest, by the logarithms of
        its sizes; empty where none of this kind was measured. Parts of K are no more than there are steps, and where a
        kernel holds more of x than when it was measured the compiler chooses the number of registers."""
        entries = {**(self.base.entries if self.base else {}), **self.entries}
        known = [one for one in entries if one._replace(n=0, k=0) == _key(gemm)._replace(n=0, k=0)]
        if not known:
            return ()
        found = min(known, key=lambda one: abs(log(one.n / gemm.n)) + abs(log(one.k / gemm.k)))

        def fitted(config: GemmConfig) -> GemmConfig:
            parts, most = min(config.split_k, -(-gemm.k // (config.block_k or 1))), config.max_registers
            return replace(config, split_k=parts, max_registers=most if gemm.k <= found.k else 0)

        return tuple((most, fitted(config)) for most, config in entries[found])

    def serving(self, gemm: Gemm) -> tuple[Ranges, str]:
        """Ranges that serve this GEMM, and their source: those that were measured, or those of the nearest shape, which
        is one of `everywhere` if this table has none of the kind."""
        if ranges := self.measured(gemm):
            return ranges, "measured"
        return self.nearest(gemm) or everywhere().nearest(gemm), "nearest"


def _key(gemm: Gemm) -> Gemm:
    return gemm._replace(dtype="bfloat16") if gemm.dtype == "float16" else gemm


def at(ranges: Ranges, rows: int) -> GemmConfig:
    """Kernel for so many rows; past the last range the library."""
    return next((config for most, config in ranges if rows <= most), LIBRARY)


@cache
def everywhere() -> GemmTable:
    """The table of shapes that stand for all others, on any device."""
    return load(_SHIPPED / "default.json")


EMPTY = GemmTable((), {})


@cache
def shipped_table(device_name: str) -> GemmTable:
    """The table of the package for this device over that of one alike; an empty one where there is neither."""
    tables = [load(path) for path in sorted(_SHIPPED.glob("*.json"))]
    own = next((table for table in tables if device_name.startswith(table.devices)), GemmTable((device_name,), {}))
    return replace(own, base=next((table for table in tables if device_name.startswith(table.near)), None))


def load(path: str | os.PathLike[str]) -> GemmTable:
    """The table of a file that `save` wrote. Raises ValueError with the path where the file is missing or spoilt."""
    try:
        return _parse(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ValueError(f"kernel_choices={str(path)!r}: no table of GEMM choices ({reason})") from error


def save(path: str | os.PathLike[str], table: GemmTable) -> None:
    """Writes the file whole or not at all, so that a process that reads it meanwhile gets the old one or the new."""
    gemms = []
    for gemm, ranges in sorted(table.entries.items()):
        lines = ",\n   ".join(json.dumps([most, _plain(config)]) for most, config in ranges)
        gemms.append(json.dumps(gemm._asdict())[:-1] + f', "rows": [\n   {lines}\n  ]}}')
    names = f'"devices": {json.dumps(table.devices)},\n "near": {json.dumps(table.near)}'
    text = f'{{\n {names},\n "gemms": [\n  ' + ",\n  ".join(gemms) + "\n ]\n}\n"
    target = Path(path)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, target)


def _plain(config: GemmConfig) -> dict[str, Any]:
    """The fields that differ from their defaults, and the kernel."""
    return {
        name: value for name, value in asdict(config).items() if name == "kernel" or value != getattr(LIBRARY, name)
    }


def _parse(raw: dict[str, Any]) -> GemmTable:
    entries: dict[Gemm, Ranges] = {}
    for item in raw["gemms"]:
        gemm = Gemm(*(item[name] for name in Gemm._fields))
        if gemm.kind not in KINDS or not all(type(size) is int and size > 0 for size in (gemm.n, gemm.k)):
            raise ValueError(f"{gemm}: a kind of {KINDS} and positive sizes expected")
        entries[gemm] = tuple((most, _checked(gemm, most, GemmConfig(**config))) for most, config in item["rows"])
        ends = [most for most, _ in entries[gemm]]
        if not ends or any(type(end) is not int for end in ends) or ends != sorted(set(ends)) or ends[0] < 1:
            raise ValueError(f"{gemm}: rows {ends} do not ascend")
    devices, near = (tuple(str(device) for device in names) for names in (raw["devices"], raw.get("near", [])))
    return GemmTable(devices, entries, near)


def _checked(gemm: Gemm, most: int, config: GemmConfig) -> GemmConfig:
    """`config`; ValueError where it cannot multiply `most` rows by this weight."""
    if config.kernel not in KERNELS or config.round_sums:
        raise ValueError(f"{gemm}: {config}: must have one of the kernels {list(KERNELS)}, and no round_sums")
    numbers = [getattr(config, field.name) for field in fields(config) if field.name not in ("kernel", "round_sums")]
    sizes = [config.block_n, config.block_k, config.stages] if config.is_our_kernel else []
    sizes += [config.block_m] if sizes and not config.is_skinny else []
    sizes += [config.split_k, config.num_warps]
    if any(type(number) is not int or number < 0 for number in numbers) or not all(sizes):
        raise ValueError(f"{gemm}: {config} has sizes that are no positive integers")
    if reason := why_not(gemm, config, most):
        raise ValueError(f"{gemm}: {config.kernel!r}: {reason}")
    return config


def ranges_of(by_rows: Iterable[tuple[int, GemmConfig]]) -> Ranges:
    """(rows, config), ascending, as the fewest ranges: equal neighbours become one."""
    ranges: list[tuple[int, GemmConfig]] = []
    for rows, config in by_rows:
        if ranges and ranges[-1][1] == config:
            ranges.pop()
        ranges.append((rows, config))
    return tuple(ranges)
