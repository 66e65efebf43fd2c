"""Triton's interpreter without what it does for nothing. It spends most of its time on types, on checks of overflow
whose result nobody reads, on copies of operands in the shape of the other one, which numpy needs not, and on switching
its functions on again for each call of a device function; numpy's work, which decides what a kernel computes, is left
as it is."""

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from quick_operations import ALIKE, HALVES, WHOLE, block_type, constant, item, joint_sizes, quick, unwrapped
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_VERSION = "3.6."
"""Triton whose internals are these; others run as they are."""

_block_shapes: dict[tuple[int, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}
_constants: dict[tuple[Any, type], Any] = {}
_switched_on: set[Any] = set()
"""Modules of Triton's language whose functions are the interpreter's at this time."""


def quicken() -> None:
    """Changes the interpreter of this process."""
    if not triton.__version__.startswith(_VERSION):
        return
    # An overflow's check ends in device_assert, which does nothing without the option `debug`.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _switch_on(interpreter._patch_lang)
    interpreter._patch_attr = _with_semantic
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    interpreter._validate_np_data_size = _fits
    interpreter.TensorHandle.__init__ = _init_handle
    core._unwrap_if_constexpr, core.tuple.__getitem__ = unwrapped(core._unwrap_if_constexpr), item
    core.tuple.__init__, core.tuple.type = _init_tuple, property(_type_of_tuple, _set_type_of_tuple)
    core.dtype.sizes, core.dtype.tensor_shape = None, (core.tuple([]), core.constexpr(1))
    core.block_type.__init__, core.block_type.with_element_ty = _init_block_type, _with_element_type
    core.block_type.name = property(_name_of_block_type)
    core.tensor.__init__ = _init_tensor
    TritonSemantic.to_tensor = _to_tensor(TritonSemantic.to_tensor)
    TritonSemantic.binary_op_type_checking_impl = _operands(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)


def _switch_on(patch_lang: Any) -> Any:
    """A kernel's launch switches the functions on, and off at its end: a device function finds them on."""
    modules: dict[Any, frozenset[Any]] = {}
    changes: dict[frozenset[Any], list[tuple[Any, str, Any]]] = {}

    def switch_on(fn: Any) -> Any:
        if (wanted := modules.get(fn)) is None:
            seen = list(filter(inspect.ismodule, fn.__globals__.values()))
            wanted = modules[fn] = frozenset(module for module in (tl, core) if module in seen)
        if wanted and wanted <= _switched_on:
            return interpreter._LangPatchScope()
        if _switched_on:  # by a kernel that sees less of the language
            _switched_on.update(wanted)
            return patch_lang(fn)
        if wanted in changes:
            scope = interpreter._LangPatchScope()
            for change in changes[wanted]:
                scope.set_attr(*change)
        else:
            scope = patch_lang(fn)
            changes[wanted] = [(place, name, place.__dict__[name]) for place, name, _ in scope._changes]
        restore = scope.restore

        def switch_off() -> None:
            _switched_on.clear()
            restore()

        scope.restore = switch_off
        _switched_on.update(wanted)
        return scope

    return switch_on


def _with_semantic(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = TritonSemantic(builder)
    member = getattr(member, "__wrapped__", member)  # without a check that there is a semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(place, name, quick(place, name, semantic, interpreted))


def _numpy_types(get_np_dtype: Any) -> Any:
    known: dict[str, np.dtype] = {}

    def numpy_type(dtype: Any) -> np.dtype:
        kind = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = get_np_dtype(kind)
        return found

    return numpy_type


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = list(args)
    self.__dict__["_type"] = type if type is None or isinstance(type, core.tuple_type) else core.tuple_type(type)


def _type_of_tuple(self: Any) -> Any:
    """Type of a tuple, made when it is asked for: its name is long."""
    if (found := self.__dict__["_type"]) is None:
        found = self.__dict__["_type"] = core._type_for_tuple_values(self.values)
    return found


def _set_type_of_tuple(self: Any, type: Any) -> None:
    self.__dict__["_type"] = type


def _fits(array: np.ndarray, dtype: Any) -> bool:
    return type(dtype) is core.pointer_type or 8 * array.itemsize <= max(dtype.primitive_bitwidth, 8)


def _init_handle(self: Any, data: np.ndarray, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not _fits(data, dtype):
        raise ValueError(f"numbers of {data.itemsize} bytes are no {dtype}")


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, (list, core.tuple))
    key = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
    found = _block_shapes.get(key)
    if found is None:
        if not key:
            raise TypeError("0d block_type is forbidden")
        made = core.tuple(core._unwrap_shape(list(key)))
        of_tensor = core.tuple([core.constexpr(size) for size in key]), core.constexpr(math.prod(key))
        found = _block_shapes[key] = made, core.validate_block_shape(made), str(made), of_tensor
    self.element_ty, self.sizes = element_ty, key
    self.shape, self.numel, _, self.tensor_shape = found


def _name_of_block_type(self: Any) -> str:
    return f"<{_block_shapes[self.sizes][2]}, {self.element_ty}>"


def _with_element_type(self: Any, element: Any) -> Any:
    return block_type(element, self.sizes)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.tensor_shape


def _to_tensor(to_tensor: Any) -> Any:
    def to_one(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is core.tensor:
            return x
        if kind is not int and kind is not float:
            return to_tensor(self, x, check_type)
        if (found := _constants.get((x, kind))) is None:
            found = _constants[x, kind] = to_tensor(self, x)
        return found

    return to_one


def _operands(check: Any) -> Any:
    """Operands of one type, which has the shape of the result: numpy brings their data into it."""

    def operands(self: Any, lhs: Any, rhs: Any, left_ptr: bool = False, right_ptr: bool = False,
                 arithmetic: bool = True, div_or_mod: bool = False) -> tuple[Any, Any]:  # fmt: skip
        if type(lhs) is not core.tensor:
            lhs = constant(self, lhs, rhs, div_or_mod)
        elif type(rhs) is not core.tensor:
            rhs = constant(self, rhs, lhs, div_or_mod)
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            left, right = lhs.dtype.name, rhs.dtype.name
            if left == right:
                fit = left in ALIKE and not (div_or_mod and left in HALVES)
            else:
                fit = left_ptr and right in WHOLE and type(lhs.dtype) is core.pointer_type
            if fit:
                return _in_one_shape(lhs, rhs)
        return check(self, lhs, rhs, left_ptr, right_ptr, arithmetic, div_or_mod)

    return operands


def _in_one_shape(lhs: Any, rhs: Any) -> tuple[Any, Any]:
    left, right = lhs.type.sizes, rhs.type.sizes
    if left == right:
        return lhs, rhs
    joint = joint_sizes(left, right)
    return tuple(
        each if sizes == joint else core.tensor(each.handle, block_type(each.dtype, joint))
        for each, sizes in ((lhs, left), (rhs, right))
    )


def _broadcast(broadcast_impl_value: Any) -> Any:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast_impl_value(self, lhs, rhs)

    return broadcast
