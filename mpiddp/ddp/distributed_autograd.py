"""Average the gradients that torch.distributed.autograd keeps in its contexts.

Note [Distributed autograd]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
`torch.distributed.autograd.backward` keeps gradients in a context instead of ``.grad``, and calls
no post-accumulate hooks. It does call the hooks of the nodes that accumulate gradients, after it
has put a gradient into the context. There we let ``.grad`` be the context's gradient for as long as
the pass takes, so that the reducer does what it always does. At the end the means are written into
the context, and ``.grad`` is again what it was.

No node is current in such a hook; in a plain backward the accumulating one is. A hook of the
outputs tells the passes apart by the same: on the CPU a loop of its own runs the graph and sets no
current node, and the threads of other devices execute no node that accumulates a gradient.

The thread that runs the graph does not tell Python which context it works for. It is the one that a
call of `backward` on this rank names, or that the forward pass was in, as it is where another
worker has called `backward`.

What a context holds can be changed in place only. So a parameter that got a gradient on other ranks
alone cannot be served; nor can torch's own class.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed.rpc as rpc

from mpiddp.reducer.backward_kinds import accumulates, accumulating_node
from mpiddp.torch_internals.patching import replace_function

if TYPE_CHECKING:
    from mpiddp.reducer.state import ReducerState

if rpc.is_available():
    import torch.distributed.autograd  # before its functions are replaced
    from torch._C import _distributed_autograd as dist_autograd
    from torch._C._distributed_rpc import _is_current_rpc_agent_set

__all__ = ["may_be_used", "watch"]

Gradients = dict[torch.Tensor, torch.Tensor]

# The contexts for which this rank runs `backward` now, in all its threads.
_running: list[int] = []
_is_watched = False
_served: weakref.WeakKeyDictionary[ReducerState, ContextGradients] = weakref.WeakKeyDictionary()

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


def may_be_used() -> bool:
    """Return whether there may be distributed backward passes. Not collective."""
    return rpc.is_available() and _is_current_rpc_agent_set()


def watch(reducer: ReducerState, outputs: Iterable[torch.Tensor]) -> None:
    """Serve the distributed backward passes that begin at or after `outputs`. Not collective.

    Args:
        reducer: of the wrapped module.
        outputs: of the module.
    """
    served = _served.get(reducer)
    if served is None:
        served = _served[reducer] = ContextGradients(reducer)
    served.watch(outputs)


def _watch_calls() -> None:
    """Know the contexts for which `backward` is called from now on."""
    global _is_watched
    if _is_watched:
        return
    _is_watched = True

    def noting(backward: Callable[..., None]) -> Callable[..., None]:
        def call(context_id: int, *args: Any, **kwargs: Any) -> None:
            _running.append(context_id)
            try:
                backward(context_id, *args, **kwargs)
            finally:
                _running.remove(context_id)

        return call

    replace_function(dist_autograd.backward, noting)


def _present_context() -> int | None:
    """Return the number of the context that this thread is in."""
    try:
        return int(dist_autograd._current_context()._context_id())
    except RuntimeError:
        return None


def _gradients_in(context: int) -> Gradients:
    """Return what a context holds, nothing if it has ended."""
    try:
        return dist_autograd.get_gradients(context)
    except RuntimeError:
        return {}


class ContextGradients:
    """Serves the distributed backward passes of one wrapped module.

    Not collective, but for what the reducer does.

    Args:
        reducer: of the module; it is not kept alive.
    """

    def __init__(self, reducer: ReducerState) -> None:
        _watch_calls()
        self._reducer = weakref.proxy(reducer)
        # A node that nobody holds is made anew, without hooks.
        self._nodes: list[torch.autograd.graph.Node | None] = [None] * len(reducer.parameters)
        self._forwards: list[int] = []
        # During a pass: the context, what .grad was, and its values.
        self._context: int | None = None
        self._before: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Notice distributed backward passes that begin at `outputs`. Not collective."""
        self._restore()  # after a pass that raised
        self._hook_nodes()
        context = _present_context()
        if context is not None and context not in self._forwards:
            self._forwards.append(context)
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(self._begin_at)  # type: ignore[no-untyped-call]

    def _begin_at(self, gradient: torch.Tensor) -> None:
        if self._reducer.expecting and _is_distributed(gradient, self._reducer.parameters):
            self._begin()

    def _hook_nodes(self) -> None:
        """Have a hook on the node of each parameter, which is another after `module.to()`."""
        for index, parameter in enumerate(self._reducer.parameters):
            node = accumulating_node(parameter)
            if node is not None and node is not self._nodes[index]:
                self._nodes[index] = node
                node.register_hook(_make_hook(weakref.ref(self), index))

    def _begin(self) -> None:
        """Put what the parameters' .grad is aside until the end of the pass."""
        if self._before:
            return
        if self._reducer.narrow_parameters is not None:
            self._raise("mixed precision is not supported there. Call loss.backward()")
        views = self._reducer.gradient_as_bucket_view
        for parameter in self._reducer.parameters:
            gradient = parameter.grad
            # A view of a bucket holds other values when the bucket has been reduced.
            kept = gradient.clone() if views and gradient is not None else None
            self._before.append((gradient, kept))
            parameter.grad = None
        # The reducer may queue its callback later in the pass: come after it.
        _queue_callback(lambda: _queue_callback(self._end))

    def take(self, index: int) -> None:
        """Hand the gradient that the context now has of a parameter to the reducer."""
        if not self._reducer.expecting:
            return  # without synchronisation
        self._begin()
        parameter = self._reducer.parameters[index]
        if self._context is None:
            self._context = self._find_context(parameter)
        gradients = _gradients_in(self._context)
        if parameter not in gradients:
            self._raise(f"{self._name(index)} has no gradient in context {self._context}")
        parameter.grad = gradients[parameter]
        self._reducer.run_hook(index)

    def _find_context(self, parameter: torch.Tensor) -> int:
        """Return the context of the present pass, which has a gradient of `parameter`."""
        known = [*reversed(_running), *reversed(self._forwards)]
        found = [context for context in known if parameter in _gradients_in(context)]
        if not found:
            self._raise(
                "it is not known for which context: the forward pass was in none, and "
                "torch.distributed.autograd.backward was imported by its name before mpiddp "
                "could watch it. Call it as torch.distributed.autograd.backward, or run the "
                "module inside of the context"
            )
        return found[0]

    def _end(self) -> None:
        """Write the means into the context. Autograd's final callback, after the reducer's."""
        try:
            self._write_means()
        finally:
            self._restore()
            self._forwards.clear()

    def _write_means(self) -> None:
        reducer = self._reducer
        gradients: Gradients = {}
        for context in [self._context] if self._context is not None else _running:
            gradients |= _gradients_in(context)
        for index, parameter in enumerate(reducer.parameters):
            own, mean = gradients.get(parameter), parameter.grad
            if mean is None or mean is own:
                continue
            if own is None:
                self._raise(
                    f"{self._name(index)} has no gradient on this rank, but on another one, and "
                    f"a context cannot be given the mean. Let each rank use it, as by adding "
                    f"`0 * parameter.sum()` to the loss"
                )
            with torch.no_grad():
                own.copy_(mean)

    def _restore(self) -> None:
        before, self._before = self._before, []
        for index, (gradient, kept) in enumerate(before):
            if gradient is not None and kept is not None:
                with torch.no_grad():
                    gradient.copy_(kept)
            self._reducer.parameters[index].grad = gradient
        self._context = None

    def _name(self, index: int) -> str:
        return f"parameter {self._reducer.describe_parameter(index)}"

    def _raise(self, problem: str) -> NoReturn:
        message = (
            f"rank {self._reducer.process_group.me}: in torch.distributed.autograd.backward of "
            f"an mpiddp.DistributedDataParallel module: {problem}."
        )
        # torch's engine reduces an error from Python to the text "python_error".
        print(message, file=sys.stderr, flush=True)
        raise RuntimeError(message)


def _make_hook(
    served: weakref.ref[ContextGradients], index: int
) -> Callable[[tuple[Any, ...], tuple[Any, ...]], None]:
    def hook(made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        gradients = served()
        if gradients is not None and torch._C._current_autograd_node() is None:
            gradients.take(index)

    return hook


def _is_distributed(gradient: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
    if torch._C._current_autograd_node() is None:
        return True
    return gradient.device.type != "cpu" and not any(map(accumulates, parameters))
