"""The progress engine: what it counts, errors of MPI, signals, forked children."""

import ctypes
import os
import platform
import re
import textwrap
import time
from pathlib import Path

import mpirun
import pytest
import torch
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.engine.engine import Engine

CHUNK_BYTES = 1 << 19


def size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def count_backward(wrapped: DDP, *shape: int) -> dict[str, int]:
    """Return what the engine counts for one forward and backward pass."""
    engine = wrapped.process_group.engine
    before = engine.counters
    wrapped(torch.ones(shape)).sum().backward()
    return {name: value - before[name] for name, value in engine.counters.items()}


@pytest.mark.mpi
class TestCounters:
    @pytest.mark.smoke
    def test_one_all_reduce_a_bucket(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        wrapped = DDP(model, bucket_cap_mb_list=[1e-6], transport="mpi")
        for _ in range(3):
            counted = count_backward(wrapped, 2, 4)
            assert counted["submitted"] == 4
            assert counted["chunks"] == (4 if size() > 1 else 0)
            assert counted["thread_chunks"] <= counted["chunks"]

    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize(("quarters", "chunks"), [(8, 2), (10, 3)])
    def test_large_bucket_travels_in_chunks(
        self, dtype: torch.dtype, quarters: int, chunks: int
    ) -> None:
        """The flags behind the gradients are few: they join the last chunk. A half does not."""
        columns = CHUNK_BYTES // max(dtype.itemsize, 4) // 4
        model = nn.Linear(columns, quarters, bias=False, dtype=dtype)
        wrapped = DDP(model, transport="mpi")
        wrapped(torch.ones(1, columns, dtype=dtype)).sum().backward()
        engine = wrapped.process_group.engine
        before = engine.counters
        wrapped(torch.ones(1, columns, dtype=dtype)).sum().backward()
        assert engine.counters["submitted"] - before["submitted"] == 1
        assert engine.counters["chunks"] - before["chunks"] == (chunks if size() > 1 else 0)
        assert model.weight.grad is not None
        assert (model.weight.grad == 2).all()

    def test_nothing_under_no_sync(self) -> None:
        wrapped = DDP(nn.Linear(4, 4))
        with wrapped.no_sync():
            counted = count_backward(wrapped, 2, 4)
        # The thread may nap for what another test has left under way.
        del counted["naps"], counted["yields"]
        assert set(counted.values()) == {0}

    @pytest.mark.essential
    def test_names(self) -> None:
        counters = DDP(nn.Linear(1, 1)).process_group.engine.counters
        names = {"submitted", "chunks", "thread_chunks", "naps", "yields", "heard", "missed"}
        assert set(counters) == names


class TestLifeCycle:
    def test_without_channels_there_is_no_thread(self) -> None:
        engine = Engine()
        assert not engine.has_thread
        engine.stop()
        engine.stop()

    def test_channel_of_a_world_of_one(self) -> None:
        engine = Engine()
        channel = engine.open_channel(None)
        assert channel.idle
        assert not channel.closed
        assert channel.communicator is None
        engine.close_channel(channel)
        assert channel.closed
        assert not engine.has_thread

    def test_wrong_arguments(self) -> None:
        with pytest.raises(TypeError):
            Engine().close_channel(None)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            Engine(False)  # type: ignore[call-arg]

    @pytest.mark.smoke
    @pytest.mark.mpi(min_size=2)
    def test_thread_starts_with_the_first_channel_and_stops(self) -> None:
        from mpi4py import MPI

        from mpiddp.transports.messages import MessageTransport
        from mpiddp.transports.wire import Wire

        communicator = MPI.COMM_WORLD.Dup()
        for threaded in (True, False):
            engine = Engine(threaded=threaded)
            channel = engine.open_channel(MessageTransport(Wire(communicator)), communicator)
            assert engine.has_thread == threaded
            engine.close_channel(channel)
            engine.stop()
            assert not engine.has_thread
        communicator.Free()

    @pytest.mark.mpi
    @pytest.mark.parametrize(
        ("chunk_bytes", "window"), [(0, 2), (100, 2), (1 << 31, 2), (1 << 20, 0), (1 << 20, 17)]
    )
    def test_transport_checks_its_settings(self, chunk_bytes: int, window: int) -> None:
        from mpi4py import MPI

        from mpiddp.transports.messages import MessageTransport
        from mpiddp.transports.wire import Wire

        with pytest.raises(ValueError, match="chunk_bytes" if window == 2 else "window"):
            MessageTransport(Wire(MPI.COMM_SELF, chunk_bytes=chunk_bytes, window=window))


def slice_of(thread: int) -> int | None:
    """Return the slice that a thread asked for in ns, None where the kernel does not say."""
    number = {"x86_64": 315, "aarch64": 275}.get(platform.machine())  # SYS_sched_getattr
    release = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if number is None or release < (6, 12):
        return None
    attributes = (ctypes.c_uint64 * 6)()
    assert ctypes.CDLL(None).syscall(number, thread, attributes, 48, 0) == 0
    return attributes[3]


def blocked_signals(thread: int) -> int:
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
    return int(line.split()[1], 16)


@pytest.mark.mpi(min_size=2)
def test_engine_thread_blocks_all_signals_and_asks_for_short_turns() -> None:
    from mpi4py import MPI

    from mpiddp.transports.messages import MessageTransport
    from mpiddp.transports.wire import Wire

    communicator = MPI.COMM_WORLD.Dup()
    before = set(os.listdir("/proc/self/task"))
    engine = Engine()
    channel = engine.open_channel(MessageTransport(Wire(communicator)), communicator)
    started = set(os.listdir("/proc/self/task")) - before
    assert len(started) == 1
    # All but KILL and STOP, and those that the C library keeps for itself (32 and 33).
    unblockable = {9, 19, 32, 33}
    thread = int(started.pop())
    # The C library blocks them, too, until a thread runs.
    until = time.monotonic() + 20
    while Path(f"/proc/self/task/{thread}/comm").read_text() != "mpiddp engine\n":
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.1)
    blocked = blocked_signals(thread)
    assert {s for s in range(1, 65) if not blocked >> (s - 1) & 1} <= unblockable
    assert slice_of(thread) in (None, 100_000)
    engine.close_channel(channel)
    engine.stop()
    communicator.Free()


