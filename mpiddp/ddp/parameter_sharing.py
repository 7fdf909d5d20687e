"""The wrapper's part of sharing parameters within a node: who may read, and `writing`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp import shared_loading
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
        wrapper = weakref.ref(self)

        def is_uneven() -> bool:
            found = wrapper()
            return found is not None and found._join_config.enable

        shared.is_uneven = is_uneven
        _install_hooks(self.module, shared)

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
        if shared is not None:
            shared_loading.refuse_in_join(shared)
        return nullcontext() if shared is None else shared.writing()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield names and parameters, if these may be read. Overrides torch's method.

        Not collective.
        """
        if self._shared_parameters is not None:
            self._shared_parameters.check()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """See that parameters may be read. Overrides torch's method of this name."""
        if self._shared_parameters is not None:
            self._shared_parameters.check()
            self._shared_parameters.check_unwritten()
        return super()._pre_forward(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """Complete gradients that will be added to. Overrides torch's method of this name."""
        output = super()._post_forward(output)
        if self._shared_parameters is not None and torch.is_grad_enabled():
            self._shared_parameters.watch_backward()
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
        # Compiled code is called by the wrapper's forward, which has looked.
        if self._shared is None or torch.compiler.is_compiling():
            return
        shared = self._shared()
        if shared is not None:
            self._react(shared)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHook, (None, SharedParameters.check)


def _install_hooks(module: torch.nn.Module, shared: SharedParameters) -> None:
    """Let a module, or a part of it, that is used without its wrapper look, too."""
    shared_loading.install()
    module.register_forward_pre_hook(_ModuleHook(shared, SharedParameters.check_unwritten))
    for part in module.modules():
        part.register_state_dict_pre_hook(_ModuleHook(shared, SharedParameters.check))
        part._register_load_state_dict_pre_hook(_ModuleHook(shared, shared_loading.begin))
