"""Products by an algorithm of cuBLASLt that we name, in place of the one that cuBLAS guesses.

The library is the one that torch has loaded, called by ctypes: nothing is compiled. An algorithm is written down as
the attributes from which the library builds it again and checks it (`LtConfig`), so that a choice can be kept in a file
and sent to other ranks. Split K is asked for only where its sums are in float32 and in a fixed order.

cuBLAS counts columns first. So a row-major product out [M, N] = x [M, K] @ W [N, K]^T is, to it, out^T [N, M] = W x^T
with A = W transposed, B = x: its rows are our N, its columns our M, and a tile of 128x64 has 128 weight rows.
"""

import contextlib
import ctypes
import importlib.util
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.gemm.lt_config import NO_REDUCTION, REDUCTION_IN_WORKSPACE, LtConfig

MAX_WORKSPACE = 32 << 20  # bytes
ALIGNMENT = 16  # bytes, of every pointer and row: what the hardware's tile copies ask for

_KEPT = 1024  # problems and algorithms that stay prepared: prompts have ever new numbers of rows
_SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_COMPUTE_32F = 68
_TRANSPOSE_A, _BATCH_COUNT, _BATCH_OFFSET = 3, 5, 6  # attributes of descriptor, layout, layout
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # attributes of a preference
_CAP_TILES = 6
# Field of LtConfig -> attribute of an algorithm's configuration, and its type.
_ATTRIBUTES: dict[str, tuple[int, Any]] = {
    "algorithm": (0, ctypes.c_int32),  # set by cublasLtMatmulAlgoInit
    "tile": (1, ctypes.c_uint32),
    "split_k": (2, ctypes.c_int32),
    "reduction": (3, ctypes.c_uint32),
    "swizzle": (4, ctypes.c_uint32),
    "custom": (5, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32),
    "inner": (7, ctypes.c_uint16),
    "cluster": (8, ctypes.c_uint16),
}


class CublasLtError(RuntimeError):
    """A call of the library failed, or there is no library."""


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