PREAMBLE = """\
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp
from mpiddp import DistributedDataParallel as DDP

torch.set_num_threads(1)
"""


def run(folder: Path, source: str, limit: float = 60) -> tuple[int, str, str]:
    """Run a script on two ranks; return exit code, stdout and stderr."""
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(source))
    done = mpirun.run(2, [script], timeout=limit)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done.returncode, done.stdout, done.stderr


@pytest.mark.essential
@pytest.mark.timeout(100)
def test_error_of_mpi_is_raised_where_backward_waits(tmp_path: Path) -> None:
    """An error that only the engine thread sees comes out of backward.

    It is a real one, of the kind that each MPI reports instead of crashing. MPICH knows a
    communicator that was freed. Open MPI does not, but finds that the ranks' messages differ
    in size.
    """
    code, stdout, stderr = run(
        tmp_path,
        """
        import traceback
        from mpi4py import MPI
        from mpiddp.mpi.errors import MPIError

        mpiddp.init_process_group(timeout=timedelta(seconds=20))
        rank, open_mpi = dist.get_rank(), MPI.get_vendor()[0] == "Open MPI"

        class Pause(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()

            @staticmethod
            def backward(context, gradient):
                time.sleep(0.5)  # all gradients are there, and backward goes on
                return gradient

        model = torch.nn.Linear(1000, 10 if rank == 0 or not open_mpi else 5)
        wrapped = DDP(model, init_sync=False, transport="mpi")
        inputs = torch.ones(2, 1000, requires_grad=True)
        if not open_mpi:
            wrapped(inputs).sum().backward()  # the first one uses the communicator itself
            wrapped.process_group.channel_pool._channels[0].communicator.Free()
        try:
            wrapped(Pause.apply(inputs)).sum().backward()
        except MPIError as error:
            code = MPI.ERR_TRUNCATE if open_mpi else MPI.ERR_COMM
            assert MPI.Get_error_class(error.code) == code, error.code
            assert error.call == ("MPI_Test" if open_mpi else "MPI_Iallreduce"), error.call
            assert error.rank in (rank, -1) if not open_mpi else error.rank == rank
            assert f"{error.call} failed on world rank {rank}" in str(error)
            if open_mpi:
                assert "communicator 'mpiddp gradients 0'" in str(error)
            assert isinstance(error, RuntimeError)
            print(f"rank {rank} was told of it")
            # And so is whoever comes next.
            try:
                wrapped(inputs).sum().backward()
            except RuntimeError:
                print(f"rank {rank} was told again")
        # What is left of that communicator does not end well.
        sys.stdout.flush()
        told = f"{__file__}.told"
        if rank == 1:
            open(told, "w").close()
        while not os.path.exists(told):
            time.sleep(0.01)
        time.sleep(0.5)  # for the launcher to read what was printed
        MPI.COMM_WORLD.Abort(7)
        """,
    )
    assert code == 7
    # The sender of the longer message does not learn that it did not fit.
    assert "rank 1 was told of it" in stdout
    assert "rank 1 was told again" in stdout
    assert "Traceback" not in stderr


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_children_neither_hang_nor_touch_mpi(tmp_path: Path) -> None:
    """Forked processes and data loaders' workers live beside a training that goes on."""
    code, stdout, stderr = run(
        tmp_path,
        """
        import gc, multiprocessing, warnings

        # Python 3.12 says that a process with threads had better not fork.
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded.*fork", category=DeprecationWarning
        )


        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 16

            def __getitem__(self, index):
                if index == 13 and os.environ.get("BROKEN"):
                    raise ValueError("no row 13")
                return torch.full((4,), float(index))


        def compute(queue):
            global wrapped
            total = sum(p.sum().item() for p in wrapped.parameters())
            del wrapped  # its reducer and its engine are only copies here
            gc.collect()
            queue.put(total == total)


        def fail():
            raise ValueError("broken child")


        def leave():
            sys.exit(0)


        def main():
            global wrapped
            mpiddp.init_process_group(timeout=timedelta(seconds=60))
            rank = dist.get_rank()
            wrapped = DDP(torch.nn.Linear(4, 4))

            def step(inputs):
                wrapped.zero_grad()
                wrapped(inputs).square().sum().backward()

            step(torch.ones(2, 4))
            fork = multiprocessing.get_context("fork")
            queue = fork.Queue()
            child = fork.Process(target=compute, args=(queue,))
            # All-reduces are under way when it forks.
            loss = wrapped(torch.ones(2, 4)).sum()
            child.start()
            loss.backward()
            assert queue.get(timeout=30)
            child.join(30)
            assert child.exitcode == 0, child.exitcode
            for target, exitcode in ((fail, 1), (leave, 0)):
                child = fork.Process(target=target)
                child.start()
                step(torch.ones(2, 4))
                child.join(30)
                assert child.exitcode == exitcode, child.exitcode
            # Without multiprocessing, whose children leave by os._exit.
            pid = os.fork()
            if pid == 0:
                gc.collect()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0

            for method in ("fork", "spawn"):
                loader = torch.utils.data.DataLoader(
                    Rows(), batch_size=4, num_workers=2 if method == "fork" else 1,
                    multiprocessing_context=method, persistent_workers=True,
                )
                for epoch in range(2):
                    seen = []
                    for batch in loader:
                        step(batch)
                        seen += batch[:, 0].tolist()
                    assert sorted(seen) == list(range(16))
                del loader

            os.environ["BROKEN"] = "1"
            loader = torch.utils.data.DataLoader(
                Rows(), batch_size=4, num_workers=1, multiprocessing_context="fork"
            )
            try:
                list(loader)
            except ValueError as error:
                assert "no row 13" in str(error)
            else:
                raise AssertionError("the worker's error was lost")
            step(torch.ones(2, 4))
            mpiddp.destroy_process_group()
            print(f"rank {rank} is done")


        if __name__ == "__main__":
            main()
        """,
        limit=120,
    )
    assert code == 0
    assert "rank 0 is done" in stdout
    assert "rank 1 is done" in stdout
    assert stderr.count("ValueError: broken child") == 2
    assert stderr.count("Traceback") == 2
