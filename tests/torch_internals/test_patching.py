"""A function that is replaced reaches everyone who holds it, by whatever name."""

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from mpiddp.torch_internals.patching import replace_function

pytestmark = pytest.mark.once


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def plus(number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda inner: lambda x: inner(x) + number


@pytest.fixture
def holder() -> Iterator[ModuleType]:
    module = ModuleType("a_module_that_holds_a_function")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.smoke
@pytest.mark.parametrize("decorators", [1, 2])
def test_decorated_function(decorators: int) -> None:
    def double(x: int) -> int:
        return 2 * x

    function: Callable[..., Any] = double
    for _ in range(decorators):
        function = logged(function)
    held = {"by": [function]}
    replace_function(function, plus(1))
    replace_function(function, plus(10))
    assert held["by"][0](5) == 21
    assert function.__name__ == "double"
    assert double(5) == 10


@pytest.mark.smoke
def test_plain_function(holder: ModuleType) -> None:
    def double(x: int) -> int:
        return 2 * x

    holder.known_as = double  # type: ignore[attr-defined]
    replace_function(double, plus(1))
    assert holder.known_as(5) == 11  # type: ignore[attr-defined]
    assert holder.known_as.__name__ == "double"  # type: ignore[attr-defined]
