"""Errors of a backward pass, for the reducer: what happened, on which rank, what to do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from mpiddp.flight_recorder import files

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup
    from mpiddp.reducer.bucket import Bucket
    from mpiddp.reducer.interface import DescribedReducer

_SHOWN = 10

# Sentences that scripts look for in the errors of torch's class.
_UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one."
)
_GRAPH_CHANGED = (
    "This error indicates that your training graph has changed in this iteration, e.g., one "
    "parameter is used in first iteration, but then got unused in the second iteration. this is "
    "not compatible with static_graph set to True."
)


def raise_missing_gradients(
    process_group: ProcessGroup,
    missing: Sequence[tuple[int, int]],
    describe_parameter: Callable[[int], str],
    name_parameter: Callable[[int], str],
    static_graph: bool = False,
) -> NoReturn:
    """Raise on all ranks, naming the parameters that got no gradient, and where.

    Collective: all ranks know from the reduced flags that some rank missed some.

    Args:
        process_group: the ranks.
        missing: pairs (parameter index, bucket index) that this rank missed.
        describe_parameter: returns the name and shape of a parameter.
        name_parameter: returns its name.
        static_graph: whether the first backward has told which gradients to expect.

    Raises:
        RuntimeError: always.
    """
    where: dict[tuple[int, int], list[int]] = {}
    for rank, pairs in enumerate(process_group.allgather_objects(list(missing))):
        for pair in pairs:
            where.setdefault(pair, []).append(rank)
    shown = [
        f"{describe_parameter(index)}, bucket {bucket}, on {ranks_of(process_group, ranks)}"
        for (index, bucket), ranks in sorted(where.items())
    ]
    rest = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    if static_graph:
        advice = (
            "In the first iteration they had one. Leave static_graph out, and pass "
            "find_unused_parameters=True if parameters may be unused"
        )
    else:
        advice = (
            "If that is what your model does, say so by passing the keyword argument "
            "`find_unused_parameters=True` to DistributedDataParallel; if not, make sure that all "
            "`forward` function outputs participate in calculating loss, and every parameter in "
            "an output, on all ranks"
        )
    own = [index for index, _ in missing]
    raise RuntimeError(
        f"{_UNFINISHED}{' ' + _GRAPH_CHANGED if static_graph else ''}"
        f"{_without_gradient(process_group.me, own)}"
        f"{_named_without_gradient(process_group.me, own, name_parameter)}\n"
        f"These parameters got no gradient in the last backward: "
        f"{'; '.join(shown[:_SHOWN])}{rest}. "
        f"The others were averaged, with zeros for what was missing. {advice}.{_more()}"
    )


def raise_unfinished(
    left: Sequence[int],
    count: int,
    rank: str,
    describe_parameter: Callable[[int], str],
    static_graph: bool,
) -> NoReturn:
    """Raise for a backward that ended before all gradients were reduced. Not collective.

    Args:
        left: indices of the parameters that were not ready.
        count: how many parameters there are.
        rank: this one, as `process_group.me`.
        describe_parameter: returns the name and shape of a parameter.
        static_graph: whether the first backward has told which gradients to expect.

    Raises:
        RuntimeError: always.
    """
    shown = [describe_parameter(index) for index in left[:_SHOWN]]
    rest = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    raise RuntimeError(
        f"{_UNFINISHED}{' ' + _GRAPH_CHANGED if static_graph else ''}"
        f"{_without_gradient(rank, left)}\n"
        f"the previous backward pass ended before all gradients were reduced: "
        f"{count - len(left)} of {count} parameters had theirs"
        f"{', but not ' if shown else ''}{', '.join(shown)}{rest}. "
        f"Either it raised an exception, or a second forward pass began inside of it. After an "
        f"exception this wrapper cannot go on, nor can those of the other ranks: catch it on all "
        f"ranks, and let all of them wrap the module again, as in "
        f"model = DistributedDataParallel(model.module)."
    )


def _without_gradient(rank: str, indices: Sequence[int]) -> str:
    if not indices:
        return ""
    listed = " ".join(map(str, indices))
    return f"\nParameter indices which did not receive grad for rank {rank}: {listed}"


def _named_without_gradient(
    rank: str, indices: Sequence[int], name_parameter: Callable[[int], str]
) -> str:
    if not indices:
        return ""
    rest = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    listed = ", ".join(name_parameter(index) for index in indices[:_SHOWN])
    return f"\nParameters which did not receive grad for rank {rank}: {listed}{rest}"


def _more() -> str:
    """Return where to look for more, unless it is switched on already."""
    if get_debug_level() != DebugLevel.OFF:
        return ""
    return (
        " To have the collectives of all ranks compared as well, set the environment variable "
        "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL (only DETAIL compares)."
    )


def raise_used_again(parameter: str, static_graph: bool, skipped: bool) -> NoReturn:
    """Raise for a hook that ran although its parameter was ready. Not collective.

    Args:
        parameter: its name and shape.
        static_graph: whether the first backward has told how often it is used.
        skipped: whether its bucket is left out because no rank used it.

    Raises:
        RuntimeError: always.
    """
    if skipped:
        raise RuntimeError(
            f"{parameter} was used by no rank in the first iteration that was reduced, so its "
            f"bucket is skipped, but it is used now. skip_all_reduce_unused_params=True needs "
            f"the same unused parameters in every iteration: leave it out."
        )
    if static_graph:
        raise RuntimeError(
            f"Your training graph has changed in this iteration: {parameter} was used more often "
            f"than in the first one, or for the first time. This is not compatible with "
            f"static_graph set to True: leave it out, or compute the same in every iteration."
        )
    raise RuntimeError(
        f"Expected to mark a variable ready only once. The gradient of {parameter} was accumulated "
        f"a second time in one backward pass: the parameter is used in several reentrant backward "
        f"passes (torch.utils.checkpoint with use_reentrant=True), or outside of the wrapped "
        f"module's forward. Use use_reentrant=False, or compute all uses in one forward; or, if "
        f"every iteration computes the same graph, pass static_graph=True to "
        f"DistributedDataParallel."
    )


def raise_second_backward(
    parameters: Sequence[int], rank: str, describe_parameter: Callable[[int], str]
) -> NoReturn:
    """Raise for a backward after the one whose gradients were averaged. Not collective.

    Args:
        parameters: indices of those that got no gradient in the first one.
        rank: this one.
        describe_parameter: returns the name and shape of a parameter.

    Raises:
        RuntimeError: always.
    """
    shown = ", ".join(describe_parameter(index) for index in parameters[:_SHOWN])
    more = f" and {len(parameters) - _SHOWN} more" if len(parameters) > _SHOWN else ""
    raise RuntimeError(
        f"Expected to mark a variable ready only once. rank {rank}: this is a second backward pass "
        f"after one forward of the wrapped module. The first one was averaged over the ranks "
        f"without gradients for {shown}{more}, and what this one adds would not be averaged. Add "
        f"the losses and call backward once; or call forward for each of them, and pass "
        f"find_unused_parameters=True to DistributedDataParallel."
    )


def raise_other_kind(parameter: str, gradient: torch.Tensor, expected: torch.dtype) -> NoReturn:
    """Raise for a gradient that does not fit into its place. Not collective.

    Raises:
        RuntimeError: always.
    """
    if gradient.layout is not torch.strided:
        hint = (
            " Modules whose gradient is sparse must say so before they are wrapped (Embedding and "
            "EmbeddingBag with sparse=True)."
        )
    else:
        hint = " A module whose parameters change shape or dtype must be wrapped again."
    raise RuntimeError(
        f"{parameter} got a gradient of shape {tuple(gradient.shape)}, dtype {gradient.dtype} and "
        f"layout {gradient.layout}, but its bucket holds {expected}, torch.strided, in the shape "
        f"that the parameter had when it was wrapped.{hint}"
    )


def raise_no_view(process_group: ProcessGroup, parameter: str) -> NoReturn:
    """Raise for a gradient that left its bucket while it was averaged. Not collective.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"rank {process_group.me}: the gradient of {parameter} was replaced, or its data was, "
        f"after it had been taken to be averaged. It is expected to be a view of its bucket, as "
        f"gradient_as_bucket_view=True says. Change gradients in hooks that "
        f"register_post_accumulate_grad_hook adds to this very parameter, or after backward."
    )


