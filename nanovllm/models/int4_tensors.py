"""A checkpoint's 4-bit matrices in the one form that layers/int4.py takes, whichever way they are packed.

A module's matrix [out, in] becomes "weight", words int16 [out, blocks of 128 columns, 32]; "weight_scale" and
"weight_zero_point" [out, groups]. Numbers of 4 bits lie eight in an int32, the first in its lowest bits:

layout              of numbers                          of zeros
compressed-tensors  weight_packed [out, in / 8]         weight_zero_point [out / 8, groups]
awq                 qweight [in, out / 8], interleaved  qzeros [groups, out / 8], interleaved
gptq, gptq_v2       qweight [in / 8, out]               qzeros [groups, out / 8]; in gptq less 1

Scales are weight_scale [out, groups], else scales [groups, out]. Each tensor is translated by itself, and packed anew
in the range that is asked for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from nanovllm.kernels.gemm.packed import SPAN, ZERO, pack, quantize, unpack
from nanovllm.layers.int4 import SCALES, ZEROS
from nanovllm.layers.weights import CheckpointWeight, DerivedTensor, TensorSource, all_of
from nanovllm.model_config import Quantization

_INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places at which AWQ puts each of eight numbers in an int32."""
_WIDE = ("gate.weight", "in_proj_a.weight", "in_proj_b.weight", "lm_head.weight")
"""Ends of the names of matrices that models have in a wide type whatever a checkpoint has: routers, gates, heads."""
WORDS = SPAN // 4
AT_ONCE = 4 << 20
"""Numbers that are unpacked at a time."""


