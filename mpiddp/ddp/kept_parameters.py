"""Find parameters that have left their reducer before a backward: each rank would train them alone.

Note [Parameters that leave]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The reducer's hooks belong to the tensors that the module had when it was wrapped. A parameter
leaves in three ways:

- Its tensor is exchanged behind the same Python object: `torch.utils.swap_tensors`, which
  conversions and `load_state_dict` use where `torch.__future__` says so. That refuses tensors with
  weak references, so there is one to each parameter, and the exchange fails as with torch's class.
- Another `Parameter` takes its place in the module: by an assignment, by
  ``load_state_dict(assign=True)``, by conversions that overwrite. torch's class then lets each
  rank train alone.
- Its hooks are cleared.

After an exchange, before a module is wrapped or when its wrapper is gone, Python's dictionary of
hooks is that of the tensor that was there before, and autograd does not know it: `link_hooks`.

The last two are looked for at the end of each forward. Only `torch.func.functional_call` may put
others in their place, for one call: its caller takes their gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import contains, is_
from typing import NoReturn

import torch

__all__ = ["KeptParameters", "link_hooks"]

_REPLACING_FOR_A_CALL = ("torch.nn.utils.stateless", "torch._functorch.functional_call")


def link_hooks(parameters: Sequence[torch.Tensor]) -> None:
    """Let autograd call the post-accumulate hooks that Python knows. Not collective."""
    for parameter in parameters:
        if parameter._post_accumulate_grad_hooks is not None:
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


class KeptParameters:
    """The parameters of one reducer, and where they are in the module. Not collective.

    Args:
        module: what is wrapped.
        parameters: those of the reducer, which has just registered its hooks.
        describe: returns what to call a parameter, by index.
        rank: this one, for errors.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        describe: Callable[[int], str],
        rank: str,
    ) -> None:
        self._parameters = parameters
        self._describe = describe
        self._rank = rank
        self._references = [weakref.ref(parameter) for parameter in parameters]
        self._hooks = [parameter._post_accumulate_grad_hooks or {} for parameter in parameters]
        self._keys = [next(reversed(hooks)) for hooks in self._hooks]
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        # A ScriptModule has something else there.
        owners = [m._parameters for m in module.modules() if isinstance(m._parameters, dict)]
        self._places = [
            (owner, name, indices[id(value)])
            for owner in owners
            for name, value in owner.items()
            if id(value) in indices
        ]
        self._owners = list({id(owner): owner for owner, _, _ in self._places}.values())
        self._values = list(self._present())

    def _present(self) -> Iterator[torch.Tensor | None]:
        return chain.from_iterable(map(dict.values, self._owners))

    def check(self) -> None:
        """Raise unless each parameter is in its place, and has its hook.

        Raises:
            RuntimeError: the error names the parameter.
        """
        # No line of Python for each parameter: this is done in every iteration.
        if not all(map(contains, self._hooks, self._keys)):
            for index, (hooks, key) in enumerate(zip(self._hooks, self._keys, strict=True)):
                if key not in hooks:
                    self._raise(index, "has lost the hook by which mpiddp sees its gradient")
        if not all(map(is_, self._present(), self._values)):
            self._find_replaced()

    def _find_replaced(self) -> None:
        if _replaced_for_a_call():
            return
        known = set(map(id, self._parameters))
        for owner, name, index in self._places:
            new = owner.get(name)
            if isinstance(new, torch.nn.Parameter) and new.requires_grad and id(new) not in known:
                self._raise(index, "has been replaced by another one")
        # Moved, as by a parametrization, or not trained any more: so it is from now on.
        self._values = list(self._present())

    def _raise(self, index: int, what: str) -> NoReturn:
        raise RuntimeError(
            f"rank {self._rank}: {self._describe(index)} {what} since the module was wrapped in "
            f"DistributedDataParallel, so its gradient would not be averaged. Wrap the module "
            f"again after such a change, as in model = DistributedDataParallel(model.module), and "
            f"give the optimizer the new parameters."
        )


def _replaced_for_a_call() -> bool:
    """Return whether a caller has put other parameters in place until its call returns."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") in _REPLACING_FOR_A_CALL:
            return True
    return False
