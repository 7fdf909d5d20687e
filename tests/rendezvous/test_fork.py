"""Processes that a rank forks: their own gradients, clear errors, and an end without MPI_Finalize.

Each test starts a job of its own; test_engine.py has data loaders beside a training.
"""

import textwrap
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(150)

PREAMBLE = """\
import os, signal, sys, threading, time, warnings
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp
from mpiddp import DistributedDataParallel as DDP

# Python 3.12 says that a process with threads had better not fork.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
torch.set_num_threads(1)
IMPORTS
mpiddp.init_process_group(timeout=timedelta(seconds=60))
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
wrapped = DDP(model, gradient_as_bucket_view=VIEWS)


def step(value):
    wrapped.zero_grad()
    wrapped(torch.full((2, 4), float(value))).sum().backward()


def in_child(action):
    # Return the exit status of a forked process that ends as interpreters do, negative: a signal.
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        raise SystemExit(action())
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


for value in range(3):
    step(value)
"""

END = """
step(1)
assert (model.weight.grad == 2).all()
dist.barrier()
mpiddp.destroy_process_group()
print("done", flush=True)
"""


def run(
    folder: Path,
    source: str,
    *,
    views: bool = True,
    imports: str = "",
    transport: str = "shared",
    module: str = "",
) -> str:
    preamble = PREAMBLE.replace("VIEWS", str(views)).replace("IMPORTS", imports)
    script = folder / "script.py"
    script.write_text(preamble + textwrap.dedent(source) + END)
    command = ["-m", "mpiddp", script] if module else [script]
    done = mpirun.run(2, command, timeout=130, env={"MPIDDP_TRANSPORT": transport})
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    return done.stdout + done.stderr


@pytest.mark.thorough
def test_gradients_of_a_child_are_its_own(tmp_path: Path) -> None:
    """With views: what a child writes nobody else trains with, and it reads what was there."""
    run(
        tmp_path,
        """
        step(1)
        before = model.weight.grad.clone()
        dist.barrier()


        def overwrite():
            assert torch.equal(model.weight.grad, before)
            for parameter in model.parameters():
                parameter.grad.fill_(99)
            assert (model.weight.grad == 99).all()
            # And those of a child of it.
            child = os.fork()
            if child == 0:
                assert (model.weight.grad == 99).all()
                model.weight.grad.fill_(98)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert (model.weight.grad == 99).all()
            return 0


        # One that lives while its parent goes on, and writes all the while.
        child = os.fork()
        if child == 0:
            while True:
                model.weight.grad.fill_(97)
        if rank == 1:
            assert in_child(overwrite) == 0
        dist.barrier()
        assert torch.equal(model.weight.grad, before)
        for value in range(50):
            step(value)
            assert (model.weight.grad == 2 * value).all(), model.weight.grad
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        """,
    )


@pytest.mark.essential(keep=1)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "transport", [pytest.param("shared", id="memory"), pytest.param("mpi", id="messages")]
)
def test_what_leads_to_mpi_is_refused(tmp_path: Path, transport: str) -> None:
    run(
        tmp_path,
        """
        with_buffers = DDP(torch.nn.BatchNorm1d(4))
        with_buffers(torch.ones(2, 4)).sum().backward()
        loss = wrapped(torch.ones(2, 4)).sum()
        started = dist.irecv(torch.ones(1), 1 - rank)


        def backward():
            loss.backward()


        def evaluate():
            with torch.no_grad():
                with_buffers.eval()(torch.ones(2, 4))


        CALLS = {
            "forward": lambda: wrapped(torch.ones(2, 4)),
            "backward": backward,
            "buffers": evaluate,
            "construction": lambda: DDP(torch.nn.Linear(1, 1), init_sync=False),
            "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
            "send": lambda: dist.send(torch.ones(1), 1 - rank),
            "barrier": dist.barrier,
            "monitored_barrier": dist.monitored_barrier,
            "new_group": dist.new_group,
            "wait": started.wait,
            "store": lambda: dist.distributed_c10d._get_default_store().set("a", "b"),
            "begin": lambda: (mpiddp.destroy_process_group(), mpiddp.init_process_group()),
        }


        def try_all():
            for name, call in CALLS.items():
                try:
                    call()
                except RuntimeError as error:
                    if f"was forked from rank {rank} of 2" in str(error):
                        continue
                    print(name, error, flush=True)
                else:
                    print(name, "went through", flush=True)
                return 1
            return 0


        status = in_child(try_all)
        assert status == 0, status
        loss.backward()
        dist.send(torch.ones(1), 1 - rank)
        started.wait()
        """,
        transport=transport,
    )


