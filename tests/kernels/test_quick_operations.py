"""Operations that tests take straight to numpy give what Triton's interpreter computes: values, types and shapes."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from quick_interpreter import _VERSION  # noqa: E402
from quick_operations import block_type, quick  # noqa: E402
from triton.language import core  # noqa: E402
from triton.language.semantic import TritonSemantic  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here"),
    pytest.mark.skipif(not triton.__version__.startswith(_VERSION), reason="the interpreter is as it came"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SIZES = [None, (4,), (1, 4), (2, 1), (2, 4)]
KINDS = {"int1": np.bool_, "int8": np.int8, "int32": np.int32, "int64": np.int64, "uint8": np.uint8,
         "uint32": np.uint32, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64}  # fmt: skip
NUMBERS = [0, 3, -2, 200, 2**31, 0.5, -0.0, float("inf"), True, None]
BOTH = ["add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"]
DUNDERS = [*BOTH, *("r" + name for name in BOTH), "lt", "le", "gt", "ge", "eq", "ne"]
MEMBERS = {name: getattr(core.tensor, f"__{name}__").__wrapped__ for name in DUNDERS}
MEMBERS["getitem"] = core.tensor.__getitem__.__wrapped__
TAKEN = ("where", "load", "cast", "arange", "dot", "full", "reshape", "permute", "maximum", "minimum")
FUNCTIONS = {name: getattr(core, name).__wrapped__ for name in TAKEN}
semantic = TritonSemantic(interpreter.interpreter_builder)


def sees_triton() -> Any:
    return tl


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    scope = interpreter._patch_lang(sees_triton)
    yield
    scope.restore()


def tensor(name: str, sizes: tuple[int, ...] | None, seed: int = 0) -> Any:
    random, kind = np.random.default_rng(seed), KINDS[name]
    values = random.integers(1, 100, sizes or (1,)) * random.choice([1, -1], sizes or (1,))
    data = (values > 0) if kind is np.bool_ else values.astype(kind)
    scalar = core.dtype(name)
    return core.tensor(interpreter.TensorHandle(data, scalar), scalar if sizes is None else block_type(scalar, sizes))


def outcome(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Type, shape and values, or that it fails."""
    try:
        found = function(*args, **options)
    except Exception:
        return None
    data = np.broadcast_to(found.handle.data, found.type.sizes or (1,))
    return found.dtype.name, found.type.sizes, data.dtype.str, data.tobytes()


def compare(place: Any, name: str, member: Callable[..., Any], cases: Iterator[Any]) -> tuple[int, int]:
    """Returns how many cases went to numpy, and how many there were."""
    num_slow = num_cases = 0

    def slow(*args: Any, **options: Any) -> Any:
        nonlocal num_slow
        num_slow += 1
        return member(*args, **{**options, "_semantic": semantic})

    fast = quick(place, name, semantic, slow)
    for args, options in cases:
        num_cases += 1
        found = outcome(fast, *args, **options)
        assert found == outcome(member, *args, _semantic=semantic, **options), (name, args, options)
    return num_cases - num_slow, num_cases


def operands() -> Iterator[tuple[Any, Any]]:
    for kind, other in product(KINDS, repeat=2):
        for left, right in product(SIZES, repeat=2) if kind == other == "int32" else [((2, 4), (2, 1)), ((4,), None)]:
            yield tensor(kind, left), tensor(other, right, 1)
    for kind, number in product(KINDS, NUMBERS):
        yield tensor(kind, (2, 4)), number


@pytest.mark.parametrize("name", DUNDERS)
def test_operators(name: str) -> None:
    num_quick, _ = compare(core.tensor, f"__{name}__", MEMBERS[name], ((pair, {}) for pair in operands()))
    assert num_quick > 10


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extremes(name: str) -> None:
    assert compare(core, name, FUNCTIONS[name], ((pair, {}) for pair in operands()))[0] > 30


