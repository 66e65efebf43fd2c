"""The operations that kernels do most, by numpy at once where Triton's interpreter would look at types a dozen
times on its way to the same call. That is for operands of one plain type, and numbers beside them; all others,
with every mistake, go the interpreter's way."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

SIGNED = {f"int{bits}": 1 << bits - 1 for bits in (8, 16, 32, 64)}
UNSIGNED = {f"uint{bits}": 1 << bits for bits in (8, 16, 32, 64)}
"""Integer types, with the first number that is too large."""
WHOLE = SIGNED.keys() | UNSIGNED
HALVES = {"fp16", "bf16"}
"""Types in which nothing is divided."""
FLOATS = HALVES | {"fp32", "fp64"}
ALIKE = WHOLE | FLOATS | {"int1"}
"""Types of which two have a result of the same type."""
_FULL = {"fp32", "fp64"}
_NUMBERS = WHOLE | _FULL
"""Types that numpy converts as Triton does."""

_BYTES = {"fp8e4nv", "fp8e5"}

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_ORDERS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
           "ne": np.not_equal}  # fmt: skip
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_SHIFTS = {"lshift": np.left_shift, "rshift": np.right_shift}
_ALL = slice(None)
_SIMPLE = {int, float, bool, str, slice, type(None), core.tensor, core.dtype, core.pointer_type}
_new = object.__new__

Sizes = tuple[int, ...] | None
"""Sizes of a block's type; a scalar has None."""
_joint_sizes: dict[tuple[Sizes, Sizes], Sizes] = {}
_indexed_sizes: dict[tuple[Sizes, tuple[bool, ...]], tuple[int, ...]] = {}
_block_types: dict[tuple[tuple[int, ...], str], Any] = {}
_constants: dict[tuple[Any, type, str], Any] = {}
_counts: dict[tuple[int, int], np.ndarray] = {}
_tables: dict[tuple[str, str], np.ndarray] = {}
"""Numbers of another type that the bytes of one are."""
_truths: dict[tuple[int, ...], np.ndarray] = {}