@pytest.mark.thorough
def test_a_child_computes_alone(tmp_path: Path) -> None:
    """Evaluation through the wrapper, local gradients, and torch without torch.distributed."""
    run(
        tmp_path,
        """
        def compute():
            wrapped.eval()
            with torch.no_grad():
                wrapped(torch.ones(2, 4))
            with wrapped.no_sync():
                wrapped(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            assert (model.weight.grad == 2).all()
            return 0


        assert in_child(compute) == 0
        """,
    )


STATUS = """
def fail():
    raise ValueError("broken child")


def interrupt():
    raise KeyboardInterrupt


def caught():
    try:
        sys.exit(9)
    except SystemExit as error:
        assert error.code == 9
    return 0


class Exit(SystemExit):
    pass


def leave():
    raise Exit(6)


for action, status in (
    (lambda: sys.exit(3), 3),
    (lambda: leave_by_name(4), 4),
    (lambda: None, 0),
    (lambda: "a reason", 1),
    (lambda: os._exit(5), 5),
    (leave, 6),
    (caught, 0),
    (fail, 1),
    (interrupt, -signal.SIGINT if RUNNER == "" else 130),
):
    ended = in_child(action)
    assert ended == status, (ended, status)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("imports", "module"),
    [
        pytest.param("", "", id="script"),
        pytest.param("from mpi4py import MPI", "", id="mpi4py first", marks=pytest.mark.slow),
        pytest.param("", "runner", id="runner", marks=pytest.mark.slow),
    ],
)
def test_children_end_with_their_status(tmp_path: Path, imports: str, module: str) -> None:
    """They hang in no MPI_Finalize, end no job, and the parent trains on."""
    said = run(
        tmp_path,
        STATUS.replace("RUNNER", repr(module)),
        imports=f"{imports}\nfrom sys import exit as leave_by_name",
        module=module,
    )
    assert said.count("ValueError: broken child") == 2
    assert said.count("a reason") == 2


@pytest.mark.thorough
@pytest.mark.essential
def test_children_of_multiprocessing_and_data_loaders(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import multiprocessing

        from torch.utils.data import DataLoader


        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                model.weight.grad.fill_(50)
                return torch.full((4,), float(index))


        def work():
            model.weight.grad.fill_(60)
            sys.exit(7)


        step(1)
        loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        assert sum(len(batch) for batch in loader) == 8
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(30)
        assert process.exitcode == 7, process.exitcode
        assert (model.weight.grad == 2).all()
        """,
    )


@pytest.mark.thorough
def test_fork_while_gradients_travel(tmp_path: Path) -> None:
    """Whatever lock the engine's thread has at that moment, the child neither hangs nor crashes."""
    run(
        tmp_path,
        """
        import gc

        large = DDP(torch.nn.Linear(1 << 18, 2), transport="mpi")


        def let_go():
            global large, wrapped
            del large, wrapped
            gc.collect()
            return 0


        stop = threading.Event()
        statuses = []


        def fork_often():
            while not stop.is_set():
                child = os.fork()
                if child == 0:
                    let_go()
                    os._exit(0)
                statuses.append(os.waitpid(child, 0)[1])


        thread = threading.Thread(target=fork_often)
        thread.start()
        for _ in range(20):
            large(torch.ones(1, 1 << 18)).sum().backward()
            large.zero_grad()
        stop.set()
        thread.join()
        assert statuses and not any(statuses), statuses
        """,
    )


@pytest.mark.thorough
def test_children_keep_no_buckets_that_hold_nothing_of_theirs(tmp_path: Path) -> None:
    """Of the first set, which is given back after one step; gradients that lie there stay."""
    run(
        tmp_path,
        """
        from mpiddp.process_group import call_table


        def pieces(process):
            # Sizes in kB of the pieces of shared memory that a process maps.
            lines = open(f"/proc/{process}/smaps").read().split("\\n")
            starts = [number for number, line in enumerate(lines) if "memfd:mpiddp" in line]
            sizes = [int(lines[start + 1].split()[1]) for start in starts]
            # Its own memory goes with the world, and most of it is never used.
            return [size for size in sizes if size != call_table.BYTES // 1024]


        def forked(action):
            child = os.fork()
            if child == 0:
                time.sleep(action())
                os._exit(0)
            return child


        def big_step():
            big.zero_grad()
            big(torch.ones(1, 1000)).sum().backward()


        big = DDP(torch.nn.Linear(1000, 1000), gradient_as_bucket_view=True)
        pipe = os.pipe()
        early = forked(lambda: 60)
        big_step()
        late = os.fork()
        if late == 0:
            os.read(pipe[0], 1)
            os._exit(not (big.module.weight.grad == 1).all())
        big_step()
        big_step()
        assert max(pieces(os.getpid())) > 3900
        assert max(pieces(early), default=0) < 3900, pieces(early)
        os.write(pipe[1], b"x")
        assert os.waitpid(late, 0)[1] == 0
        os.kill(early, signal.SIGKILL)
        os.waitpid(early, 0)
        """,
    )
