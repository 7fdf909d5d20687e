"""Parameters that the ranks of a node share: who may write when, and what copies are."""

import contextlib
import copy
import os
import pickle
from pathlib import Path
from typing import Any

import mpirun
import pytest
import torch
from models import CASES, loss_of, mlp
from replicas import RANK, SIZE, assert_same_bits, batch_of, gather, share, together
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer


def small() -> nn.Sequential:
    return mlp(6, 200, 200, 3, dtype=torch.float32)


def make(seed: int = 0, **arguments: object) -> DDP:
    torch.manual_seed(seed)
    return DDP(small(), shared_parameters=True, **arguments)  # type: ignore[arg-type]


def step(model: DDP, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model, share(batch_of(2, 6))).backward()
    optimizer.step()


@pytest.mark.mpi
@pytest.mark.sizes
class TestOnAllRanks:
    @pytest.mark.essential
    def test_memory_is_one(self) -> None:
        """What is stepped, all see; each parameter has a storage of its own size."""
        model = make()
        with torch.no_grad(), together():
            for parameter in model.parameters():
                assert parameter.untyped_storage().nbytes() == parameter.nbytes
        shared = model._shared_parameters
        assert shared is not None
        gather(0)
        if RANK == 0:
            shared.flat[0].fill_(7.5)
        gather(0)
        with together():
            assert any((parameter == 7.5).all() for parameter in model.parameters())

    def test_names_shapes_and_objects_stay(self) -> None:
        module = CASES["tied"].make()
        module.frozen = nn.Linear(2, 2).requires_grad_(False)  # type: ignore[assignment]
        before = [(name, p.shape, p.dtype, p) for name, p in module.named_parameters()]
        values = [p.detach().clone() for p in module.parameters()]
        DDP(module, shared_parameters=True)
        after = [(name, p.shape, p.dtype, p) for name, p in module.named_parameters()]
        with together():
            assert all(a[:3] == b[:3] and a[3] is b[3] for a, b in zip(before, after, strict=True))
            assert module.output.weight is module.embedding.weight
            if RANK == 0:
                assert all(map(torch.equal, values, module.parameters()))

    def test_writing(self) -> None:
        """What all do in it counts once, also with collectives and numbers drawn anew."""
        model = make()
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        step(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad(), model.writing(), model.writing():
            for parameter in model.parameters():
                parameter.mul_(2)
            torch.distributed.barrier()
        with together():
            assert all(
                torch.equal(p, 2 * b) for p, b in zip(model.parameters(), before, strict=True)
            )
        with torch.no_grad(), model.writing():
            model.module[0].weight.fill_(RANK + 1)
            mine = model.module[0].weight[0, 0].item()
        with together():
            assert mine == RANK + 1
            assert (model.module[0].weight == 1).all()
        step(model, optimizer)

    def test_converted(self) -> None:
        model = make()
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        model.module[0].double()
        with together(), pytest.raises(RuntimeError, match=r"was changed from .*float32"):
            optimizer.step()

    def test_error_in_writing(self) -> None:
        """The parameters stay; no rank goes on."""
        model = make()
        before = [p.detach().clone() for p in model.parameters()]

        def change() -> None:
            with torch.no_grad(), model.writing():
                model.module[0].weight.zero_()
                if RANK == SIZE - 1:
                    raise ZeroDivisionError

        with together():
            with pytest.raises(ZeroDivisionError if RANK == SIZE - 1 else RuntimeError):
                change()
            assert all(map(torch.equal, model.module.parameters(), before))
            with pytest.raises(RuntimeError, match=f"rank {SIZE - 1} failed"):
                model(torch.zeros(2, 6))

    def test_error_in_a_step(self) -> None:
        """All ranks raise, and nobody can save what was half stepped."""

        class Failing(torch.optim.SGD):
            fails = False

            def step(self, closure: object = None) -> None:  # type: ignore[override]
                if self.fails and RANK == SIZE - 1:
                    raise ZeroDivisionError
                super().step()

        model = make()
        optimizer = NodeOptimizer(model, Failing, lr=0.1)
        step(model, optimizer)
        Failing.fails = True
        with together():
            if RANK == SIZE - 1:
                with pytest.raises(ZeroDivisionError):
                    step(model, optimizer)
            else:
                with contextlib.suppress(RuntimeError):  # if the others were quicker
                    step(model, optimizer)
            for use in (
                model.module.state_dict,
                optimizer.state_dict,
                optimizer.step,
                lambda: model(torch.zeros(2, 6)),
                lambda: model.module(torch.zeros(2, 6)),
                lambda: list(model.parameters()),
            ):
                with pytest.raises(RuntimeError, match=f"rank {SIZE - 1} failed"):
                    use()  # type: ignore[operator]

    def test_autograd_sees_a_step(self) -> None:
        """A graph that saved a parameter must not be used after the step."""
        model = make()
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        loss = loss_of(model, share(batch_of(2, 6)))
        loss.backward(retain_graph=True)
        optimizer.step()
        with together(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.essential
    def test_copies_are_private(self) -> None:
        model = make(gradient_as_bucket_view=True)
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        step(model, optimizer)
        copies = [copy.deepcopy(model), copy.deepcopy(model.module)]
        copies.append(pickle.loads(pickle.dumps(model.module)))
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        with torch.no_grad():
            for other in copies:
                for parameter in other.parameters():
                    parameter.add_(RANK + 1)
        step(model, optimizer)
        with together():
            for other in copies:
                first = next(other.parameters())
                assert not torch.equal(first, next(model.parameters()))
                other.state_dict()
        rows = gather([next(other.parameters()).detach()[0, 0].item() for other in copies])
        with together():
            assert SIZE == 1 or rows[0] != rows[1]
            with pytest.raises(TypeError, match="state_dict"):
                copy.deepcopy(optimizer)
        # The copy of the wrapper trains as plain DDP does.
        plain = torch.optim.SGD(copies[0].parameters(), lr=0.1)
        step(copies[0], plain)
        copies[0](torch.zeros(2, 6))
        average(torch.zeros(2, 6))

    @pytest.mark.thorough(keep=1)
    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_data_loaders(self, context: str) -> None:
        model = make()
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        data = torch.utils.data.TensorDataset(torch.ones(4, 6))
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, num_workers=1, multiprocessing_context=context
        )
        for (batch,) in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        assert_same_bits(model.named_parameters())

    def test_forked_child_reads(self) -> None:
        """A child may evaluate the model; what it writes nobody sees."""
        model = make()
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        step(model, optimizer)
        expected = model.module(torch.ones(2, 6)).sum().item()
        child = os.fork()
        if child == 0:
            same = model.module(torch.ones(2, 6)).sum().item() == expected
            model.module[0].weight.data.zero_()
            os._exit(0 if same else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with together():
            assert status == 0
            assert model.module(torch.ones(2, 6)).sum().item() == expected

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # in dynamo
    @pytest.mark.thorough
    @pytest.mark.parametrize("compiles", ["the step of training", "the wrapper", "the module"])
    def test_compiled_and_checkpointed(self, compiles: str) -> None:
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = small()

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = checkpoint(self.layers, x, use_reentrant=False)
                return y

        def compiled(what: Any, where: str) -> Any:
            return torch.compile(what, backend="aot_eager") if compiles == where else what

        plain = DDP(Checkpointed())
        shared = DDP(compiled(Checkpointed(), "the module"), shared_parameters=True)
        for p, q in zip(plain.parameters(), shared.parameters(), strict=True):
            with shared.writing(), torch.no_grad():
                q.copy_(p)
        called = compiled(shared, "the wrapper")
        own = NodeOptimizer(called, torch.optim.SGD, lr=0.1)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

        def train(model: Any, stepper: torch.optim.Optimizer, batch: Tensor) -> None:
            stepper.zero_grad()
            loss_of(model, batch).backward()
            stepper.step()

        train_shared = compiled(train, "the step of training")
        for _ in range(3):
            batch = share(batch_of(2, 6))
            train(plain, optimizer, batch)
            train_shared(called, own, batch)
        with together():
            for p, q in zip(plain.parameters(), shared.parameters(), strict=True):
                torch.testing.assert_close(p, q)

    def test_buffers_stay_private(self) -> None:
        model = DDP(nn.BatchNorm1d(6), shared_parameters=True)
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        torch.manual_seed(RANK)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, torch.randn(8, 6)).backward()
            optimizer.step()
        means = gather(model.module.running_mean.tolist())
        with together():
            assert SIZE == 1 or means[0] != means[1]

    @pytest.mark.parametrize(
        ("module", "arguments", "what"),
        [
            (nn.Embedding(3, 3, sparse=True), {}, "dense"),
            (nn.Linear(2, 2), {"skip_all_reduce_unused_params": True}, "skip_all_reduce"),
            (nn.Linear(2, 2), {"mixed_precision": object()}, "mixed_precision"),
            (nn.Linear(2, 2), {"delay_all_reduce_named_params": [("a", None)]}, "delay_all_reduce"),
            (nn.Embedding(4, 2, max_norm=1.0), {}, "max_norm, which changes the parameters"),
        ],
    )
    def test_refused(self, module: nn.Module, arguments: dict[str, object], what: str) -> None:
        with together(), pytest.raises(ValueError, match=what):
            DDP(module, shared_parameters=True, **arguments)  # type: ignore[arg-type]

    def test_refused_on_a_gpu(self) -> None:
        """It looks like one; there is none here."""
        weight = torch.empty(2, 2, device="meta")
        on_gpu = FakeTensor(FakeTensorMode(), weight, torch.device("cuda", 0))
        module = nn.ParameterDict({"a": nn.Parameter(on_gpu)})
        with together(), pytest.raises(ValueError, match="parameter a is on cuda:0"):
            DDP(module, shared_parameters=True)


MEMORY = """
import sys, torch, mpiddp
from mpiddp.optim import NodeOptimizer

mpiddp.init_process_group()
shared = sys.argv[1] == "shared"
model = torch.nn.Sequential(*[torch.nn.Linear(1500, 1500) for _ in range(4)])
model = mpiddp.DistributedDataParallel(
    model, shared_parameters=shared, gradient_as_bucket_view=True)
if shared:
    optimizer = NodeOptimizer(model, torch.optim.AdamW)
else:
    optimizer = torch.optim.AdamW(model.parameters())
before = 0
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 1500)).sum().backward()
    optimizer.step()
state = optimizer.state_dict()["state"]
ours = [*model.parameters(), *(t for s in state.values() for t in s.values())]
torch.distributed.barrier()
addresses = {t.data_ptr() for t in ours if t.numel() > 1000}
total = 0
counted = False
with open("/proc/self/smaps") as lines:
    for line in lines:
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            start, end = (int(text, 16) for text in words[0].split("-"))
            counted = any(start <= address < end for address in addresses)
        elif counted and words[0] == "Pss:":
            total += int(words[1]) * 1024
torch.distributed.barrier()
print("pss", total, sum(t.nbytes for t in ours))
mpiddp.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.once
def test_memory_of_a_node(tmp_path: Path) -> None:
    """Parameters and state are there once, not once for each rank."""
    program = tmp_path / "memory.py"
    program.write_text(MEMORY)
    done = mpirun.run(2, [program, "shared"], timeout=60)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("pss")]
    held = sum(int(words[1]) for words in found)
    assert len(found) == 2
    assert held < 1.05 * int(found[0][2])


KILLED = """
import os, signal, sys, time, torch, mpiddp
mpiddp.init_process_group()
rank = torch.distributed.get_rank()

class Slow(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

model = mpiddp.DistributedDataParallel(torch.nn.Linear(300, 300), shared_parameters=True)
optimizer = mpiddp.optim.NodeOptimizer(model, Slow, lr=0.1, momentum=0.9)
model(torch.ones(1, 300)).sum().backward()
optimizer.step()
saved = {"model": model.module, "optimizer": optimizer}[sys.argv[1]]
torch.save(saved.state_dict(), sys.argv[2])
"""


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("saved", ["model", "optimizer"])
def test_killed_in_a_step(tmp_path: Path, saved: str) -> None:
    """The job ends, and no checkpoint of half a step is written."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    done = mpirun.run(3, [program, saved, tmp_path / "checkpoint"], timeout=60)
    assert done.returncode != 0
    assert not (tmp_path / "checkpoint").exists()