def quick(place: Any, name: str, semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    """The quick way of a member of Triton's language, or `slow`, which is the interpreter's."""
    operation = name.strip("_")
    if place is core.tensor and name != operation:
        if operation == "getitem":
            return _getitem(slow)
        is_turned = operation not in _ORDERS and operation[0] == "r" and operation != "rshift"
        if (found := _binary(operation[is_turned:])) is not None:
            return _operate(*found, is_turned, semantic, slow)
        return slow
    if name in _MEMBERS and place in (core, core.tensor, interpreter.tl):
        return _MEMBERS[name](semantic, slow)
    return slow


def _binary(operation: str) -> tuple[Any, set[str], bool] | None:
    """numpy's function, the types it is for, and whether its result is a truth."""
    if operation in _ARITHMETIC:
        return _ARITHMETIC[operation], _NUMBERS | {"fp16"}, False
    if operation in _ORDERS:
        return _ORDERS[operation], WHOLE | {"fp32"}, True
    if operation in _BITS:
        return _BITS[operation], WHOLE | {"int1"}, False
    if operation in _SHIFTS:
        return _SHIFTS[operation], set(WHOLE), False
    return {"truediv": (np.divide, _FULL, False), "floordiv": (_divide, set(WHOLE), False),
            "mod": (np.fmod, _NUMBERS, False)}.get(operation)  # fmt: skip


def _divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Rounded towards zero."""
    return (left - np.fmod(left, right)) // right


def _operate(
    function: Any, kinds: set[str], is_order: bool, is_turned: bool, semantic: Any, slow: Callable[..., Any]
) -> Callable[..., Any]:
    """is_turned: whether the operand that is no tensor stands first."""
    takes_pointers = function is np.add

    def operate(self: Any, other: Any) -> Any:
        given = other
        if type(other) is not core.tensor:
            other = constant(semantic, other.value if type(other) is core.constexpr else other, self, False)
            if type(other) is not core.tensor:
                return slow(self, given)
        scalar = self.dtype
        name, of_other = scalar.name, other.dtype.name
        if name != of_other and name in SIGNED and of_other in SIGNED:  # the result has the wider one
            scalar = max(scalar, other.dtype, key=_width)
            of_other = name
        if name == of_other and name in kinds:
            left, right = (other, self) if is_turned else (self, other)
            data = function(left.handle.data, right.handle.data)
            sizes = joint_sizes(self.type.sizes, other.type.sizes)
            return _made(data, core.int1 if is_order else scalar, sizes)
        if takes_pointers and type(scalar) is core.pointer_type and of_other in WHOLE:
            width = max(1, scalar.element_ty.primitive_bitwidth // 8)
            steps = np.multiply(other.handle.data, width, dtype=np.int64, casting="unsafe").view(np.uint64)
            data = self.handle.data + steps
            return _made(data, scalar, joint_sizes(self.type.sizes, other.type.sizes))
        return slow(self, given)

    return operate


def _width(dtype: Any) -> int:
    return int(dtype.primitive_bitwidth)


def constant(semantic: Any, value: Any, other: Any, div_or_mod: bool) -> Any:
    """A number as a tensor of the type of the other operand, where that decides; or the number itself."""
    if type(other) is not core.tensor or type(value) is core.tensor:
        return value
    dtype, kind = other.dtype, type(value)
    if type(dtype) is core.pointer_type:
        dtype = core.int32
    name = dtype.name
    if kind is int and name in WHOLE:
        first = -SIGNED.get(name, 0)
        if not first <= value < (-first or UNSIGNED[name]):
            return value
    elif kind is bool and name == "int1":
        pass
    elif name not in FLOATS or (div_or_mod and name in HALVES) or (kind is not int and kind is not float):
        return value
    if (found := _constants.get((value, kind, name))) is None:
        found = _constants[value, kind, name] = semantic.scalar_constant(value, dtype)
    return found


def joint_sizes(left: Sizes, right: Sizes) -> Sizes:
    """Sizes of the result of two operands."""
    if left == right or right is None:
        return left
    if left is None:
        return right
    if (joint := _joint_sizes.get((left, right))) is None:
        joint = _joint_sizes[left, right] = np.broadcast_shapes(left, right)
    return joint


def block_type(scalar: Any, sizes: tuple[int, ...]) -> Any:
    if type(scalar) is core.pointer_type:  # whose name does not tell all
        blocks = scalar.__dict__.setdefault("blocks", {})
        if (found := blocks.get(sizes)) is None:
            found = blocks[sizes] = core.block_type(scalar, list(sizes))
        return found
    if (found := _block_types.get((sizes, scalar.name))) is None:
        found = _block_types[sizes, scalar.name] = core.block_type(scalar, list(sizes))
    return found


def _made(data: np.ndarray, scalar: Any, sizes: Sizes) -> Any:
    """A tensor, without the checks of its type that its makers have passed."""
    handle, made = _new(interpreter.TensorHandle), _new(core.tensor)
    kind = scalar if sizes is None else block_type(scalar, sizes)
    handle.data, handle.dtype, handle.attr = data, scalar, {}
    made.handle, made.type, made.dtype = handle, kind, scalar
    made.shape, made.numel = kind.tensor_shape
    return made


def unwrapped(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that gives what a constant stands for, and others as they are."""

    def one(given: Any) -> Any:
        kind = type(given)
        if kind is core.constexpr:
            return given.value
        return given if kind in _SIMPLE else unwrap(given)

    return one


def item(self: Any, index: Any) -> Any:
    """An item of one of Triton's tuples, or a part."""
    if type(index) is int:
        return self.values[index]
    if type(index) is core.constexpr:
        return self.values[index.value]
    assert isinstance(index, (slice, core.slice))
    return core.tuple(self.values[index.start : index.stop : index.step])


def _getitem(slow: Callable[..., Any]) -> Callable[..., Any]:
    def getitem(self: Any, slices: Any) -> Any:
        each = slices if type(slices) is tuple else (slices,)
        sizes = self.type.sizes
        if sizes is None or any(one is not None and (type(one) is not slice or one != _ALL) for one in each):
            return slow(self, slices)
        key = sizes, tuple([one is None for one in each])
        if (found := _indexed_sizes.get(key)) is None:
            made = list(sizes)
            for dim, is_new in enumerate(key[1]):
                if is_new:
                    made.insert(dim, 1)
            found = _indexed_sizes[key] = tuple(made)
        return _made(self.handle.data.reshape(found), self.dtype, found)

    return getitem


def _cast(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    def cast(
        input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, _semantic: Any = None
    ) -> Any:
        if fp_downcast_rounding is None and type(input) is core.tensor and type(dtype) is core.dtype:
            source, name, data = input.dtype.name, dtype.name, input.handle.data
            if source == name:
                return input
            if not bitcast and source in _BYTES and name in ("fp16", "fp32"):
                if (table := _tables.get((source, name))) is None:
                    each = _made(np.arange(256, dtype=np.uint8), input.dtype, (256,))
                    table = _tables[source, name] = slow(each, dtype).handle.data
                return _made(table[data], dtype, input.type.sizes)
            if bitcast and {source, name} <= {"int32", "uint32", "fp32"}:
                return _made(data.view(interpreter._get_np_dtype(dtype)), dtype, input.type.sizes)
            if not bitcast and name in _NUMBERS and (source in _NUMBERS or source == "int1"):
                return _made(data.astype(interpreter._get_np_dtype(dtype)), dtype, input.type.sizes)
        return slow(input, dtype, fp_downcast_rounding, bitcast)

    return cast


def _where(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    def where(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        x, y = (each.value if type(each) is core.constexpr else each for each in (x, y))
        left, right = x, y
        if type(x) is not core.tensor:
            left = constant(semantic, x, y, False)
        elif type(y) is not core.tensor:
            right = constant(semantic, y, x, False)
        if type(condition) is type(left) is type(right) is core.tensor and condition.dtype.name == "int1":
            name = left.dtype.name
            if name == right.dtype.name and name in ALIKE:
                data = np.where(condition.handle.data, left.handle.data, right.handle.data)
                sizes = joint_sizes(condition.type.sizes, joint_sizes(left.type.sizes, right.type.sizes))
                return _made(data, left.dtype, sizes)
        return slow(condition, x, y)

    return where


def _load(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        if type(other) is core.constexpr:
            other = other.value
        if not _is_simple(pointer, mask, other):
            return slow(pointer, mask, other, **options)
        element, sizes, places = pointer.dtype.element_ty, pointer.type.sizes, pointer.handle.data
        if mask is None:
            if (kept := _truths.get(places.shape)) is None:
                kept = _truths[places.shape] = np.ones(places.shape, bool)
        else:
            kept = mask.handle.data
            if kept.shape != places.shape:
                kept = np.broadcast_to(kept, places.shape)
        kind = interpreter._get_np_dtype(element)
        data = interpreter._interpreter.load(places, kept, np.full(places.shape, other or 0, kind), kind)
        return _made(data, element, sizes)

    return load


def _is_simple(pointer: Any, mask: Any, other: Any) -> bool:
    """Whether a load is by plain pointers, with a number of their type where it reads nothing."""
    if type(pointer) is not core.tensor or type(pointer.dtype) is not core.pointer_type:
        return False
    if pointer.dtype.element_ty.is_block() or pointer.dtype.element_ty.name == "int1":
        return False
    if mask is None or other is None:
        return mask is other or (other is None and _is_mask(mask, pointer.type.sizes))
    name = pointer.dtype.element_ty.name
    is_number = type(other) in (int, float) and (other == 0 or name == "fp32")
    return is_number and _is_mask(mask, pointer.type.sizes)


def _is_mask(mask: Any, sizes: Sizes) -> bool:
    return type(mask) is core.tensor and mask.dtype.name == "int1" and joint_sizes(sizes, mask.type.sizes) == sizes


def _arange(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    def arange(start: Any, end: Any, _semantic: Any = None) -> Any:
        if type(start) is not int or type(end) is not int:
            start, end = (each.value if type(each) is core.constexpr else each for each in (start, end))
        if (data := _counts.get((start, end))) is None:
            data = _counts[start, end] = slow(start, end).handle.data
        return _made(data, core.int32, data.shape)

    return arange


def _extreme(function: Any) -> Callable[..., Callable[..., Any]]:
    def make(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
        def extreme(x: Any, y: Any, **options: Any) -> Any:
            right = y
            if type(x) is core.tensor and x.dtype.name in ("int32", "fp32"):
                right = constant(semantic, y.value if type(y) is core.constexpr else y, x, False)
            if type(x) is type(right) is core.tensor and x.dtype.name == right.dtype.name and x.dtype.name in _NUMBERS:
                sizes = joint_sizes(x.type.sizes, right.type.sizes)
                return _made(function(x.handle.data, right.handle.data), x.dtype, sizes)
            return slow(x, y, **options)

        return extreme

    return make


def _sizes(given: Any) -> tuple[int, ...]:
    """Whole numbers that were given one by one or together; nothing if others are among them."""
    if len(given) == 1 and type(given[0]) in (tuple, list, core.tuple):
        given = given[0]
    each = given.values if type(given) is core.tuple else given
    found = tuple([one.value if type(one) is core.constexpr else one for one in each])
    return found if all(type(one) is int for one in found) else ()


def _full(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    def full(shape: Any, value: Any, dtype: Any, _semantic: Any = None) -> Any:
        if type(value) in (int, float) and type(dtype) is core.dtype and dtype.name in ("int32", "fp32"):
            sizes = _sizes((shape,))
            if sizes and (type(value) is int or dtype.name == "fp32"):
                return _made(np.full(sizes, value, interpreter._get_np_dtype(dtype)), dtype, sizes)
        return slow(shape, value, dtype)

    return full


def _reshape(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    def reshape(input: Any, *shape: Any, can_reorder: Any = False, _semantic: Any = None) -> Any:
        sizes = _sizes(shape)
        if sizes and input.type.sizes is not None and math.prod(sizes) == input.handle.data.size:
            return _made(input.handle.data.reshape(sizes), input.dtype, sizes)
        return slow(input, *shape, can_reorder=can_reorder)

    return reshape


def _permute(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    def permute(input: Any, *dims: Any, _semantic: Any = None) -> Any:
        order = _sizes(dims)
        if input.type.sizes is not None and sorted(order) == list(range(len(input.type.sizes))):
            data = input.handle.data.transpose(order)
            return _made(data, input.dtype, data.shape)
        return slow(input, *dims)

    return permute


def _dot(semantic: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    def dot(input: Any, other: Any, acc: Any = None, **options: Any) -> Any:
        left, right = input.type.sizes or (), other.type.sizes or ()
        fits = len(left) == len(right) == 2 and left[1] == right[0] and "out_dtype" not in options
        if fits and all(each is None or each.dtype.name == "fp32" for each in (input, other, acc)):
            sizes = left[0], right[1]
            if acc is None or acc.type.sizes == sizes:
                product = np.matmul(input.handle.data, other.handle.data)
                product += 0 if acc is None else acc.handle.data
                return _made(product, core.float32, sizes)
        return slow(input, other, acc, **options)

    return dot


_MEMBERS = {"dot": _dot, "full": _full, "reshape": _reshape, "permute": _permute,
            "to": _cast, "cast": _cast, "where": _where, "load": _load, "arange": _arange,
            "maximum": _extreme(np.maximum), "minimum": _extreme(np.minimum)}  # fmt: skip
