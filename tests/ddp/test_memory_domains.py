"""Which ranks of a node share parameters, where it has several sockets or NUMA nodes."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from optimizer_pairs import assert_same_parameters
from replicas import RANK, SIZE, assert_same_bits, batch_of, gather, share, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.ddp import memory_domains
from mpiddp.optim import NodeOptimizer, adopted
from mpiddp.system import near_memory


def machine(root: Path, sockets: dict[int, str], numa: dict[int, str]) -> str:
    """Write what Linux tells of a machine; return the folder."""
    for number, cores in sockets.items():
        for core in near_memory._numbers(cores):
            folder = root / "cpu" / f"cpu{core}" / "topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{number}\n")
    for number, cores in numa.items():
        folder = root / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return str(root)


def test_cores_of_a_machine(tmp_path: Path) -> None:
    """Two sockets of two NUMA nodes each, with two threads a core; one node has memory only."""
    system = machine(
        tmp_path,
        {0: "0-7,16-23", 36: "8-15,24-31"},
        {0: "0-3,16-19", 1: "4-7,20-23", 2: "8-11,24-27", 3: "12-15,28-31", 8: ""},
    )
    (tmp_path / "cpu" / "cpufreq").mkdir()
    (tmp_path / "node" / "power").mkdir()
    first, second = near_memory.groups_of_cores("socket", system)
    assert first == {*range(8), *range(16, 24)}
    assert second == {*range(8, 16), *range(24, 32)}
    nodes = near_memory.groups_of_cores("numa", system)
    assert nodes[1] == {4, 5, 6, 7, 20, 21, 22, 23}
    assert len(nodes) == 4


def test_where_linux_does_not_tell(tmp_path: Path) -> None:
    assert near_memory.groups_of_cores("socket", str(tmp_path)) == []
    assert near_memory.groups_of_cores("numa", str(tmp_path / "none")) == []


def test_this_machine() -> None:
    for kind in near_memory.KINDS:
        groups = near_memory.groups_of_cores(kind)
        assert set().union(*groups) >= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("value", "words"),
    [(True, "1"), (1, "1"), (False, ""), (0, ""), ("numa", "numa"), ("node", "node"), (4, "4")],
)
def test_values(value: Any, words: str) -> None:
    assert memory_domains.normalized(value) == words


@pytest.mark.parametrize("value", ["NUMA", "two", "", -2, 2.5])
def test_wrong_values(value: Any) -> None:
    with pytest.raises(ValueError, match="shared_parameters must be True, False, 'node', 'socket'"):
        memory_domains.normalized(value)


# The address space of a process, by its pages.


def file_of(tensor: torch.Tensor) -> str:
    """Return the number of the file in which a tensor's memory lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.split()[4]
    raise AssertionError


def files_of(model: DDP) -> list[tuple[str, str]]:
    """Return for each rank the files of a model's parameters and gradients."""
    parameter = next(model.parameters())
    return gather((file_of(parameter), file_of(parameter.grad)))  # type: ignore[arg-type]


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(30, 70, 600, 50, 3, dtype=torch.float32)


