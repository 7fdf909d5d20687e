"""Groups beside the world: meshes, subgroups, ranks outside, and many that come and go."""

import gc
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import WHERE, new_group
from models import loss_of, mlp
from replicas import RANK, SIZE, gather, together
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpiddp import DistributedDataParallel as DDP
from mpiddp.process_group import under_way

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)


def total(group: dist.ProcessGroup | None) -> int:
    """Return the sum of the global ranks in a group. Collective over it."""
    ranks = torch.tensor([RANK])
    dist.all_reduce(ranks, group=group)
    return int(ranks)


class TestMesh:
    @pytest.mark.smoke
    def test_one_dimension(self):
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("all",))
        found = total(mesh.get_group())
        with together():
            assert mesh.get_group() is dist.group.WORLD
            assert (mesh.size(), mesh.get_rank(), mesh.get_local_rank("all")) == (SIZE, RANK, RANK)
            assert tuple(mesh.get_coordinate()) == (RANK,)
            assert found == sum(range(SIZE))

    @pytest.mark.essential
    @several
    def test_two_dimensions(self, gloo):
        """Slices and flattened dimensions name the same ranks as with Gloo."""
        shape = (SIZE, 1) if SIZE % 2 else (2, SIZE // 2)
        meshes = [
            init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"), backend_override=override)
            for override in (None, {"a": "gloo", "b": "gloo"})
        ]
        described = []
        for mesh in meshes:
            flat = mesh._flatten("ab")
            groups = [mesh["a"].get_group(), mesh["b"].get_group(), flat.get_group()]
            described.append([
                mesh.mesh.tolist(),
                tuple(mesh.get_coordinate()),
                [part.mesh.tolist() for part in (mesh["a"], mesh["b"], flat)],
                [dist.get_process_group_ranks(group) for group in groups],
                [(dist.get_rank(group), dist.get_world_size(group)) for group in groups],
                [total(group) for group in groups],
            ])  # fmt: skip
        with together():
            assert described[0] == described[1]
            assert dist.get_backend(meshes[0].get_group("a")) == "mpiddp"

    @several
    def test_of_groups(self):
        """A mesh of groups that exist already."""
        halves, _ = dist.new_subgroups_by_enumeration(
            [list(range(SIZE // 2)), list(range(SIZE // 2, SIZE))]
        )
        mesh = DeviceMesh.from_group(halves, "cpu")
        mine = range(SIZE // 2) if RANK < SIZE // 2 else range(SIZE // 2, SIZE)
        found = total(mesh.get_group())
        with together():
            assert mesh.mesh.tolist() == list(mine)
            assert found == sum(mine)
        dist.destroy_process_group(halves)


class TestSubgroups:
    @several
    def test_of_one_size(self):
        width = 2 if SIZE % 2 == 0 else SIZE
        own, everyone = dist.new_subgroups(width)
        first = RANK // width * width
        found = total(own)
        with together():
            assert dist.get_process_group_ranks(own) == list(range(first, first + width))
            assert (dist.get_rank(own), dist.get_world_size(own)) == (RANK - first, width)
            assert found == sum(range(first, first + width))
            assert len(everyone) == SIZE // width
        dist.destroy_process_group(own)

    @pytest.mark.essential
    @several
    def test_by_enumeration(self):
        """Each rank in one of the lists, in an order of their own, or in none."""
        lists = [[SIZE - 1, 0]] if SIZE > 2 else [[1], [0]]
        own, everyone = dist.new_subgroups_by_enumeration(lists)
        inside = any(RANK in ranks for ranks in lists)
        found = total(own) if inside else None
        with together():
            assert len(everyone) == len(lists)
            if SIZE == 2:
                assert found == RANK
            elif inside:
                assert found == SIZE - 1
            else:
                assert own is None
        if inside:
            dist.destroy_process_group(own)

    @several
    def test_overlapping(self):
        """Collectives of several groups in flight of each other, in each group's own order."""
        rings = [dist.new_group([rank, (rank + 1) % SIZE]) for rank in range(SIZE)]
        mine = [(RANK - 1) % SIZE, RANK]
        for _ in range(3):
            tensors = {ring: torch.tensor([RANK]) for ring in sorted(set(mine))}
            works = [
                dist.all_reduce(tensor, group=rings[ring], async_op=True)
                for ring, tensor in tensors.items()
            ]
            for work in works:
                work.wait()
            with together():
                for ring, tensor in tensors.items():
                    assert int(tensor) == ring + (ring + 1) % SIZE
        for ring in sorted(set(mine)):
            dist.destroy_process_group(rings[ring])

    @pytest.mark.essential
    @several
    def test_members_alone_make_a_group(self):
        """The others do not even call new_group."""
        if RANK > 0:
            ranks = list(range(1, SIZE))
            group = dist.new_group(ranks, use_local_synchronization=True)
            assert total(group) == sum(ranks)
            dist.destroy_process_group(group)
        dist.barrier()
        # Since 2.14 torch counts it on its members only, and names later groups by that count.
        everyone = dist.new_group()
        names = gather(everyone.group_name)
        dist.destroy_process_group(everyone)
        with together():
            assert len(set(names)) == 1

    @several
    def test_names_where_others_come_and_go(self):
        """Neither does a name come twice, nor do members have other names for one group."""
        others = [dist.new_group([RANK], use_local_synchronization=True) for _ in range(RANK)]
        ranks = list(range(SIZE))
        first, second = (dist.new_group(ranks, use_local_synchronization=True) for _ in range(2))
        dist.destroy_process_group(first)
        third = dist.new_group(ranks, use_local_synchronization=True)
        names = gather([group.group_name for group in (first, second, third)])
        with together():
            assert len(set(names[0])) == 3
            assert all(named == names[0] for named in names)
        for group in [*others, second, third]:
            dist.destroy_process_group(group)


@pytest.fixture(scope="module", params=["mpiddp", "gloo"])
def first(request, gloo):
    """Return a group of rank 0 alone."""
    group = dist.new_group([0], backend=request.param)
    yield group
    dist.barrier()
    if RANK == 0:
        dist.destroy_process_group(group)


@several
class TestOutside:
    """A rank outside of a group sees rank -1, and its collectives there do nothing."""

    def test_numbers(self, first):
        with together():
            assert dist.get_rank(first) == (0 if RANK == 0 else -1)
            assert dist.get_world_size(first) == (1 if RANK == 0 else -1)
            assert (first is dist.GroupMember.NON_GROUP_MEMBER) == (RANK > 0)

    @pytest.mark.essential(keep=1)
    @pytest.mark.filterwarnings("ignore:Running .* on global rank")
    def test_collectives(self, first):
        x = torch.full((2,), 7.0)
        pieces = [torch.zeros(2)]
        objects = [None]
        with together():
            works = [
                dist.all_reduce(x, group=first),
                dist.broadcast(x, 0, group=first),
                dist.all_reduce(x, group=first, async_op=True),
                dist.all_gather(pieces, x, group=first),
                dist.barrier(group=first),
            ]
            dist.all_gather_object(objects, "me", group=first)
            if works[2] is not None:
                works[2].wait()
            assert x.tolist() == [7, 7]
            assert (works[2] is None) == (RANK > 0)
            assert [one for index, one in enumerate(works) if index != 2] == [None] * 4
            assert pieces[0].tolist() == ([7, 7] if RANK == 0 else [0, 0])
            assert objects == (["me"] if RANK == 0 else [None])


# More than MPICH has, which is about 2000.
MANY = 2300


@pytest.mark.thorough
def test_many_that_come_and_go():
    """Each gives its communicator back."""
    for number in range(MANY):
        group = dist.new_group(list(range(SIZE)), use_local_synchronization=True)
        if number % 100 == 0:
            assert total(group) == sum(range(SIZE))
        dist.destroy_process_group(group)


@pytest.fixture
def copies() -> Iterator[list[int]]:
    """Count the communicators that are copied from the world's, and copies of those."""
    from mpi4py import MPI

    from mpiddp.rendezvous import world

    alive = [0]

    def copied(comm: object, keyval: int, value: int) -> int:
        alive[0] += 1
        return value

    def freed(comm: object, keyval: int, value: int) -> None:
        alive[0] -= 1

    assert world._world is not None
    keyval = MPI.Comm.Create_keyval(copied, freed)
    world._world.communicator.Set_attr(keyval, 1)
    yield alive
    world._world.communicator.Delete_attr(keyval)
    MPI.Comm.Free_keyval(keyval)


@pytest.mark.essential
@pytest.mark.parametrize("where", WHERE)
def test_destroyed_before_anybody_has_waited(where: str) -> None:
    """What is under way ends first, in place of a communicator that is freed under it."""
    for count in (4, 5000, 200_000) * 3:
        part = new_group(where, timedelta(seconds=60))
        tensors = [torch.ones(count) for _ in range(4)]
        for tensor in tensors:
            dist.all_reduce(tensor, group=part, async_op=True)
        dist.destroy_process_group(part)
        assert all(tensor.eq(SIZE).all() for tensor in tensors)


@several
@pytest.mark.parametrize("where", WHERE)
def test_destroyed_where_some_have_not_called(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory is kept, and the communicator with it."""
    monkeypatch.setattr(under_way, "LAST", 0.1)
    for _ in range(3):
        part = new_group(where, timedelta(seconds=60))
        if RANK == 0:
            dist.all_reduce(torch.ones(200_000), group=part, async_op=True)
        dist.destroy_process_group(part)
        dist.barrier()
    assert total(dist.group.WORLD) == sum(range(SIZE))


@several
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_destroyed_while_another_thread_waits(
    where: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call raises, at whatever moment of it that happens."""
    monkeypatch.setattr(under_way, "LAST", 0.1)
    for trial in range(12):
        part = new_group(where, timedelta(seconds=600))
        tensor = torch.ones((4, 2_000_000)[trial % 2])
        raised: list[str] = []
        begins = threading.Event()

        options = dist.AllreduceOptions()
        options.asyncOp = asynchronous

        def call(
            part: Any = part,
            tensor: torch.Tensor = tensor,
            options: object = options,
            begins: threading.Event = begins,
            raised: list[str] = raised,
        ) -> None:
            begins.set()
            try:
                # Not by torch.distributed, which asks first whether it knows the group.
                part.allreduce([tensor], options).wait()
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=call)
        if RANK == 0:
            thread.start()
            begins.wait()
        time.sleep((0.0, 1e-4, 5e-4, 1e-3, 3e-3, 0.1)[trial // 2])
        dist.destroy_process_group(part)
        if RANK == 0:
            thread.join(60)
            assert not thread.is_alive()
            assert len(raised) == 1, trial
            assert "destroyed" in raised[0]
        dist.barrier()
    assert total(dist.group.WORLD) == sum(range(SIZE))


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_what_a_wrapper_adds_goes_with_its_group(transport, copies):
    for _ in range(2):
        group = dist.new_group(list(range(SIZE)))
        models = [DDP(mlp(2, 2), process_group=group, transport=transport) for _ in range(2)]
        for model in models:
            loss_of(model, torch.ones(2, 2, dtype=torch.float64)).backward()
        dist.all_gather_object([None] * SIZE, "an object", group=group)
        most = copies[0]
        del model, models
        dist.destroy_process_group(group)
        del group
        gc.collect()
        everyone = gather((most, copies[0]))
        assert min(before for before, _ in everyone) > (1 if SIZE > 1 else 0)
        assert [after for _, after in everyone] == [0] * SIZE
