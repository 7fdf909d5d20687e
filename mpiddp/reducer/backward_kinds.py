"""Tell backward passes that add to ``.grad`` from those that only return gradients.

Note [Passes that return gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`torch.autograd.grad` and ``backward(inputs=...)`` with other tensors, as for a gradient penalty,
run hooks of outputs and add to no parameter's gradient. Such a pass must reduce nothing, or the
next one would find its iteration reduced already. autograd's engine tells whether it will execute
the node that accumulates a parameter's gradient. If it will execute none, either this is such a
pass, or the outputs reach no parameter on this rank, and the others wait for its zeros. Only then
is the graph searched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["accumulates", "accumulating_node", "adds_to_gradients"]


def accumulating_node(parameter: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the node of the graph that accumulates the gradient of a parameter.

    None for one that needs no gradient, and within transforms of torch.func.
    """
    with torch.enable_grad():
        graph = parameter.expand_as(parameter).grad_fn
    return None if graph is None else graph.next_functions[0][0]


def accumulates(parameter: torch.Tensor) -> bool:
    """Return whether this backward pass adds to ``parameter.grad``. Not collective."""
    node = accumulating_node(parameter)
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # The gradient is captured. Other errors say nothing: compiled autograd cannot tell.
        return "autograd.grad" not in str(error)


def adds_to_gradients(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether this backward pass is one whose gradients are to be reduced.

    Not collective; called in a hook of an output. See Note [Passes that return gradients].

    Args:
        parameters: of the module.
    """
    if any(map(accumulates, parameters)):
        return True
    node = torch._C._current_autograd_node()
    return node is None or not _reaches(node, parameters)


def _reaches(node: torch.autograd.graph.Node, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether the graph from `node` on reaches one of these parameters."""
    wanted = set(map(id, parameters))
    found = {node}
    left = [node]
    while left:
        current = left.pop()
        if id(getattr(current, "variable", None)) in wanted:
            return True
        for following, _ in current.next_functions:
            if following is not None and following not in found:
                found.add(following)
                left.append(following)
    return False
