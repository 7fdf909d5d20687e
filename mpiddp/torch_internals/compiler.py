"""Keep torch.compile from tracing mpiddp's own Python code.

torch excludes its own wrapper from compilation, frame by frame. Our functions that it calls, to
copy buffers or to log, would otherwise be compiled one by one: slowly, and in vain where the code
meets a process group, which is opaque to the compiler.
"""

from __future__ import annotations

import types
from typing import TypeVar

from torch._C._dynamo import eval_frame

Traced = TypeVar("Traced", bound=type | types.FunctionType)

# torch.compiler.disable does the same, but imports the compiler, which takes a second.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_SKIP_FRAME = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
)


def skip_compilation(code: Traced) -> Traced:
    """Exclude a function, or a class's own methods, and all they call, from torch.compile."""
    members = vars(code).values() if isinstance(code, type) else [code]
    for member in members:
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return code


def compile_what_it_calls(function: types.FunctionType) -> None:
    """Exclude a function, but not what it calls, from torch.compile."""
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP_FRAME)