_VOID, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SET, _GET = [_VOID, _INT, _VOID, _SIZE], [_VOID, _INT, _VOID, _SIZE, _VOID]
_SIGNATURES = {
    "Create": [_VOID],
    "MatmulDescCreate": [_VOID, _INT, _INT],
    "MatmulDescSetAttribute": _SET,
    "MatmulDescDestroy": [_VOID],
    "MatrixLayoutCreate": [_VOID, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "MatrixLayoutSetAttribute": _SET,
    "MatrixLayoutDestroy": [_VOID],
    "MatmulPreferenceCreate": [_VOID],
    "MatmulPreferenceSetAttribute": _SET,
    "MatmulPreferenceDestroy": [_VOID],
    "MatmulAlgoGetHeuristic": [_VOID] * 7 + [_INT, _VOID, _VOID],
    "MatmulAlgoInit": [_VOID] + [_INT] * 7 + [_VOID],
    "MatmulAlgoCheck": [_VOID] * 8,
    "MatmulAlgoConfigSetAttribute": _SET,
    "MatmulAlgoConfigGetAttribute": _GET,
    "MatmulAlgoCapGetAttribute": _GET,
    "Matmul": [_VOID] * 14 + [_SIZE, _VOID],
}


class Library:
    """The functions of libcublasLt; each raises CublasLtError with its own name and the status'."""

    def __init__(self) -> None:
        self._lib = _load()
        self._lib.cublasLtGetStatusName.argtypes = [_INT]
        self._lib.cublasLtGetStatusName.restype = ctypes.c_char_p
        self._lib.cublasLtGetVersion.restype = _SIZE
        self._functions = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._lib, f"cublasLt{name}")
            function.argtypes, function.restype = arguments, _INT
            self._functions[name] = function

    @property
    def version(self) -> int:
        return int(self._lib.cublasLtGetVersion())

    def call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise CublasLtError(f"cublasLt{name}: {(self._lib.cublasLtGetStatusName(status) or b'?').decode()}")

    def create(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """The object that cublasLt<name>Create makes."""
        made = _VOID()
        self.call(f"{name}Create", ctypes.byref(made), *arguments)
        return made

    def set(self, name: str, target: Any, attribute: int, value: Any) -> None:
        self.call(f"{name}SetAttribute", target, attribute, ctypes.byref(value), ctypes.sizeof(value))


def _load() -> ctypes.CDLL:
    """What the process has loaded under these names, else what lies in NVIDIA's Python packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    packaged = sorted(str(path) for folder in folders for path in Path(folder).glob("*/lib/libcublasLt.so.*"))
    failures = []
    for name in (*_SONAMES, *reversed(packaged)):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(str(error))
    raise CublasLtError("no libcublasLt: " + "; ".join(failures))


@cache
def library() -> Library:
    return Library()


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    """One for the process' life: it holds nothing but what the library found out about the device."""
    with torch.cuda.device(device):
        return library().create("")


@dataclass(frozen=True)
class Problem:
    """x [rows, k] @ weight [n, k]^T of `dtype`; with parts > 1 float32 [parts, rows, n], sums over parts of K."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    parts: int = 1

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, parts: int = 1) -> "Problem":
        (rows, k), n = x.shape, weight.shape[0]
        if weight.shape[1] != k or not (x.is_contiguous() and weight.is_contiguous()) or x.dtype != weight.dtype:
            raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)}: contiguous, of one K and dtype expected")
        if any(t.data_ptr() % ALIGNMENT for t in (x, weight)):
            raise ValueError(f"x and weight must start at a multiple of {ALIGNMENT} bytes")
        return cls(rows, n, k, x.dtype, x.device, parts)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.parts > 1 else self.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.parts, self.rows, self.n) if self.parts > 1 else (self.rows, self.n)


class Description:
    """The library's descriptors of a problem, freed with this."""

    def __init__(self, problem: Problem) -> None:
        lib, p = library(), problem
        part = p.k // p.parts
        if p.k % p.parts or part * p.dtype.itemsize % ALIGNMENT or p.n * p.dtype.itemsize % ALIGNMENT:
            raise CublasLtError(f"{p}: rows or parts of K that are no multiple of {ALIGNMENT} bytes")
        self.types = (_COMPUTE_32F, _TYPES[torch.float32], *[_TYPES[p.dtype]] * 2, *[_TYPES[p.out_dtype]] * 2)
        self.operation = lib.create("MatmulDesc", *self.types[:2])
        lib.set("MatmulDesc", self.operation, _TRANSPOSE_A, ctypes.c_int32(1))
        self.weight = self._layout(_TYPES[p.dtype], part, p.n, p.k, p.parts, part)
        self.x = self._layout(_TYPES[p.dtype], part, p.rows, p.k, p.parts, part)
        self.out = self._layout(_TYPES[p.out_dtype], p.n, p.rows, p.n, p.parts, p.n * p.rows)
        self.all = (self.operation, self.weight, self.x, self.out, self.out)  # as A, B, C and D
        layouts = [("MatrixLayout", layout) for layout in (self.weight, self.x, self.out)]
        weakref.finalize(self, _destroy, lib, [("MatmulDesc", self.operation), *layouts]).atexit = False

    @staticmethod
    def _layout(dtype: int, rows: int, columns: int, stride: int, batch: int, offset: int) -> ctypes.c_void_p:
        layout = library().create("MatrixLayout", dtype, rows, columns, stride)
        if batch > 1:
            library().set("MatrixLayout", layout, _BATCH_COUNT, ctypes.c_int32(batch))
            library().set("MatrixLayout", layout, _BATCH_OFFSET, ctypes.c_int64(offset))
        return layout


def _destroy(lib: Library, made: Iterable[tuple[str, ctypes.c_void_p]]) -> None:
    for name, handle in made:
        lib.call(f"{name}Destroy", handle)


description = lru_cache(_KEPT)(Description)


def heuristic(problem: Problem, count: int = 64) -> list[LtConfig]:
    """What the library proposes, the one it takes to be fastest first; at most `count` without and with split K."""
    lib, found = library(), dict[LtConfig, None]()
    for schemes in (NO_REDUCTION, REDUCTION_IN_WORKSPACE):
        preference = lib.create("MatmulPreference")
        lib.set("MatmulPreference", preference, _MAX_WORKSPACE, ctypes.c_uint64(MAX_WORKSPACE))
        lib.set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(schemes))
        for attribute in _ALIGNMENTS:
            lib.set("MatmulPreference", preference, attribute, ctypes.c_uint32(ALIGNMENT))
        results, written = (HeuristicResult * count)(), ctypes.c_int()
        try:
            lib.call(
                "MatmulAlgoGetHeuristic", _handle(problem.device), *description(problem).all, preference, count,
                ctypes.byref(results), ctypes.byref(written),
            )  # fmt: skip
        except CublasLtError:
            if not found and schemes:
                raise
        finally:
            lib.call("MatmulPreferenceDestroy", preference)
        for result in results[: written.value]:
            config = _read(problem, result.algo) if result.state == 0 else None
            if config is not None and config.reduction in (NO_REDUCTION, REDUCTION_IN_WORKSPACE):
                found[config] = None
    return list(found)


def variants(problem: Problem, config: LtConfig, field: str, values: Iterable[int]) -> Iterator[LtConfig]:
    """Those of `config` with other values of one field that the library says can run."""
    for value in values:
        changed: dict[str, Any] = {field: value}
        variant = replace(config, opaque="", **changed)
        variant = replace(variant, reduction=REDUCTION_IN_WORKSPACE if variant.split_k > 1 else NO_REDUCTION)
        if variant != config and supports(problem, variant):
            yield variant


