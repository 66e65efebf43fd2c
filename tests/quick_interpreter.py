"""Triton's interpreter without what it does for nothing. It spends most of its time on types, on checks of overflow
whose result nobody reads, and on switching its functions on again for each call of a device function; numpy's work,
which decides what a kernel computes, is left as it is."""

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_VERSION = "3.6."
"""Triton whose internals are these; others run as they are."""

_block_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
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
    core.tuple.__init__, core.tuple.type = _init_tuple, property(_type_of_tuple, _set_type_of_tuple)
    core.block_type.__init__, core.tensor.__init__ = _init_block_type, _init_tensor
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

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(place, name, interpreted)


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


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, (list, core.tuple))
    key = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
    found = _block_shapes.get(key)
    if found is None:
        if not key:
            raise TypeError("0d block_type is forbidden")
        made = core.tuple(core._unwrap_shape(list(key)))
        found = _block_shapes[key] = made, core.validate_block_shape(made), str(made)
    self.element_ty = element_ty
    self.shape, self.numel, text = found
    self.name = f"<{text}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    key = tuple(type.shape.values) if type.is_block() else ()
    found = _tensor_shapes.get(key)
    if found is None:
        found = core.tuple([core.constexpr(size) for size in key]), core.constexpr(math.prod(key))
        _tensor_shapes[key] = found
    self.shape, self.numel = found


def _broadcast(broadcast_impl_value: Any) -> Any:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast_impl_value(self, lhs, rhs)

    return broadcast