def train(model: DDP, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss_of(model, share(batch_of(3, 30))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@pytest.mark.mpi(min_size=3)
@pytest.mark.sizes
class TestTwoRanksADomain:
    def both(self, way: str) -> tuple[DDP, DDP]:
        """Return a plain model and one of domains, trained alike."""
        kind = torch.optim.AdamW
        plain = DDP(deep(), bucket_cap_mb=0.05)
        model = DDP(deep(), bucket_cap_mb=0.05, shared_parameters=2)
        if way == "adopted":
            adopted.install()
        optimizer = (
            kind(model.parameters(), lr=0.01)
            if way == "adopted"
            else NodeOptimizer(model, kind, lr=0.01)
        )
        train(plain, kind(plain.parameters(), lr=0.01))
        train(model, optimizer)
        return plain, model

    @pytest.mark.essential
    @pytest.mark.parametrize("way", ["explicit", "adopted"])
    def test_trains_as_plain_ones(self, way: str) -> None:
        plain, model = self.both(way)
        assert_same_parameters(model, plain)
        assert_same_bits(model.named_parameters())
        assert_same_bits((name, p.grad) for name, p in model.named_parameters())

    def test_lies_once_in_each(self) -> None:
        _, model = self.both("explicit")
        files = files_of(model)
        with together():
            assert all(bucket.common is not None for bucket in model.reducer.buckets)
            for rank, found in enumerate(files):
                for other, their in enumerate(files):
                    assert (found == their) == (rank // 2 == other // 2)
        shared = model._shared_parameters
        assert shared is not None
        with together():
            assert shared.ranks == min(2, SIZE - RANK // 2 * 2)
            assert shared.across_nodes

    def test_what_ranks_change_alike_holds_in_all_domains(self) -> None:
        _, model = self.both("explicit")
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(0.5)
        values = [p.detach().clone() for p in model.module.parameters()]
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.0)
        train(model, optimizer, 1)
        with together():
            assert all(map(torch.equal, values, model.module.parameters()))

    def test_settings_of_another_domain(self) -> None:
        _, model = self.both("explicit")
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        loss_of(model, share(batch_of(2, 30))).backward()
        optimizer.param_groups[0]["lr"] = 0.2 if RANK < 2 else 0.1
        with together(), pytest.raises(RuntimeError, match=r"different settings.*'lr'"):
            optimizer.step()

    def test_without_inputs(self) -> None:
        """A rank that has joined steps its part in its domain."""
        models = [DDP(deep(), bucket_cap_mb=0.05), DDP(deep(), shared_parameters=2)]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(models[0].parameters(), lr=0.01),
            NodeOptimizer(models[1], torch.optim.SGD, lr=0.01),
        ]
        for model, optimizer in zip(models, optimizers, strict=True):
            with model.join():
                for step in range(2 + RANK % 2):
                    optimizer.zero_grad()
                    torch.manual_seed(step)
                    loss_of(model, share(batch_of(3, 30))).backward()
                    optimizer.step()
        assert_same_parameters(models[1], models[0])
        assert_same_bits(models[1].named_parameters())


@pytest.fixture
def bound() -> Iterator[int]:
    """Bind this rank to one core; return its number."""
    before = os.sched_getaffinity(0)
    core = sorted(before)[RANK % len(before)]
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, before)


@pytest.mark.mpi(min_size=2)
class TestByTheMachine:
    def machine(self, tmp_path: Path, core: int) -> tuple[str, int]:
        """Return a machine with each core that is used on a NUMA node, and their number."""
        used = [str(each) for each in sorted(set(gather(core)))]
        system = machine(tmp_path, {0: ",".join(used)}, dict(enumerate(used)))
        return system, len(used)

    def test_numa(self, tmp_path: Path, bound: int) -> None:
        system, count = self.machine(tmp_path, bound)
        domain = memory_domains.find(dist.group.WORLD, "numa", system)
        found = gather((domain, bound))
        with together():
            assert len(set(found)) == len({number for number, _ in found}) == count
        # One socket does not divide it.
        assert memory_domains.find(dist.group.WORLD, "socket", system) == 0

    @pytest.mark.parametrize("slower", [1e9, 0.0])
    def test_by_measurement(
        self, tmp_path: Path, bound: int, slower: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The largest domains that are hardly slower than a rank's own memory."""
        system, count = self.machine(tmp_path, bound)
        monkeypatch.setattr(memory_domains, "_HARDLY_SLOWER", slower)
        domain = memory_domains.find(dist.group.WORLD, "1", system)
        domains = set(gather(domain))
        with together():
            assert len(domains) == (1 if slower else count)

    def test_without_memory_to_measure_in(
        self, tmp_path: Path, bound: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(node: Any, size: int) -> None:
            raise OSError("cannot make it")

        system, _ = self.machine(tmp_path, bound)
        monkeypatch.setattr(memory_domains.shared_memory, "allocate", refuse)
        domain = memory_domains.find(dist.group.WORLD, "1", system)
        with together():
            assert domain == 0

    def test_ranks_that_are_not_bound(self, tmp_path: Path) -> None:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        if "," not in cores:
            pytest.skip("this process has one core, so it is bound to it")
        system = machine(tmp_path, {0: cores}, dict(enumerate(cores.split(","))))
        if RANK == 0:
            with pytest.warns(UserWarning, match=r"not bound.*rank 0, 1.*--bind-to numa"):
                domain = memory_domains.find(dist.group.WORLD, "numa", system)
        else:
            domain = memory_domains.find(dist.group.WORLD, "numa", system)
        with together():
            assert domain == 0
        # By default nobody has asked for it, so nothing is said.
        assert memory_domains.find(dist.group.WORLD, "1", system) == 0

    def test_pages_lie_beside_their_ranks(self) -> None:
        """As the kernel shows it, of the pages that this process has read."""
        torch.manual_seed(0)
        model = DDP(nn.Linear(1000, 1000), shared_parameters="numa")
        shared = model._shared_parameters
        assert shared is not None
        address = shared.flat[0].data_ptr()
        for start, stop, owner in shared.layouts[0].parts():
            if owner == shared.rank:
                shared.flat[0][start:stop].sum()
        own = near_memory.groups_of_cores("numa")
        near = {n for n, cores in enumerate(own) if cores & os.sched_getaffinity(0)}
        maps = Path("/proc/self/numa_maps")
        if not maps.exists():
            pytest.skip("this kernel has no NUMA")
        [line] = [
            each for each in maps.read_text().splitlines() if each.startswith(f"{address:x} ")
        ]
        lie_on = {int(number) for number in re.findall(r" N(\d+)=", line)}
        with together():
            assert "memfd:mpiddp" in line
            assert lie_on
            assert lie_on <= near


@pytest.mark.mpi(min_size=3)
def test_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_SHARED_PARAMETERS", "2")
    model = DDP(deep())
    shared = model._shared_parameters
    with together():
        assert shared is not None
        assert shared.ranks == min(2, SIZE - RANK // 2 * 2)
