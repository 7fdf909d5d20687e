"""Collectives in memory and in lanes, without torch: on a machine that has none, as under qemu.

    mpiexec -n 3 python memory_on_arm.py FOLDER

FOLDER is that of the package mpiddp. Each rank prints how many results it has compared.
"""

import platform
import sys
import types
from typing import Any

import numpy as np

ROUNDS = 3
# In the control lines' neighbourhood, in one round, in slices, and in many rounds.
COUNTS = (1, 3, 17, 1000, 9000, 200_003)
SECONDS = 120.0


class Missing(types.ModuleType):
    """A module of which only names are used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (), {}) if name[0].isupper() else f"{self.__name__}.{name}"
        setattr(self, name, value)
        return value


for name in ("torch", "torch.distributed", "torch._C", "torch._C._distributed_c10d"):
    sys.modules[name] = Missing(name)
package = types.ModuleType("mpiddp")  # without what it imports
package.__path__ = [sys.argv[1]]
sys.modules["mpiddp"] = package

from mpi4py import MPI  # noqa: E402

from mpiddp.mpi.compatibility import call_mpi_of_mpi4py  # noqa: E402

call_mpi_of_mpi4py()

from mpiddp.collectives.group_lanes import GroupLanes  # noqa: E402
from mpiddp.collectives.node_memory import NodeMemory  # noqa: E402
from mpiddp.engine.engine import Engine  # noqa: E402
from mpiddp.engine.requests import Requests  # noqa: E402
from mpiddp.system import kernels  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
ELEMENTS: dict[Any, int] = kernels.ELEMENTS
DTYPES = {
    np.dtype(name): ELEMENTS[f"torch.{name}"]
    for name in ("float32", "float64", "float16")  # what numpy has
}
random = np.random.default_rng(5)  # the same on all ranks
compared = 0


def wait(pending: Any) -> None:
    assert pending.wait(SECONDS), "the others did not come"


def addresses(arrays: "list[np.ndarray]") -> "list[int]":
    return [array.ctypes.data for array in arrays]


def check(result: Any, expected: Any) -> None:
    global compared
    assert np.array_equal(result, expected), (result, expected)
    compared += 1


def in_order(data: "list[np.ndarray]") -> np.ndarray:
    """Return the sum in order of rank, rounded once."""
    total = data[0].astype(np.promote_types(data[0].dtype, np.float32))
    for each in data[1:]:
        total = total + each
    return total.astype(data[0].dtype)


def in_memory(group: Any, count: int, dtype: np.dtype, number: int) -> None:
    element, root = DTYPES[dtype], number % SIZE
    data = [np.round(random.standard_normal(count) * 50).astype(dtype) for _ in range(SIZE)]
    own, total, rows = data[RANK], np.empty(count, dtype), np.empty((SIZE, count), dtype)
    group.at_once = bool(number % 2)
    source = own.ctypes.data
    reduced = group.reduce(source, total.ctypes.data, own.nbytes, element, 0, 1.0, -1, (own, total))
    gathered = group.gather(source, addresses(list(rows)), own.nbytes, rows)
    wait(gathered)
    wait(reduced)
    check(total, in_order(data))
    check(rows, np.stack(data))
    sent = own.copy()
    wait(group.spread(sent.ctypes.data, sent.nbytes, root, sent))
    check(sent, data[root])
    parts = [np.full(count, 10 * RANK + to, dtype) for to in range(SIZE)]
    received = [np.empty(count, dtype) for _ in range(SIZE)]
    size, kept = own.nbytes, (parts, received)
    wait(group.exchange(addresses(parts), addresses(received), size, kept))
    check(received, [np.full(count, 10 * of + RANK, dtype) for of in range(SIZE)])
    total_of_parts = total.ctypes.data
    wait(
        group.reduce_parts(addresses(parts), total_of_parts, size, element, 0, 1.0, (parts, total))
    )
    check(total, np.full(count, sum(10 * of + RANK for of in range(SIZE)), dtype))
    uneven = [np.full(to + 1, RANK, np.float64) for to in range(SIZE)]
    taken = [np.full(RANK + 1, of, np.float64) for of in range(SIZE)]
    others = [np.zeros_like(each) for each in taken]
    sizes = [each.nbytes for each in uneven + taken]
    wait(group.trade(addresses(uneven), addresses(others), sizes, (uneven, others)))
    check(others, taken)
    dealt, own_only = [np.zeros(RANK + 1)] * SIZE, [0] * SIZE
    own_only[root] = dealt[root].nbytes
    sizes = [each.nbytes if root == RANK else 0 for each in uneven] + own_only
    sources = addresses(uneven) if root == RANK else [0] * SIZE
    wait(group.trade(sources, addresses(dealt), sizes, (uneven, dealt), root))
    check(dealt[root], taken[root])
    wait(group.meet())


def in_lanes(group: Any, count: int, dtype: np.dtype, number: int) -> None:
    if dtype.itemsize < 4:
        return
    element, root = DTYPES[dtype], number % SIZE
    data = [np.round(random.standard_normal(count) * 50).astype(dtype) for _ in range(SIZE)]
    own, total, rows = data[RANK], np.empty(count, dtype), np.empty((SIZE, count), dtype)
    sent, parts = own.copy(), [data[RANK] + to for to in range(SIZE)]
    part, size = np.empty(count, dtype), own.nbytes
    pending = [
        group.reduce(own.ctypes.data, total.ctypes.data, size, element, (own, total)),
        group.gather(own.ctypes.data, addresses(list(rows)), size, rows),
        group.spread(sent.ctypes.data, size, root, sent),
        group.reduce_parts(addresses(parts), part.ctypes.data, size, element, (parts, part)),
    ]
    for each in reversed(pending):
        wait(each)
    check(total, sum(data))  # of small integers: exact in any order
    check(rows, np.stack(data))
    check(sent, data[root])
    check(part, sum(data) + SIZE * RANK)


requests = Requests(Engine(threaded=True), crowded=True)
memory = NodeMemory(WORLD)
group = memory.of_group(0, SIZE, RANK, requests)
lanes = None
if SIZE == 4:
    node = WORLD.Split(RANK // 2, RANK)
    ways = {width: [(0, "direct")] for width in (2, 4, 8)}
    plan: Any = types.SimpleNamespace(chunk_bytes=1 << 19, window=2, ways=ways, group=1)
    lanes = GroupLanes(WORLD.Dup(), [[0, 1], [2, 3]], NodeMemory(node), 0, plan, requests)
for number in range(ROUNDS):
    for count in COUNTS:
        for dtype in DTYPES:
            in_memory(group, count, dtype, number)
            if lanes is not None:
                in_lanes(lanes, count, dtype, number)
print(f"{platform.machine()}, rank {RANK} of {SIZE}: {compared} results as expected", flush=True)
WORLD.Barrier()
group.close()
if lanes is not None:
    lanes.close()
