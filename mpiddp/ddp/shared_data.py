"""Let a change through `.data` of a parameter that ranks share be seen as any change in place.

torch counts the changes of a tensor, but not those through its `.data`, which is how averages of
parameters are often swapped in and out. So `.data` of a shared parameter is `detach()`, which
differs from it only in that changes are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["show_changes"]

_plain: Any = torch.Tensor.data
_shared: set[int] = set()


def show_changes(owner: object, parameters: Sequence[torch.Tensor]) -> None:
    """Do it for these parameters, as long as their owner is there. Not collective."""
    keys = {id(parameter) for parameter in parameters}
    _shared.update(keys)
    weakref.finalize(owner, _shared.difference_update, keys).atexit = False
    torch.nn.Parameter.data = _property  # type: ignore[assignment]


def _read(parameter: Any) -> Any:
    return parameter.detach() if id(parameter) in _shared else _plain.__get__(parameter)


_property = property(_read, _plain.__set__, None, _plain.__doc__)