def _nibbles(packed: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """int32 [..., n] -> its numbers uint8 [..., 8 n]."""
    shifts = torch.tensor(_INTERLEAVED if interleaved else range(8), device=packed.device, dtype=torch.int32) * 4
    return (packed.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(-2)


def _range(source: TensorSource, dim: int, start: int, end: int) -> torch.Tensor:
    return source.narrow(dim, start, end - start)


def _packed_words(packed: TensorSource, layout: str, device: torch.device) -> DerivedTensor:
    """A packed matrix as words, made on `device` from what is narrowed to."""
    first, second = packed.shape
    sizes = {"compressed-tensors": (first, 8 * second), "awq": (8 * second, first)}
    rows, columns = sizes.get(layout, (second, 8 * first))  # rounded up to eight where it is packed
    blocks = -(-columns // SPAN)

    def narrow(dim: int, start: int, length: int) -> torch.Tensor:
        first, end = (start, start + length) if dim == 0 else (0, rows)
        begin, stop = (start, start + length) if dim == 1 else (0, blocks)
        out = torch.empty(end - first, stop - begin, WORDS, dtype=torch.int16, device=device)
        step = max(8, AT_ONCE // max(1, (stop - begin) * SPAN) // 8 * 8)
        for at in range(first, end, step):
            codes = _codes(packed, layout, device, at, min(end, at + step), begin * SPAN, min(stop * SPAN, columns))
            out[at - first : at - first + len(codes)] = pack(codes).transpose(0, 1)
        return out

    return DerivedTensor(torch.Size((rows, blocks, WORDS)), torch.int16, narrow)


def _codes(
    packed: TensorSource, layout: str, device: torch.device, first: int, end: int, begin: int, stop: int
) -> torch.Tensor:
    """Rows [first, end), columns [begin, stop) of a packed matrix: uint8."""
    rows, columns = slice(first // 8, -(-end // 8)), slice(begin // 8, -(-stop // 8))
    if layout == "compressed-tensors":
        return _nibbles(_range(packed, 0, first, end)[:, columns].to(device))[:, : stop - begin]
    if layout == "awq":
        part = _nibbles(_range(packed, 0, begin, stop)[:, rows].to(device), interleaved=True)
        return part.T[first % 8 : first % 8 + end - first]
    part = _range(packed, 0, columns.start, columns.stop)[:, first:end].to(device)
    return _nibbles(part.T.contiguous())[:, : stop - begin]


def _quantized(
    wide: TensorSource, group: int, kind: torch.dtype, device: torch.device
) -> tuple[DerivedTensor, DerivedTensor]:
    """A matrix in a wide type as words of numbers in -8..7, rounded to a group's scale, and these scales, of type
    `kind`."""
    rows, columns = wide.shape

    def parts(first: int, end: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Codes and scales of rows [first, end), a part at a time."""
        step = max(1, AT_ONCE // columns)
        for at in range(first, end, step):
            yield quantize(_range(wide, 0, at, min(end, at + step)).to(device), group, kind)

    def narrow(dim: int, start: int, length: int) -> torch.Tensor:
        first, end = (start, start + length) if dim == 0 else (0, rows)
        out = torch.cat([pack(codes).transpose(0, 1) for codes, _ in parts(first, end)])
        return out if dim == 0 else out.narrow(dim, start, length)

    words = DerivedTensor(torch.Size((rows, -(-columns // SPAN), WORDS)), torch.int16, narrow)
    groups = torch.Size((rows, -(-columns // group) if group else 1))
    return words, _lazy(groups, kind, lambda: torch.cat([scales for _, scales in parts(0, rows)]))


def _lazy(shape: torch.Size, dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> DerivedTensor:
    """A small tensor that is computed as a whole when it is asked for."""
    return DerivedTensor(shape, dtype, lambda dim, start, length: make().narrow(dim, start, length))


class Int4Reader:
    """Translation of a checkpoint's tensors for a model that holds some matrices in 4 bits."""

    def __init__(
        self, weights: Iterable[CheckpointWeight], quantization: Quantization, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: of the scales in the model."""
        self.quantization, self.dtype, self.device = quantization, dtype, device
        self._is_blind = device.type == "meta"
        """Whether tensors are headers alone, whose values nobody knows."""
        held = [weight for weight in weights if weight.shards and weight.packing is None]
        self._rows = {one.name: one.shape[0] for one in held if one.shards[0].target.dtype == torch.int16}
        self._wide = {one.name: one.shape for one in held if one.name.endswith(_WIDE) and len(one.shape) == 2}
        self._has_bias = {name for weight in weights if (name := weight.name).endswith(".bias")}

    def read(self, tensors: Iterable[tuple[str, TensorSource]], wide: bool = True) -> list[tuple[str, TensorSource]]:
        """A checkpoint's (name, tensor) pairs by the names of `weights`. wide: matrices in a wide type are quantised;
        else they raise ValueError."""
        wide, pairs = wide or self.quantization.while_loading, [*tensors]
        packed = {f"{name.rpartition('.')[0]}.weight" for name, one in pairs if one.dtype == torch.int32}
        widened = {name: self._wide[name] for name in packed & self._wide.keys() - {name for name, _ in pairs}}
        rows = {**self._rows, **{name: shape[0] for name, shape in widened.items()}}
        parts: dict[str, dict[str, TensorSource]] = {name: {} for name in widened}
        found = []
        for name, tensor in pairs:
            for own, one in self._translated(name, tensor, wide, rows):
                path, _, kind = own.rpartition(".")
                if kind in ("weight", SCALES, ZEROS) and (of_one := parts.get(f"{path}.weight")) is not None:
                    of_one[kind] = one
                else:
                    found.append((own, one))
        return found + [(name, self._widened(name, shape, parts[name])) for name, shape in widened.items()]

    def _widened(self, name: str, shape: Sequence[int], parts: dict[str, TensorSource]) -> DerivedTensor:
        """A packed matrix of _WIDE in float32. parts: its words ("weight"), scales and zeros."""
        rows, columns = shape
        words, scales, zeros = (parts.get(kind) for kind in ("weight", SCALES, ZEROS))
        each = min(self.quantization.group, SPAN) or columns
        blocks, groups = (rows, -(-columns // SPAN), WORDS), (rows, -(-columns // each))
        of_groups = [scales] if zeros is None else [scales, zeros]
        wanted = [blocks, *(groups for _ in of_groups)]
        if words is None or [None if one is None else tuple(one.shape) for one in (words, *of_groups)] != wanted:
            raise ValueError(f"weight {name!r} comes packed: must be {rows} x {columns}, with scales {groups}")

        def narrow(dim: int, start: int, length: int) -> torch.Tensor:
            first, end = (start, start + length) if dim == 0 else (0, rows)
            held = [_range(one, 0, first, end).to(self.device).float() for one in of_groups if one is not None]
            step, pieces = max(1, AT_ONCE // columns), []
            for at in range(first, end, step):
                here = slice(at - first, at - first + step)
                factors, *offsets = (one[here].repeat_interleave(each, 1)[:, :columns] for one in held)
                codes = unpack(_range(words, 0, at, min(end, at + step)).transpose(0, 1), columns)
                pieces.append((codes - (offsets[0] if offsets else float(ZERO))) * factors)
            out = torch.cat(pieces)
            return out if dim == 0 else out.narrow(dim, start, length)

        return DerivedTensor(torch.Size(shape), torch.float32, narrow)

    def _translated(
        self, name: str, tensor: TensorSource, wide: bool, rows: dict[str, int]
    ) -> Iterator[tuple[str, TensorSource]]:
        """rows: of each matrix that may be packed."""
        path, _, kind = name.rpartition(".")
        weight = f"{path}.weight"
        if weight not in rows:
            yield name, tensor
        elif kind == "weight":
            yield from self._quantized(path, tensor, wide)
        elif kind == "g_idx" or kind == "weight_g_idx":
            self._check_order(name, tensor)
        elif kind in ("qweight", "weight_packed"):
            if tensor.dtype != torch.int32 or len(tensor.shape) != 2:
                found = f"has type {tensor.dtype} and shape {tuple(tensor.shape)}"
                raise ValueError(f"weight {name!r} {found}: must be a matrix of {torch.int32}")
            yield weight, _packed_words(tensor, self.quantization.layout, self.device)
        elif kind in ("scales", SCALES):
            size, of_rows = tuple(tensor.shape), lambda: all_of(tensor)
            if kind == "scales":
                size, of_rows = size[::-1], lambda: all_of(tensor).T
            yield f"{path}.{SCALES}", self._of_groups(size, tensor.dtype, of_rows)
        elif kind in ("qzeros", ZEROS):
            size = (rows[weight], tensor.shape[1 if kind == ZEROS else 0])
            yield f"{path}.{ZEROS}", self._of_groups(size, torch.float32, lambda: self._zeros(name, tensor, size[0]))
        elif kind == "bias" and name not in self._has_bias and (self._is_blind or not all_of(tensor).any()):
            return  # some tools write zeros where a layer has none
        elif kind != "weight_shape":
            yield name, tensor

    def _check_order(self, name: str, tensor: TensorSource) -> None:
        """Columns must be in the order of their groups."""
        if self._is_blind:
            return
        index = all_of(tensor).long()
        group = self.quantization.group or len(index)
        wanted = torch.arange(len(index), device=index.device) // group
        if not torch.equal(index, wanted):
            at = int((index != wanted).nonzero()[0])
            found = f"puts column {at} into group {index[at].item()}"
            raise ValueError(f"weight {name!r} {found}: must be {wanted[at].item()} (desc_act is not served)")

    def _quantized(self, path: str, tensor: TensorSource, wide: bool) -> Iterator[tuple[str, TensorSource]]:
        if not wide or not tensor.dtype.is_floating_point or len(tensor.shape) != 2:
            found = f"has type {tensor.dtype} and shape {tuple(tensor.shape)}, and quantization_config says 4 bits"
            raise ValueError(f"weight '{path}.weight' {found}: must be packed")
        group = min(self.quantization.group, SPAN)
        words, scales = _quantized(tensor, group, self.dtype, self.device)
        yield f"{path}.weight", words
        yield f"{path}.{SCALES}", scales
        if self.quantization.has_zeros:
            yield f"{path}.{ZEROS}", _lazy(scales.shape, torch.float32, lambda: torch.full(scales.shape, float(ZERO)))

    def _of_groups(self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> TensorSource:
        """The tensor that `make` gives, with a column for each group that layers hold: at most 128 columns of the
        matrix."""
        times = max(1, self.quantization.group // SPAN)
        held = torch.Size((shape[0], shape[1] * times)) if len(shape) == 2 else torch.Size(shape)
        return _lazy(held, dtype, lambda: make().repeat_interleave(times, dim=-1))

    def _zeros(self, name: str, tensor: TensorSource, rows: int) -> torch.Tensor:
        """float32 [rows, groups]."""
        values, layout = all_of(tensor).to(self.device), self.quantization.layout
        if values.dtype == torch.int8:  # of old compressed-tensors: not packed
            return values.float() + ZERO
        by_rows = values if layout != "compressed-tensors" else values.T.contiguous()
        zeros = _nibbles(by_rows, interleaved=layout == "awq").T.int()
        if not 0 <= zeros.shape[0] - rows < 8:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}: must have zeros of {rows} outputs")
        zeros = zeros[:rows]
        is_less_one = layout == "gptq" and not (zeros == ZERO).all()  # some tools write symmetric ones as gptq_v2 does
        return (zeros + 1 & 15 if is_less_one else zeros).float()
