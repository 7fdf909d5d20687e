"""Replace functions of torch.distributed by ones that also handle mpiddp.

- ``init_process_group("mpiddp")``, or ``"ccl"``, gets rank, size and store from MPI. torch looks
  for ranks and addresses before it asks a backend for anything, and for "env://", its default, it
  wants MASTER_ADDR. So a call that names our backend is completed before torch sees it. The same
  holds for "tcp://", where torch would serve a store to whoever connects.
- ``split_group``: torch's own splits NCCL's communicators and refuses where there is no
  accelerator. For groups of mpiddp, the members of each part create their own group.
- ``monitored_barrier``: torch's own handles only Gloo's groups.
- ``_set_pg_timeout``, before torch 2.14: torch's own changes Gloo's and NCCL's limits only.
- names of groups that only their members make (`use_local_synchronization`): see `_naming`.
- ``checkpoint.async_save``: see asynchronous_saves.py.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpiddp.mpi import nodes, uncaught
from mpiddp.process_group import asked_backend
from mpiddp.rendezvous import asynchronous_saves, world, worlds_apart
from mpiddp.torch_internals.backend_names import names_mpiddp, true_name
from mpiddp.torch_internals.patching import replace_function
from mpiddp.torch_internals.versions import new_group_in_order

if TYPE_CHECKING:
    from mpi4py import MPI


__all__ = ["install"]


def install() -> None:
    """Let the functions of torch.distributed named above handle mpiddp. Not collective.

    A completed ``init_process_group`` is collective over MPI.COMM_WORLD.
    """
    replace_function(dist.init_process_group, _completing)
    replace_function(dist.monitored_barrier, _with_mpiddp)
    replace_function(dist.split_group, _splitting)
    replace_function(dist.distributed_c10d._process_group_name, _naming)
    if not hasattr(dist, "set_timeout"):
        replace_function(dist.distributed_c10d._set_pg_timeout, _setting_timeout)
    asynchronous_saves.install()


def _completing(torchs: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(torchs)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        named = given.get("backend")
        if names_mpiddp(named):
            uncaught.watch_if_initialised()
        if (
            not names_mpiddp(named)
            or world.is_starting()
            # torch raises its own errors for these.
            or dist.is_initialized()
            or None not in (given.get("store"), given.get("init_method"))
        ):
            torchs(*args, **kwargs)
            return

        def start(communicator: MPI.Intracomm, topology: nodes.Topology) -> None:
            worlds_apart.refuse_contradictions(communicator, topology, given)
            torchs(**_completed(communicator, topology, given))
            _bind_device(given.get("device_id"))

        timeout = given.get("timeout")
        if not isinstance(timeout, timedelta):
            timeout = world.DEFAULT_TIMEOUT  # torch refuses what is wrong
        world.begin_world(None, start, timeout)
        asked_backend.note(None if true_name(str(named)) == named else named)

    return init_process_group


def _completed(
    communicator: MPI.Intracomm, topology: nodes.Topology, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments, completed from MPI. Collective over `communicator`."""
    arguments = dict(given)
    by_mpi = worlds_apart.meets_by_mpi(given)
    # What a URL says agrees with MPI; torch refuses to be told twice.
    in_url = () if by_mpi else worlds_apart.in_url(given)
    if "rank" not in in_url:
        arguments["rank"] = topology.rank
    if "world_size" not in in_url:
        arguments["world_size"] = topology.world_size
    if by_mpi:
        arguments["init_method"] = None
        timeout = given.get("timeout")
        if not isinstance(timeout, timedelta):
            timeout = world.DEFAULT_TIMEOUT  # torch refuses what is neither None nor a time
        arguments["store"] = world.shared_store(communicator, topology, timeout)
    return arguments


def _bind_device(device: torch.device | int | None) -> None:
    """Tell the world its GPU: torch tells it to a group that ours replaces."""
    if device is not None:
        accelerator = torch.accelerator.current_accelerator()
        if isinstance(device, int) and accelerator is not None:
            device = torch.device(accelerator.type, device)
        world: Any = dist.group.WORLD
        world.bound_device_id = device


def _splitting(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def split_group(
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        from mpiddp.process_group.group import ProcessGroup

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


def _with_mpiddp(torchs: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(torchs)

    def monitored_barrier(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        group, timeout, wait_all_ranks = given.arguments.values()
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        module = sys.modules.get("mpiddp.process_group.group")  # importing it would initialise MPI
        if module is None or not isinstance(group, module.ProcessGroup):
            return torchs(*args, **kwargs)  # another backend's, or this rank is not in it
        if isinstance(timeout, float):
            warnings.warn(
                f"monitored_barrier takes a timedelta; {timeout} is taken for seconds",
                stacklevel=2,
            )
            timeout = timedelta(seconds=timeout)
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(
                f"Expected timeout argument to be of type datetime.timedelta, got {timeout}"
            )
        return group.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


def _setting_timeout(torchs: Callable[..., None]) -> Callable[..., None]:
    def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        module = sys.modules.get("mpiddp.process_group.group")  # importing it would initialise MPI
        given: Any = dist.group.WORLD if group is None and dist.is_initialized() else group
        if module is None or not isinstance(given, module.ProcessGroup):
            torchs(timeout, group)
        else:
            given.set_timeout(timeout)

    return _set_pg_timeout


def _naming(torchs: Callable[..., str]) -> Callable[..., str]:
    """Name such groups by their ranks and by how many of these ranks there were in this world.

    torch takes how many groups there were on this rank. Where groups come and go that gives a name
    twice, which torch refuses, and other names on other ranks, by which roll call takes them for
    other groups. Since 2.14 torch also counts such groups, on their members only, so that the names
    of later groups of all ranks, which are that count, would differ: here they do not count.
    """
    made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]]
    made = weakref.WeakKeyDictionary()

    def _process_group_name(ranks: Sequence[int], use_hashed_name: bool) -> str:
        module = sys.modules.get("mpiddp.process_group.group")  # importing it would initialise MPI
        world: Any = dist.group.WORLD if dist.is_initialized() else None
        if not use_hashed_name or module is None or not isinstance(world, module.ProcessGroup):
            return torchs(ranks, use_hashed_name)
        ranks = tuple(int(rank) for rank in ranks)
        before = made.setdefault(world, Counter())
        before[ranks] += 1
        return hashlib.sha1(f"{ranks} {before[ranks]}".encode(), usedforsecurity=False).hexdigest()

    return _process_group_name
