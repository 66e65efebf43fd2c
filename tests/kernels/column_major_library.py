"""A stand-in for libcublasLt that multiplies column by column, as the real one does, and what the tests of it share."""

import ctypes
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.kernels.gemm import cublas_lt as lt
from nanovllm.kernels.gemm.cublas_lt import CublasLtError
from nanovllm.kernels.gemm.lt_config import LtConfig

CONFIG = LtConfig(66, 15, 35, 3)
ROWS, N, K = 24, 40, 64
REFUSED_TILE = 99
_TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}


class ColumnMajorLibrary:
    """Multiplies what the descriptors say, columns first. An algorithm's attributes are its 32-bit words; the last word
    is one that no attribute shows."""

    def __init__(self) -> None:
        self.proposed: list[list[int]] = [[66, 15, 1, 0, 0, 0, 35, 0, 3], [66, 20, 1, 0, 0, 0, 35, 0, 2]]
        self.hidden, self.workspace = 0, 128
        self.ran: list[list[int]] = []
        self.destroyed: list[Any] = []

    def create(self, name: str, *arguments: Any) -> Any:
        return SimpleNamespace(arguments=arguments, attributes={})

    def set(self, name: str, target: Any, attribute: int, value: Any) -> None:
        if name == "MatmulAlgoConfig":
            words(target._obj)[attribute] = value.value
        else:
            target.attributes[attribute] = value.value

    def call(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def MatmulPreferenceDestroy(self, preference: Any) -> None:
        assert preference.attributes[1] == lt.MAX_WORKSPACE

    def MatmulDescDestroy(self, made: Any) -> None:
        self.destroyed.append(made)

    MatrixLayoutDestroy = MatmulDescDestroy

    def MatmulAlgoInit(self, handle: Any, *arguments: Any) -> None:
        words(arguments[-1]._obj)[0] = arguments[-2]

    def MatmulAlgoConfigGetAttribute(self, algo: Any, attribute: int, value: Any, size: int, written: Any) -> None:
        assert size == ctypes.sizeof(value._obj)
        value._obj.value = words(algo._obj)[attribute]

    def MatmulAlgoCapGetAttribute(self, algo: Any, attribute: int, buffer: Any, size: int, written: Any) -> None:
        buffer[0], written._obj.value = 13, 4

    def MatmulAlgoCheck(self, *arguments: Any) -> None:
        if words(arguments[-2]._obj)[1] == REFUSED_TILE:
            raise CublasLtError("cublasLtMatmulAlgoCheck: CUBLAS_STATUS_NOT_SUPPORTED")
        arguments[-1]._obj.workspace = self.workspace

    def MatmulAlgoGetHeuristic(self, *arguments: Any) -> None:
        results, written = arguments[-2]._obj, arguments[-1]._obj
        for result, attributes in zip(results, self.proposed, strict=False):
            words(result.algo)[: len(attributes)] = attributes
            words(result.algo)[15] = self.hidden
        written.value = min(len(self.proposed), len(results))

    def Matmul(self, *arguments: Any) -> None:
        operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo, scratch, size = arguments[
            1:-1
        ]
        assert (alpha._obj.value, beta._obj.value, c, c_layout, size) == (1, 0, d, d_layout, self.workspace)
        assert bool(scratch) == bool(size)
        assert operation.arguments == (68, 0) and operation.attributes == {3: 1}
        out = matrices(d, d_layout)
        out.copy_(matrices(a, a_layout).float().transpose(1, 2) @ matrices(b, b_layout).float())
        self.ran.append(list(words(algo._obj)))


def words(algo: lt.Algo) -> Any:
    return (ctypes.c_uint32 * 16).from_buffer(algo)


def matrices(pointer: int, layout: Any) -> torch.Tensor:
    """[batch, rows, columns] at an address, columns first."""
    kind, rows, columns, stride = layout.arguments
    batch, offset = layout.attributes.get(5, 1), layout.attributes.get(6, 0)
    dtype = _TYPES[kind]
    size = offset * (batch - 1) + stride * (columns - 1) + rows
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided((batch, rows, columns), (offset, 1, stride))


def inputs(dtype: torch.dtype, device: str = "cpu", shape: tuple[int, int, int] = (ROWS, N, K)) -> Any:
    rows, n, k = shape
    x, weight = torch.randn(rows, k, dtype=torch.float64), torch.randn(n, k, dtype=torch.float64) / k**0.5
    return x.to(device, dtype), weight.to(device, dtype)