def tiles(problem: Problem, config: LtConfig) -> list[int]:
    """Numbers of the tiles that the algorithm of `config` can have, as far as the library tells."""
    buffer, written = (ctypes.c_uint32 * 1024)(), _SIZE()
    algo = _algo(problem, config)
    arguments = (ctypes.byref(algo), _CAP_TILES, buffer, ctypes.sizeof(buffer), ctypes.byref(written))
    with contextlib.suppress(CublasLtError):
        library().call("MatmulAlgoCapGetAttribute", *arguments)
    return list(buffer[: written.value // 4])


def supports(problem: Problem, config: LtConfig) -> bool:
    """Whether the library can do `problem` so, on this device and within MAX_WORKSPACE."""
    try:
        return plan(problem, config).workspace <= MAX_WORKSPACE
    except CublasLtError:
        return False


@dataclass(frozen=True)
class Plan:
    """An algorithm that the library has checked. workspace: bytes."""

    algo: Algo
    workspace: int


@lru_cache(_KEPT)
def plan(problem: Problem, config: LtConfig) -> Plan:
    """Raises CublasLtError where the library cannot do `problem` by `config`."""
    if config.parts != problem.parts:
        raise CublasLtError(f"{config} is for {config.parts} parts, not {problem.parts}")
    algo, result = _algo(problem, config), HeuristicResult()
    handle, descriptors = _handle(problem.device), description(problem).all
    library().call("MatmulAlgoCheck", handle, *descriptors, ctypes.byref(algo), ctypes.byref(result))
    return Plan(algo, result.workspace)


class Product:
    """x @ weight^T of one size by one algorithm: all but the addresses and the stream is prepared, for a step of some
    hundred products is launched from Python."""

    def __init__(self, problem: Problem, config: LtConfig) -> None:
        planned, described = plan(problem, config), description(problem)
        self._call, self._handle = library().call, _handle(problem.device)
        self._operation, self._weight, self._x, self._out, _ = described.all
        self._described = described  # lives as long as this
        self._algo, self._workspace = ctypes.byref(planned.algo), planned.workspace
        self._shape, self._dtype, self._device = problem.out_shape, problem.out_dtype, problem.device

    def __call__(self, x: int, weight: int) -> Tensor:
        """From the addresses of x and weight."""
        out = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        scratch = None
        if self._workspace:
            scratch = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
        address = out.data_ptr()
        self._call(
            "Matmul", self._handle, self._operation, _ONE, weight, self._weight, x, self._x, _ZERO, address, self._out,
            address, self._out, self._algo, None if scratch is None else scratch.data_ptr(), self._workspace,
            _stream(self._device),
        )  # fmt: skip
        return out


def linear(x: Tensor, weight: Tensor, config: LtConfig) -> Tensor:
    """x [M, K] @ weight [N, K]^T -> [M, N] of their dtype, or with config.parts > 1 float32 [parts, M, N].

    Capturable in a CUDA graph; scratch memory comes from torch's allocator.
    """
    if x.dtype != weight.dtype or not (x.is_contiguous() and weight.is_contiguous()):
        Problem.of(x, weight)  # says what is wrong
    product = _product(x.shape, weight.shape, x.dtype, x.device, config)
    x_address, weight_address = x.data_ptr(), weight.data_ptr()
    if (x_address | weight_address) % ALIGNMENT:
        Problem.of(x, weight)
    return product(x_address, weight_address)


@lru_cache(_KEPT)
def _product(
    x: torch.Size, weight: torch.Size, dtype: torch.dtype, device: torch.device, config: LtConfig
) -> Product:  # fmt: skip
    (rows, k), (n, weight_k) = x, weight
    if k != weight_k:
        raise ValueError(f"x {list(x)}, weight {list(weight)}: contiguous, of one K and dtype expected")
    return Product(Problem(rows, n, k, dtype, device, config.parts), config)


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


_ONE, _ZERO = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))


def _read(problem: Problem, algo: Algo) -> LtConfig:
    """The attributes of `algo`; with its bytes where the attributes do not give the same bytes again. What it has not
    reads as 0."""
    values: dict[str, Any] = {}
    for field, (attribute, kind) in _ATTRIBUTES.items():
        value, written = kind(), _SIZE()
        arguments = (ctypes.byref(algo), attribute, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written))
        with contextlib.suppress(CublasLtError):
            library().call("MatmulAlgoConfigGetAttribute", *arguments)
        values[field] = int(value.value)
    config = LtConfig(**values, parts=problem.parts)
    try:
        same = bytes(_algo(problem, config)) == bytes(algo)
    except CublasLtError:
        same = False
    return config if same else replace(config, opaque=bytes(algo).hex())


def _algo(problem: Problem, config: LtConfig) -> Algo:
    if config.opaque:
        return Algo.from_buffer_copy(bytes.fromhex(config.opaque))
    return _initialised(problem.device, description(problem).types, config)


@lru_cache(_KEPT)
def _initialised(device: torch.device, types: tuple[int, ...], config: LtConfig) -> Algo:
    """An algorithm knows no sizes, only the types of A, B, C, D and of what it computes in. Nobody writes to it."""
    algo, lib = Algo(), library()
    lib.call("MatmulAlgoInit", _handle(device), *types, config.algorithm, ctypes.byref(algo))
    for field, (attribute, kind) in _ATTRIBUTES.items():
        if field != "algorithm":
            lib.set("MatmulAlgoConfig", ctypes.byref(algo), attribute, kind(getattr(config, field)))
    return algo
