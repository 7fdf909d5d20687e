"""Who makes progress changes nothing but time: the thread on or off, once more, or 16 ranks.

The setting is read when MPI is initialised, so each of these runs is an mpirun of its own.
"""

import json
import time
from pathlib import Path

import mpirun
import pytest
import torch
from replicas import RANK, SIZE, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP

# Trains a little on every path: several buckets and chunks, 16 bits, accumulation, sparse and
# unused parameters. Each rank writes digests of all gradients and parameters of all steps.
PROGRAM = """
import json, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mpiddp
from replicas import all_bits

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 3, sparse=True)
        self.first = nn.Linear(3, 700)
        self.rounded = nn.Linear(700, 700, dtype=torch.bfloat16)
        self.last = nn.ModuleList([nn.Linear(700, 2), nn.Linear(700, 2)])

    def forward(self, tokens, which):
        x = self.first(self.words(tokens)).tanh()
        return self.last[which](self.rounded(x.bfloat16()).float())

mpiddp.init_process_group(timeout=timedelta(seconds=60))
torch.set_num_threads(1)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
digests = []
for views in (False, True):
    model = mpiddp.DistributedDataParallel(
        Net(), bucket_cap_mb=0.5, find_unused_parameters=True, gradient_as_bucket_view=views
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        tokens = torch.randint(9, (2, size, 4))[:, rank]
        optimizer.zero_grad()
        with model.no_sync():
            model(tokens[0], 0).square().mean().backward()
        model(tokens[1], (rank + step) % 2).square().mean().backward()
        digests.append(all_bits((name, p.grad) for name, p in model.named_parameters()))
        optimizer.step()
        digests.append(all_bits(model.named_parameters()))
# Waits below Python, where nobody makes progress.
works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(3)]
torch._C._collect_all([work.get_future() for work in works]).wait()
engine = dist.group.WORLD.engine

# Thirty buckets of one number each, with time between: what is finished before the last arrives?
chain = nn.ParameterList(torch.ones(()) for _ in range(30))

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers = chain

    def forward(self):
        return sum(self.numbers[1:], self.numbers[0] * 1)

wrapped = mpiddp.DistributedDataParallel(Chain(), bucket_cap_mb=1e-6)
arrived = []

def pause(gradient):
    time.sleep(0.002)
    arrived.append(engine.counters["chunks"])

for number in chain:
    number.register_hook(pause)
loss = wrapped()
before = engine.counters["chunks"]
dist.barrier()
loss.backward()
report = {"digests": digests, "in_hooks": arrived[-1] - before}
report |= {"thread": engine.has_thread, **engine.counters}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(report))
mpiddp.destroy_process_group()
"""


class Run:
    """One mpirun of the program, and what its ranks wrote."""

    def __init__(
        self, folder: Path, ranks: int, thread: str, transport: str = "mpi", timeout: float = 100
    ) -> None:
        folder.mkdir()
        program = folder / "program.py"
        program.write_text(PROGRAM)
        environment = {
            "MPIDDP_PROGRESS_THREAD": thread,
            "MPIDDP_TRANSPORT": transport,
            "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
        }
        done = mpirun.run(ranks, [program, folder], timeout, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        self.reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        digests = [report["digests"] for report in self.reports]
        assert all(own == digests[0] for own in digests), "the ranks hold different bits"
        self.digests = digests[0]
        # Otherwise equal digests would prove nothing.
        assert len({str(step) for step in self.digests}) == len(self.digests) == 16


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_same_bits_with_and_without_the_thread(tmp_path):
    first, off = (Run(tmp_path / name, 3, thread) for name, thread in [("a", "1"), ("b", "0")])
    assert first.digests == off.digests
    for report in first.reports:
        assert report["thread"]
    for report in off.reports:
        assert not report["thread"]
        assert report["thread_chunks"] == 0
        assert report["naps"] == 0
        assert report["chunks"] == first.reports[0]["chunks"]
        assert report["submitted"] == first.reports[0]["submitted"]
    # The last rank to come finds what the others have sent.
    assert max(report["in_hooks"] for report in off.reports) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_same_bits_from_run_to_run(tmp_path):
    first, again = (Run(tmp_path / name, 3, "1") for name in ("a", "b"))
    assert first.digests == again.digests


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_same_bits_in_shared_memory(tmp_path):
    first, thread = (
        Run(tmp_path / name, 3, thread, "shared") for name, thread in [("a", "0"), ("b", "1")]
    )
    assert first.digests == thread.digests
    for report in first.reports:
        assert not report["thread"]
        assert report["chunks"] == report["submitted"]
    for report in thread.reports:
        assert report["thread"]
    assert max(report["in_hooks"] for report in first.reports) > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.slow
def test_more_ranks_than_cores(tmp_path, ranks):
    for transport in ("shared",) if ranks == 8 else ("mpi", "shared"):
        assert Run(tmp_path / transport, ranks, "1", transport, timeout=140).digests


class _Pause(torch.autograd.Function):
    """Does nothing but wait in backward until something has happened."""

    @staticmethod
    def forward(ctx, x, happened):
        ctx.happened = happened
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        end = time.monotonic() + 20
        while not ctx.happened() and time.monotonic() < end:
            time.sleep(0.001)  # lets go of the GIL, as a long operation does
        return gradient, None


class _Pausing(nn.Module):
    def __init__(self, happened) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 40_000)
        self.happened = happened

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(_Pause.apply(self.first(x), self.happened))
        return y


@pytest.mark.essential(keep=1)
@pytest.mark.mpi(min_size=2)
def test_thread_reduces_while_backward_runs(views):
    """The first bucket travels while backward is still busy with the rest."""
    chunks_in_pause = []

    def happened() -> bool:
        chunks_in_pause[-1] = engine.counters["thread_chunks"] - before
        return chunks_in_pause[-1] > 0

    model = _Pausing(happened)
    wrapped = DDP(model, bucket_cap_mb=0.1, gradient_as_bucket_view=views, transport="mpi")
    engine = wrapped.process_group.engine
    for _ in range(3):
        chunks_in_pause.append(0)
        wrapped.zero_grad()
        loss = wrapped(torch.full((2, 4), RANK + 1.0)).sum()
        before = engine.counters["thread_chunks"]
        loss.backward()
        with together():
            assert engine.has_thread
            assert chunks_in_pause[-1] >= 1
            assert model.last.bias.grad.unique().tolist() == [2.0]


@pytest.mark.mpi
@pytest.mark.skipif(SIZE > 1, reason="for a world of one")
def test_no_thread_in_a_world_of_one():
    wrapped = DDP(nn.Linear(2, 1))
    wrapped(torch.ones(1, 2)).sum().backward()
    assert not wrapped.process_group.engine.has_thread
    assert wrapped.process_group.engine.counters["chunks"] == 0


@pytest.mark.mpi(min_size=2)
def test_thread_sleeps_when_there_is_nothing_to_do():
    wrapped = DDP(nn.Linear(2, 1), transport="mpi")
    wrapped(torch.ones(1, 2)).sum().backward()
    engine = wrapped.process_group.engine
    for _ in range(50):  # it may take a busy machine some time to come to it
        before = engine.counters
        time.sleep(0.2)
        if asleep := engine.counters == before:
            break
    with together():
        assert asleep
