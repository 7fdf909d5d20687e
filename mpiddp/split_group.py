"""torch.distributed.split_group for groups of mpiddp.

torch's own splits NCCL's communicators and refuses where there is no accelerator. Of ours the
members of each part make a group by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mpiddp.init_by_name import names_mpiddp
from mpiddp.replacement import replace_function
from mpiddp.torch_versions import new_group_in_order

__all__ = ["install"]


def install() -> None:
    """Let torch.distributed.split_group split groups of mpiddp. Not collective."""
    replace_function(dist.split_group, _splitting)


def _splitting(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def split_group(
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        from mpiddp.process_group import ProcessGroup

        parent = dist.group.WORLD if parent_pg is None else parent_pg
        if not isinstance(parent, ProcessGroup):
            given = () if backend is None else (backend,)  # not known before torch 2.13
            return torchs(parent_pg, split_ranks, timeout, pg_options, group_desc, *given)
        part = _own_part(parent, split_ranks or [])
        if backend is not None and not names_mpiddp(str(backend)):
            raise ValueError(f"a group of mpiddp splits into groups of mpiddp, not of {backend!r}")
        if part is None:
            return None
        world_ranks = dist.get_process_group_ranks(parent)
        return new_group_in_order(
            [world_ranks[rank] for rank in part],
            timeout=parent.timeout if timeout is None else timeout,
            pg_options=pg_options,
            use_local_synchronization=True,
            group_desc=group_desc,
        )

    return split_group


def _own_part(parent: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the part with this rank, in order of ranks in the parent; None if there is none.

    Raises:
        ValueError: there are no parts, or one is empty, too large, or has a rank twice.
    """
    if not parts:
        raise ValueError("split_ranks cannot be None or empty")
    own = None
    taken: set[int] = set()
    for part in parts:
        if not part:
            raise ValueError("the split group cannot be empty")
        if not set(part) <= set(range(parent.size())):
            raise ValueError(f"{list(part)} are not all ranks of a group of {parent.size()}")
        if len(set(part)) < len(part) or taken & set(part):
            raise ValueError("the split groups cannot have duplicate ranks")
        taken |= set(part)
        if parent.rank() in part:
            own = sorted(part)
    return own