def refuse_shared_views(
    reducer: DescribedReducer, others: Sequence[weakref.ref[DescribedReducer]]
) -> None:
    """Refuse a backward in which two reducers want the same gradients in their buckets.

    Not collective.

    Args:
        reducer: of this backward.
        others: those of modules that share parameters with it.

    Raises:
        RuntimeError: one of them expects gradients too, and one of the two has views.
    """
    for reference in others:
        other = reference()
        if other is None or not other.expecting:
            continue
        if not (reducer.gradient_as_bucket_view or other.gradient_as_bucket_view):
            continue
        theirs = {id(parameter) for parameter in other.parameters}
        shared = [
            reducer.describe_parameter(index)
            for index, parameter in enumerate(reducer.parameters)
            if id(parameter) in theirs
        ]
        raise RuntimeError(
            f"{shared[0]} and {len(shared) - 1} more belong to two wrapped modules that are "
            f"reduced in the same backward, and a gradient cannot be a view into two buckets: wrap "
            f"the module once, or wrap it without gradient_as_bucket_view=True."
        )


def raise_timed_out(reducer: DescribedReducer, bucket: Bucket, missing: str) -> NoReturn:
    """Raise for a bucket that other ranks have not reduced in time. Not collective.

    Args:
        reducer: the bucket's.
        bucket: the one that was waited for.
        missing: which ranks have not filled it, in a sentence.

    Raises:
        RuntimeError: always.
    """
    group = reducer.process_group
    written = files.dump_for(f"{reducer.describe_bucket(bucket)} has waited in vain. {missing}")
    raise RuntimeError(
        f"rank {group.me}: the all-reduce of {reducer.describe_bucket(bucket)} has waited "
        f"{group.timeout.total_seconds():g} s for other ranks. {missing} Likely causes: a rank "
        f"skipped this backward pass or left the training loop early (uneven numbers of batches: "
        f"train inside of `with model.join():`), a rank has failed or hangs elsewhere, or one rank "
        f"is far slower (then raise the timeout of init_process_group). {written}".rstrip()
    )


def ranks_of(group: ProcessGroup, ranks: Sequence[int]) -> str:
    """Return words for ranks of a group: their numbers in the world. Not collective."""
    known = list(group.world_ranks)
    listed = ", ".join(str(known[rank]) for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    of_world = "" if known == list(range(len(known))) else " of the world"
    return f"rank{'s' * (len(ranks) > 1)} {listed}{more}{of_world}"
