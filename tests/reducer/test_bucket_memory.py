"""Memory for buckets that one rank cannot have: all ranks do the same about it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(100)

PREAMBLE = """\
import gc, resource, sys, warnings
import torch, torch.distributed as dist
import mpiddp
from mpiddp import DistributedDataParallel as DDP

torch.set_num_threads(1)
mpiddp.init_process_group()
rank = dist.get_rank()


def limit(kind, amount):
    if rank == 1:
        resource.setrlimit(kind, (amount, resource.RLIM_INFINITY))


def address_space():
    pages = int(open("/proc/self/statm").read().split()[0])
    return pages * resource.getpagesize()


def step(wrapped, features):
    wrapped.zero_grad()
    wrapped(torch.full((1, features), rank * 2.0)).sum().backward()
    for parameter in wrapped.module.parameters():
        if parameter.dim() == 2:
            assert (parameter.grad == 1).all()


def warned(action):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in said if issubclass(each.category, UserWarning)]


def refused(action, kind=OSError):
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")
"""


def run(folder: Path, source: str) -> str:
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(source))
    done = mpirun.run(2, [script], timeout=70, env={"MPIDDP_TRANSPORT": None})
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    return done.stdout


@pytest.mark.thorough
def test_files_too_small_for_buckets(tmp_path: Path) -> None:
    """Enough for where the ranks meet, too little for the gradients."""
    run(
        tmp_path,
        """
        UNLIMITED = resource.RLIM_INFINITY
        wrapped = DDP(torch.nn.Linear(900, 2), transport="auto")
        lost = DDP(torch.nn.Linear(900, 2), transport="shared")
        assert type(wrapped.reducer.channel.transport).__name__ == "SharedTransport"
        limit(resource.RLIMIT_FSIZE, 4000)
        made = []
        said = warned(lambda: made.append(DDP(torch.nn.Linear(900, 2), transport="auto")))
        assert len(said) == (rank == 0), said
        assert all("rank 1 of the 2 on" in text for text in said), said
        for _ in range(3):
            step(made[0], 900)
        for bucket in made[0].reducer.buckets:
            assert type(bucket.channel.transport).__name__ == "MessageTransport"

        said = refused(lambda: DDP(torch.nn.Linear(900, 2), transport="shared"))
        assert "rank 1 of the 2 on" in said, said

        # When the buckets are laid out in the order in which gradients have come.
        step(wrapped, 900)
        # Then there is no memory for the old buckets either.
        said = warned(lambda: step(wrapped, 900))
        assert len(said) == 2 * (rank == 0), said
        assert all("rank 1 of the 2 on" in text for text in said), said
        step(wrapped, 900)
        assert type(wrapped.reducer.channel.transport).__name__ == "MessageTransport"
        step(lost, 900)
        for _ in range(2):
            said = refused(lambda: step(lost, 900), RuntimeError)
            assert "wrap it again" in said, said
        lost.module(torch.ones(1, 900)).sum().backward()

        # What could not be had did no harm to the channels.
        limit(resource.RLIMIT_FSIZE, UNLIMITED)
        again = DDP(torch.nn.Linear(900, 2), transport="shared")
        for _ in range(3):
            step(again, 900)
        lost = DDP(lost.module, transport="shared")
        for _ in range(3):
            step(lost, 900)
        print("done", flush=True)
        mpiddp.destroy_process_group()
        """,
    )


@pytest.mark.thorough
def test_address_space_too_small(tmp_path: Path) -> None:
    """As by `ulimit -v`: files can be made, but not mapped."""
    run(
        tmp_path,
        """
        MIB = 1 << 20
        step(DDP(torch.nn.Linear(2, 2)), 2)
        # More than glibc has set aside for another thread's allocations: 64 MiB.
        model = torch.nn.Linear(9 * MIB, 2, bias=False)
        # Room for one piece of 72 MiB, not for those of both ranks.
        limit(resource.RLIMIT_AS, address_space() + 100 * MIB)
        made = []
        said = warned(lambda: made.append(DDP(model, transport="auto", init_sync=False)))
        assert len(said) == (rank == 0), said
        assert all("rank 1 of the 2 on" in text for text in said), said
        made.clear()
        gc.collect()  # else it may free what it holds just when memory is missing
        # Nor room for the memory that only this rank sees.
        limit(resource.RLIMIT_AS, address_space() + 16 * MIB)
        said = refused(lambda: DDP(model, transport="mpi", init_sync=False))
        assert "no memory for buckets of gradients: rank 1: " in said, said
        limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
        print("done", flush=True)
        mpiddp.destroy_process_group()
        """,
    )


@pytest.mark.essential(keep=1)
@pytest.mark.thorough
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("transport", ["shared", "mpi"], ids=["shared", "messages"])
def test_old_buckets_go_before_new_ones_come(tmp_path: Path, transport: str, views: bool) -> None:
    run(
        tmp_path,
        f"""
        MIB = 1 << 20


        class Sum(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(16 * MIB))

            def forward(self):
                return self.weight.sum()


        def resident(name):
            with open("/proc/self/status") as file:
                (line,) = (line for line in file if line.startswith(name))
            return int(line.split()[1]) << 10


        wrapped = DDP(
            Sum(), gradient_as_bucket_view={views}, transport="{transport}", init_sync=False
        )
        wrapped().backward()
        wrapped.zero_grad()
        before = resident("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")     # the most so far begins anew
        wrapped()
        assert wrapped.reducer.has_rebuilt_buckets
        most = resident("VmHWM")
        assert most - before < 16 * MIB, (before, most)
        print("done", flush=True)
        mpiddp.destroy_process_group()
        """,
    )


# Kernels that differ in what memfd_create takes: a filter answers in their place.
FILTERED = """\
import ctypes, errno, os, struct, sys

