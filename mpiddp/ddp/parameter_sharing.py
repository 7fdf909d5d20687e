"""The wrapper's part of sharing parameters within a node: who may read, and `writing`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp import memory_domains
from mpiddp.ddp.arguments import warn_of_replicas
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
    # Which ranks are to share, as in `memory_domains`.
    _wants_sharing: str
    # Number of this rank's domain in its node.
    _domain = 0

    def _find_domain(self) -> int | None:
        """Return the number of this rank's domain, None if nothing is shared. Collective."""
        if not self._wants_sharing:
            return None
        self._domain = memory_domains.find(self.process_group, self._wants_sharing)
        return self._domain

    def _share_parameters(self, by_variable: bool) -> None:
        """Move the parameters into shared memory. Collective.

        Args:
            by_variable: nobody depends on it: where it cannot be, or nothing would be shared, each
                rank keeps its own.
        """
        name = type(self.module).__name__
        if by_variable and self._most_ranks_of_a_domain() == 1:
            if self.process_group.size() > 1:
                warn_of_replicas(name, "no two ranks lie beside the same memory")
            return
        named = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        }
        try:
            shared = SharedParameters(named, self.reducer, self.process_group, self._domain)
        except OSError as error:  # the same on all ranks
            if not by_variable:
                raise
            warn_of_replicas(name, error)
            return
        self._shared_parameters = shared
        wrapper = weakref.ref(self)
        shared.wrapper = wrapper

        def is_uneven() -> bool:
            found = wrapper()
            return found is not None and found._join_config.enable

        shared.is_uneven = is_uneven
        _install_hooks(self.module, shared)

    def _most_ranks_of_a_domain(self) -> int:
        domain = memory_domains.ranks_of_domain(self.process_group.communicator, self._domain)
        ranks = domain.Get_size()
        domain.Free()
        return max(self.process_group.allgather_objects(ranks))

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which parameters may be changed in place.

        Collective: all ranks enter it together, do the same, and leave it together. Parameters
        may be changed anywhere; where they are shared, what all ranks have changed is the node's
        from the next step on, and from the end of this context on if it is changed here. What the
        first rank of each node has made of it holds. An exception leaves the parameters as they
        were, and ends training on all ranks. Without `shared_parameters` it does nothing.

        Raises:
            RuntimeError: another rank raised in it, or did not come; or parameters are shared, and
                this is within join(), where other ranks may be without inputs.
        """
        shared = self._shared_parameters
        if shared is not None:
            shared.refuse_in_join()
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
            if torch.is_grad_enabled():
                self._shared_parameters.scaling.multiply_all()
        return super()._pre_forward(*inputs, **kwargs)


class _ModuleHook:
    """A hook of the wrapped module, which does nothing in copies of it.

    Args:
        shared: the parameters of the module; None in a copy.
    """

    def __init__(self, shared: SharedParameters | None) -> None:
        self._shared = None if shared is None else weakref.ref(shared)

    def __call__(self, *arguments: Any) -> None:
        # Compiled code is called by the wrapper's forward, which has looked.
        if self._shared is None or torch.compiler.is_compiling():
            return
        shared = self._shared()
        if shared is not None:
            shared.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHook, (None,)


def _install_hooks(module: torch.nn.Module, shared: SharedParameters) -> None:
    """Let a module, or a part of it, that is used without its wrapper look, too."""
    module.register_forward_pre_hook(_ModuleHook(shared))
    for part in module.modules():
        part.register_state_dict_pre_hook(_ModuleHook(shared))