def test_choices() -> None:
    masks = [tensor("int1", sizes, 2) for sizes in (None, (4,), (2, 1))]
    cases = (((mask, *pair[::order]), {}) for mask in masks for order in (1, -1) for pair in operands())
    assert compare(core, "where", FUNCTIONS["where"], cases)[0] > 100


def test_shapes_and_types() -> None:
    for kind, sizes in product(KINDS, SIZES):
        one = tensor(kind, sizes)
        slices = [(None,), (slice(None), None), (None, slice(None)), (slice(None),) * 3, (slice(0, 1), None), None]
        compare(core.tensor, "__getitem__", MEMBERS["getitem"], (((one, each), {}) for each in slices))
        casts = (((one, core.dtype(to)), {"bitcast": bits}) for to in KINDS for bits in (False, True))
        compare(core, "cast", FUNCTIONS["cast"], casts)
        shapes = [((8,),), ([2, 2, 2],), (2, 4), (4, 2), ((4,),), (3,)]
        compare(core, "reshape", FUNCTIONS["reshape"], (((one, *shape), {}) for shape in shapes))
        compare(core, "permute", FUNCTIONS["permute"], (((one, *dims), {}) for dims in ((1, 0), ((1, 0),), (0,))))
    values = product([[4], (2, 4), []], [0, 3, -1.5, float("-inf")], map(core.dtype, KINDS))
    assert compare(core, "full", FUNCTIONS["full"], ((each, {}) for each in values))[0] > 10
    counts = [(pair, {}) for pair in ((0, 8), (4, 8), (0, 3), (0, 8))]  # it keeps what it has made
    assert compare(core, "arange", FUNCTIONS["arange"], iter(counts))[0] > 0


def test_bytes() -> None:
    """Each number of 8 bits, wider."""
    for name in ("fp8e4nv", "fp8e5"):
        scalar = core.dtype(name)
        data = np.arange(256, dtype=np.uint8).reshape(2, 128)
        one = core.tensor(interpreter.TensorHandle(data, scalar), block_type(scalar, (2, 128)))
        assert compare(core, "cast", FUNCTIONS["cast"], (((one, core.dtype(to)), {}) for to in ("fp32", "fp16") * 2))[0]


def test_products() -> None:
    left, right = tensor("fp32", (2, 4)), core.tensor.__getitem__(tensor("fp32", (4,), 1), (slice(None), None))
    sums = [None, tensor("fp32", (2, 1), 2), tensor("fp32", (2, 4)), tensor("fp16", (2, 1))]
    cases = [((left, other, acc), {}) for other in (right, left, tensor("fp16", (4,))) for acc in sums]
    assert compare(core, "dot", FUNCTIONS["dot"], iter(cases))[0] == 2


def test_loads() -> None:
    """By pointers of each type: all of them, some with numbers beside, and what is refused."""
    add, num_quick = quick(core.tensor, "__add__", semantic, MEMBERS["add"]), 0
    for (kind, dtype), sizes in product(KINDS.items(), SIZES):
        held, scalar = np.arange(9).astype(dtype), core.pointer_type(core.dtype(kind))
        place = core.tensor(interpreter.TensorHandle(np.array([held.ctypes.data], np.uint64), scalar), scalar)
        offsets = FUNCTIONS["cast"](tensor("int1", sizes), core.int32, _semantic=semantic)  # 0 or 1
        assert compare(core.tensor, "__add__", MEMBERS["add"], iter([((place, 1), {}), ((place, offsets), {})]))[0] == 2
        place = add(add(place, 1), offsets)
        masks = [None, *(tensor("int1", each, 5) for each in (None, (2, 1), (4,)))]
        cases = (((place, mask, other), {}) for mask in masks for other in (None, 0, 0.0, 7, -2.5))
        num_quick += compare(core, "load", FUNCTIONS["load"], cases)[0]
    assert num_quick > 100