MEMFD_CREATE, LOAD, JUMP_EQUAL, JUMP_SET, RETURN = 319, 0x20, 0x15, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NOEXEC_SEAL = 8
when_set, when_not = {answers}
program = b"".join(
    struct.pack("HBBI", *each)
    for each in (
        (LOAD, 0, 0, 0),                            # number of the system call
        (JUMP_EQUAL, 0, 3, MEMFD_CREATE),
        (LOAD, 0, 0, 24),                           # its second argument
        (JUMP_SET, 2, 0, NOEXEC_SEAL),
        (RETURN, 0, 0, when_not),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, when_set),
    )
)
code = ctypes.create_string_buffer(program)
filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 7, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0              # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, filters, 0, 0) == 0, os.strerror(ctypes.get_errno())

from mpi4py import MPI
from mpiddp.flight_recorder import page
from mpiddp.system import rank_signs
from mpiddp.transports.shared_memory import allocate

piece = memoryview(allocate(MPI.COMM_WORLD, 100)[0])
piece[99] = 1
assert page.share() >= 0
assert rank_signs.put_up(0, 0, "") >= 0
print("done")
"""


@pytest.mark.once
@pytest.mark.thorough
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls of x86_64")
@pytest.mark.parametrize(
    "answers",
    [
        # As Linux 6.3 to 6.5 with vm.memfd_noexec=2, and as those before 6.3.
        pytest.param("ALLOW, ERRNO | errno.EACCES", id="refuses files without the seal"),
        pytest.param("ERRNO | errno.EINVAL, ALLOW", id="does not know the seal"),
    ],
)
def test_files_that_cannot_be_executed(answers: str) -> None:
    source = FILTERED.replace("{answers}", answers)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "done\n", done.stderr


@pytest.mark.once
@pytest.mark.thorough
def test_memory_where_the_administrator_allows_no_other(tmp_path: Path) -> None:
    """With vm.memfd_noexec=2, set in a process namespace of its own."""
    source = (
        "open('/proc/sys/vm/memfd_noexec', 'w').write('2')\n"
        "from mpi4py import MPI\n"
        "from mpiddp.flight_recorder import page\n"
        "from mpiddp.transports.shared_memory import allocate\n"
        "print(len(memoryview(allocate(MPI.COMM_WORLD, 100)[0])), page.share() >= 0)\n"
    )
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    probe = subprocess.run(
        [*apart, sys.executable, "-c", source.splitlines()[0]],
        capture_output=True,
        timeout=30,
        check=False,
    )
    if probe.returncode:
        pytest.skip("vm.memfd_noexec cannot be set in a namespace here")
    done = subprocess.run(
        [*apart, sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "100 True\n", done.stderr
