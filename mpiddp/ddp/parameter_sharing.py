"""The wrapper's part of sharing parameters within a node: who must wait, and `writing`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel.distributed import _find_tensors

from mpiddp.ddp.shared_parameters import SharedParameters
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.torch_internals.versions import TorchWrapper

if TYPE_CHECKING:
    from mpiddp.ddp.torch_reducer import TorchReducer
    from mpiddp.process_group.group import ProcessGroup


@skip_compilation
class ParameterSharing(TorchWrapper):
    """torch's wrapper, whose parameters may lie in memory that a node's ranks share."""

    process_group: ProcessGroup
    reducer: TorchReducer  # type: ignore[assignment]  # answers to the same calls as torch's
    _shared_parameters: SharedParameters | None = None

    def _share_parameters(self) -> None:
        """Move the parameters into shared memory. Collective."""
        named = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        }
        shared = SharedParameters(named, self.reducer, self.process_group)
        self._shared_parameters = shared
        _install_hooks(self.module, shared, weakref.WeakMethod(self.writing))

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which parameters may be changed in place.

        Collective: all ranks enter it together, do the same, and leave it together. Where
        parameters are shared, each rank changes a copy of its own, and what the first rank of
        each node has made of it holds for the node from then on. An exception leaves the
        parameters as they were, and ends training on all ranks. Without `shared_parameters` it does
        nothing.

        Raises:
            RuntimeError: another rank raised in it, or did not come; or parameters are shared, and
                this is within join(), where other ranks may be without inputs.
        """
        shared = self._shared_parameters
        if shared is not None and self._join_config.enable:
            raise RuntimeError(
                f"rank {self.process_group.rank()}: writing() changes parameters on all ranks, and "
                f"within join() some may be without inputs: do it before or after"
            )
        return nullcontext() if shared is None else shared.writing()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield names and parameters, when these may be read. Overrides torch's method.

        It waits for the other ranks' part of the last step; not collective.
        """
        if self._shared_parameters is not None:
            self._shared_parameters.wait()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Wait until parameters may be read. Overrides torch's method of this name."""
        if self._shared_parameters is not None:
            self._shared_parameters.wait()
            self._shared_parameters.check_unwritten()
        return super()._pre_forward(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """Complete gradients that will be added to. Overrides torch's method of this name."""
        output = super()._post_forward(output)
        if self._shared_parameters is not None and torch.is_grad_enabled():
            self._shared_parameters.watch(_find_tensors(output), self._join_config.enable)
        return output


class _ModuleHook:
    """A hook of the wrapped module, which does nothing in copies of it.

    Args:
        shared: the parameters of the module; None in a copy.
        react: called with them.
    """

    def __init__(
        self, shared: SharedParameters | None, react: Callable[[SharedParameters], None]
    ) -> None:
        self._shared = None if shared is None else weakref.ref(shared)
        self._react = react

    def __call__(self, *arguments: Any) -> None:
        # Compiled code is called by the wrapper's forward, which has waited.
        if self._shared is None or torch.compiler.is_compiling():
            return
        shared = self._shared()
        if shared is not None:
            self._react(shared)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHook, (None, SharedParameters.wait)


def _install_hooks(
    module: torch.nn.Module,
    shared: SharedParameters,
    writing: weakref.WeakMethod[Callable[[], AbstractContextManager[None]]],
) -> None:
    """Let a module, or a part of it, that is used without its wrapper wait, too."""
    module.register_forward_pre_hook(_ModuleHook(shared, SharedParameters.wait))
    for part in module.modules():
        loading = _Loading(writing)
        part.register_state_dict_pre_hook(_ModuleHook(shared, SharedParameters.wait))
        part._register_load_state_dict_pre_hook(_ModuleHook(shared, loading.begin))
        part.register_load_state_dict_post_hook(_ModuleHook(shared, loading.end))


class _Loading:
    """Keeps `writing` open while a module loads a state_dict.

    Args:
        writing: of the wrapper, as long as that is there.
    """

    def __init__(
        self, writing: weakref.WeakMethod[Callable[[], AbstractContextManager[None]]]
    ) -> None:
        self._writing = writing
        self._open: AbstractContextManager[None] | None = None

    def begin(self, shared: SharedParameters) -> None:
        opened = (self._writing() or shared.writing)()
        opened.__enter__()
        self._open = opened

    def end(self, shared: SharedParameters) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
