"""Pickle classes and functions that other processes cannot import, by what they consist of.

Note [Classes of the script]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Under ``python -m mpiddp --data-parallel`` the serving ranks do not run the script, which often has
no ``if __name__ == "__main__"``. So a class or function that is defined in the script, or within a
function, travels as its parts: the bytecode (all ranks have the same Python), the class attributes,
closures and default values, and those global variables that the bytecode names. A global variable
that cannot be pickled, such as an open file, is left out; code that uses it then raises a NameError
there. A class is sent under a number, so that each process makes it once and instances fit. What
the script assigns to its global variables afterwards is not sent.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import importlib
import io
import marshal
import pickle
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

__all__ = ["Reducer"]

_MAIN = "__main__"
# What Python makes anew for each class.
_MADE = {"__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__",
         "__annotations_cache__", "_abc_impl", "__doc__", "__module__", "__qualname__",
         "__slots__"}  # fmt: skip
_GLOBAL_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")

# Classes that this process has sent or received, by their numbers, and the reverse.
_sent: dict[int, type] = {}
_received: dict[int, type] = {}
_numbers: dict[type, int] = {}
_filled: set[int] = set()
# Namespaces of functions that are those of no module.
_namespaces: dict[int, dict[str, Any]] = {}
_sent_namespaces: dict[int, dict[str, Any]] = {}


class _Empty:
    """Stands for the content of an empty cell."""


class Reducer:
    """Says how a pickler that sends by value reduces an object. Not collective.

    Args:
        make: makes a pickler of the same kind, to try whether something can be pickled.
    """

    def __init__(self, make: typing.Callable[[io.BytesIO], pickle.Pickler]) -> None:
        self._make = make
        self._possible: dict[int, bool] = {}

    def reduce(self, obj: Any) -> Any:
        """Return what ``reducer_override`` does for `obj`."""
        if isinstance(obj, type):
            return NotImplemented if _importable(obj) else self._class(obj)
        if isinstance(obj, types.FunctionType):
            return NotImplemented if _importable(obj) else self._function(obj)
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, property):
            return property, (obj.fget, obj.fset, obj.fdel, obj.__doc__)
        if isinstance(obj, classmethod | staticmethod):
            return type(obj), (obj.__func__,)
        if isinstance(obj, functools.cached_property):
            return functools.cached_property, (obj.func,)
        if isinstance(obj, types.MappingProxyType):
            return _make_proxy, (dict(obj),)
        if isinstance(obj, functools._lru_cache_wrapper) and not _importable(obj):
            return _make_cache, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, typing.TypeVar) and obj.__module__ == _MAIN:
            return typing.TypeVar, (obj.__name__,)
        if obj is dataclasses.MISSING:
            return getattr, (dataclasses, "MISSING")
        if type(obj).__name__ == "_FIELD_BASE" and type(obj).__module__ == "dataclasses":
            return getattr, (dataclasses, obj.name)
        return NotImplemented

    def _class(self, cls: type) -> Any:
        number = id(cls)
        _sent[number] = cls
        content: dict[str, Any] = {
            name: value
            for name, value in vars(cls).items()
            if name not in _MADE
            and not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
        }
        content["__doc__"] = cls.__doc__
        where = (cls.__module__, cls.__qualname__)
        if issubclass(cls, enum.Enum):
            members = {name: member.value for name, member in cls.__members__.items()}
            kept = {
                name: value
                for name, value in content.items()
                if isinstance(value, types.FunctionType | property | classmethod | staticmethod)
                and name not in vars(enum.Enum)
            }
            return _make_enum, (number, cls.__name__, cls.__bases__, where, members), kept, \
                None, None, _fill_class  # fmt: skip
        slots = vars(cls).get("__slots__")
        made = (number, type(cls), cls.__name__, cls.__bases__, where, slots)
        return _make_class, made, content, None, None, _fill_class

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        namespace = function.__globals__
        name = namespace.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        used: dict[str, Any] = {}
        if module is not None and vars(module) is namespace and name != _MAIN:
            key: int | str = str(name)
        else:
            key = _MAIN if module is not None and vars(module) is namespace else id(namespace)
            _sent_namespaces[id(namespace)] = namespace
            used = {
                name: namespace[name]
                for name in sorted(set(_global_names(code)))
                if name in namespace and self._can_send(namespace[name])
            }
        cells = function.__closure__ or ()
        made = (marshal.dumps(code), function.__name__, key, len(cells))
        state = {
            "used": used,
            "cells": [_content(cell) for cell in cells],
            "defaults": function.__defaults__,
            "keyword_defaults": function.__kwdefaults__,
            "own": {k: v for k, v in vars(function).items() if self._can_send(v)},
            "module": function.__module__,
            "qualname": function.__qualname__,
            "doc": function.__doc__,
        }
        return _make_function, made, state, None, None, _fill_function

    def _can_send(self, value: object) -> bool:
        if isinstance(value, type | types.FunctionType | types.ModuleType):
            return True
        known = self._possible.get(id(value))
        if known is None:
            # Until it is known: it may refer to itself.
            self._possible[id(value)] = True
            try:
                self._make(io.BytesIO()).dump(value)
                known = True
            except Exception:
                known = False
            self._possible[id(value)] = known
        return known


def reduce_received(obj: Any) -> Any:
    """Return how a class that came from rank 0 is sent back to it, for ``reducer_override``."""
    number = _numbers.get(obj) if isinstance(obj, type) else None
    return NotImplemented if number is None else (_sent_class, (number,))


def _importable(obj: Any) -> bool:
    module = sys.modules.get(obj.__module__ or "")
    if module is None or obj.__module__ == _MAIN:
        return False
    found: Any = module
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    # A class that a decorator has replaced is found, but is another one.
    return found is obj


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_NAMES:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Empty


def _make_proxy(content: dict[str, Any]) -> Any:
    return types.MappingProxyType(content)  # which has no name to be pickled by


def _make_cache(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _sent_class(number: int) -> type:
    return _sent[number]


def _keep(number: int, cls: type, where: tuple[str, str]) -> type:
    cls.__module__, cls.__qualname__ = where
    _received[number] = cls
    _numbers[cls] = number
    if where[0] == _MAIN and "." not in where[1]:
        setattr(sys.modules[_MAIN], where[1], cls)
    return cls


def _make_class(
    number: int, kind: Any, name: str, bases: tuple[type, ...], where: tuple[str, str], slots: Any
) -> type:
    if number in _received:
        return _received[number]
    content = {"__module__": where[0], "__qualname__": where[1]}
    if slots is not None:
        content["__slots__"] = slots
    return _keep(number, kind(name, bases, content), where)


def _make_enum(
    number: int, name: str, bases: tuple[type, ...], where: tuple[str, str], members: dict[str, Any]
) -> type:
    if number in _received:
        return _received[number]
    kind: Any = type(bases[-1])
    content = kind.__prepare__(name, bases)
    content["__module__"], content["__qualname__"] = where
    for member, value in members.items():
        content[member] = value
    return _keep(number, kind(name, bases, content), where)


def _fill_class(cls: type, content: dict[str, Any]) -> None:
    number = _numbers[cls]
    if number in _filled:
        return
    _filled.add(number)
    for name, value in content.items():
        setattr(cls, name, value)
        if hasattr(type(value), "__set_name__"):
            value.__set_name__(cls, name)
    abstract = getattr(sys.modules["abc"], "update_abstractmethods")  # noqa: B009
    abstract(cls)


def _make_function(code: bytes, name: str, key: int | str, cells: int) -> types.FunctionType:
    if isinstance(key, str):
        namespace = vars(importlib.import_module(key))
    else:
        namespace = _namespaces.setdefault(key, {"__name__": name})
    closure = tuple(types.CellType() for _ in range(cells))
    made = marshal.loads(code)  # noqa: S302  # of a rank of this job
    return types.FunctionType(made, namespace, name, None, closure)


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    function.__globals__.update(state["used"])
    for cell, content in zip(function.__closure__ or (), state["cells"], strict=True):
        if content is not _Empty:
            cell.cell_contents = content
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["keyword_defaults"]
    vars(function).update(state["own"])
    function.__module__ = state["module"]
    function.__qualname__ = state["qualname"]
    function.__doc__ = state["doc"]
