"""`optimizer.state` as users see it: the whole state of each parameter, and what they change in it.

Note [Edits of the state]
~~~~~~~~~~~~~~~~~~~~~~~~~
The optimizer that steps has blocks of parameters, and a state for each; `NodeOptimizer.state` only
shows the same memory, parameter by parameter. So a change of its dictionaries would do nothing.
These dictionaries note it, and the next step takes all of the state from them, as from a
checkpoint. What is changed in place is the rank's own until then, see Note [Changes of the
program]. Where all ranks have changed the same, the node has it from that step on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

__all__ = ["Changes", "ShownState", "ShownTable"]


class Changes:
    """Whether the user has changed a dictionary."""

    def __init__(self) -> None:
        self.noted = False


class ShownState(dict[str, Any]):
    """The state of one parameter."""

    changes: Changes

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())  # copies are plain


class ShownTable(defaultdict[Any, Any]):
    """The states of all parameters, by parameter.

    Args:
        changes: takes note of what the user does.
    """

    def __init__(self, changes: Changes) -> None:
        super().__init__(dict)
        self.changes = changes

    def __missing__(self, key: Any) -> ShownState:
        # Who only looks has changed nothing.
        self.show(key, {})
        return self[key]  # type: ignore[no-any-return]

    def show(self, key: Any, state: Mapping[str, Any]) -> None:
        """Show a state of a parameter, which is no change. Not collective."""
        shown = ShownState(state)
        shown.changes = self.changes
        dict.__setitem__(self, key, shown)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def _noting(kind: type[Any], name: str) -> Any:
    method = getattr(kind, name)

    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.changes.noted = True
        return method(self, *args, **kwargs)

    return change


for _kind in (ShownState, ShownTable):
    for _name in (
        "__setitem__",
        "__delitem__",
        "__ior__",
        "pop",
        "popitem",
        "clear",
        "update",
        "setdefault",
    ):
        setattr(_kind, _name, _noting(_kind, _name))
