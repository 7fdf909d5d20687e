"""Tell processes that a rank of `python -m mpiddp` starts that a world of theirs is none of MPI's.

Note [Processes that a rank starts]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A forked process has what its rank knows. One by spawn or forkserver begins anew: `mark` gives each
process of multiprocessing an attribute that is unpickled there, which imports this module and lets
init_process_group be checked. Nothing of mpiddp is imported, and nothing of MPI: that takes
seconds, and a data loader's worker needs neither. A program that knows no rank of mpiddp never
comes here. Of programs that a rank starts by `subprocess` only the start is seen, see
runner/launchers_inside.py.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import socket

__all__ = ["check", "is_child", "mark"]

_ATTRIBUTE = "_mpiddp_started_by"
_TORCHS = "torch.distributed"

_WAYS_OUT = (
    "Let the ranks that MPI started do the training themselves: mpirun -n N python -m mpiddp with "
    "the training's own script, which starts no ranks. If this process is to have a world of its "
    "own, {}run python -m mpiddp --keep-spawn"
)


class _Rank(NamedTuple):
    """The rank that starts processes, and where torch's ranks of its job would meet."""

    rank: int
    process_id: int
    world_size: int
    place: str


class _Mark:
    """What a process by spawn finds among its attributes."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _begin, tuple(_parent or ())


_parent: _Rank | None = None

# Signs of this process's worlds; closed with it.
_signs: list[socket.socket] = []


def mark(rank: int, world_size: int) -> None:
    """Let the processes that this rank starts from now on know whose they are. Not collective."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    _know(_Rank(rank, os.getpid(), world_size, f"{address}:{port}"))


def is_child() -> bool:
    """Return whether a marked rank has started this process. Not collective."""
    return _parent is not None and _parent.process_id != os.getpid()


def _know(parent: _Rank) -> None:
    global _parent
    first, _parent = _parent is None, parent
    if not first:
        return
    from multiprocessing.process import BaseProcess

    plain = BaseProcess.start

    @functools.wraps(plain)
    def start(self: Any) -> None:
        vars(self)[_ATTRIBUTE] = _Mark()
        try:
            plain(self)
        finally:
            vars(self).pop(_ATTRIBUTE, None)

    BaseProcess.start = start  # type: ignore[method-assign]


def _begin(*told: Any) -> None:
    """Take over what a rank says, in a process that it has started."""
    _know(_Rank(*told))
    if f"{_TORCHS}.distributed_c10d" in sys.modules:
        _watch()
    else:
        sys.meta_path.insert(0, _BeforeTorch())


class _BeforeTorch:
    """Lets init_process_group be checked as soon as there is one; it finds nothing itself."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return who loads torch.distributed, and then watches."""
        if fullname != _TORCHS:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            _watch()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch() -> None:
    torchs = getattr(sys.modules[_TORCHS], "init_process_group", None)
    if torchs is None:  # a torch without torch.distributed
        return
    signature = inspect.signature(torchs)

    @functools.wraps(torchs)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            given = None  # torch's own error follows
        if given is not None:
            check(given)
        return torchs(*args, **kwargs)

    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is torchs]:
            names[name] = init_process_group


def check(given: Mapping[str, Any]) -> None:
    """Say, or raise, that a world of torch's begins here in a process that a rank has started.

    Not collective. Nothing is said of a world of one, and of one of mpiddp.

    Args:
        given: the arguments of init_process_group.

    Raises:
        RuntimeError: it would meet where the job's ranks, or processes of another rank, meet.
    """
    backend = str(given.get("backend") or "gloo or nccl")
    place, rank, size = _meeting(given)
    parent = _parent
    if parent is None or not is_child() or "mpiddp" in backend.lower() or size == "1":
        return
    who = (
        f"init_process_group was called in process {os.getpid()}, which rank {parent.rank} "
        f"(process {parent.process_id}) of python -m mpiddp has started"
    )
    if parent.world_size > 1 and place == parent.place:
        raise RuntimeError(
            f"{who}, with that rank's own MASTER_ADDR and MASTER_PORT: its world would be torch's, "
            f"on {backend}, beside that of MPI. "
            f"{_WAYS_OUT.format('let it meet at another address, or ')}"
        )
    other = _other_rank_at(place, parent) if place else None
    if other is not None:
        raise RuntimeError(
            f"{who}, and processes of rank {other} meet at the same place, {place}: each rank of "
            f"MPI runs the script, and has started all of them. {_WAYS_OUT.format('')}"
        )
    if rank in ("0", ""):
        print(
            f"mpiddp: {who}: its world is torch's, on {backend}, and mpiddp has no part in it",
            file=sys.stderr,
            flush=True,
        )


def _meeting(given: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return where the ranks of a world meet, "" if unknown; the rank and the size, "" likewise."""
    from urllib.parse import parse_qsl, urlparse

    method = str(given.get("init_method") or "env://")
    url = urlparse(method)
    told = dict(parse_qsl(url.query))
    by_environment = url.scheme == "env" and given.get("store") is None
    for name in ("rank", "world_size"):
        if given.get(name, -1) not in (-1, None):
            told[name] = str(given[name])
        elif by_environment:
            told.setdefault(name, os.environ.get(name.upper(), ""))
    place = ""
    if by_environment:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    elif given.get("store") is None:
        place = url.netloc or url.path
    return place, told.get("rank", ""), told.get("world_size", "")


def _other_rank_at(place: str, parent: _Rank) -> str | None:
    """Return another rank whose processes meet at the same place, None without one.

    Each puts up a sign before it looks, so of two that come at once one sees the other: a socket
    without a file, which the system lists as long as its process lives, where ports are its own.
    """
    import hashlib
    import socket

    digest = hashlib.sha256(f"{parent.place} {place}".encode()).hexdigest()[:16]
    sign = socket.socket(socket.AF_UNIX)
    try:
        sign.bind(f"\0mpiddp-child-{digest}-{parent.rank}-{os.getpid()}-{len(_signs)}")
        _signs.append(sign)
        with open("/proc/net/unix", errors="replace") as file:
            found = re.findall(rf"@mpiddp-child-{digest}-(\d+)-", file.read())
    except OSError:  # no such sockets here
        return None
    return next((other for other in found if other != str(parent.rank)), None)
