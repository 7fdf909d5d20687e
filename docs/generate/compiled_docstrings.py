"""Give what stubs declare the docstrings of the compiled modules, for mkdocstrings.

The docstrings are in the .pyx, which griffe does not read; the types are in the .pyi beside it,
which has none.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import griffe


class CompiledDocstrings(griffe.Extension):
    """Looks the docstring of a function or class of a stub up in the .pyx of the same name."""

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Complete a function. Called by griffe."""
        _complete(func)

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Complete a class. Called by griffe."""
        _complete(cls)


def _complete(found: griffe.Function | griffe.Class) -> None:
    path = found.filepath
    if found.docstring is not None or not isinstance(path, Path) or path.suffix != ".pyi":
        return
    source = path.with_suffix(".pyx").read_text(encoding="utf-8")
    head = rf"^ *(?:cp?def |cdef class |class |def )[^\n]*\b{re.escape(found.name)}\b[^\"#]*?:\n"
    written = re.search(head + r'\s*"""(.*?)"""', source, re.M | re.S)
    if written is not None:
        found.docstring = griffe.Docstring(inspect.cleandoc(written[1]), parent=found)
