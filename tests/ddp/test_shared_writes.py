"""Programs that change shared parameters themselves: as in plain DistributedDataParallel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpirun
import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, SIZE, assert_same_bits, batch_of, share, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer


def make(
    *layers: Callable[[], nn.Module], shared: bool = True
) -> tuple[DDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    bare = mlp(6, 200, 200, 3, dtype=torch.float32)
    model = DDP(nn.Sequential(*[layer() for layer in layers], *bare), shared_parameters=shared)
    if shared:
        return model, NodeOptimizer(model, torch.optim.SGD, lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: DDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss_of(model, share(batch_of(2, 6))).backward()
    optimizer.step()


def swap_in(parameters: list[Tensor], average: list[Tensor]) -> None:
    """As torch_ema and diffusers do it."""
    for parameter, mean in zip(parameters, average, strict=True):
        parameter.data.copy_(mean.data)


WRITES: dict[str, Callable[[list[Tensor]], Any]] = {
    "swapped in and out": lambda parameters: [
        swap_in(parameters, each)
        for each in ([p * 0.5 for p in parameters], [p.clone() for p in parameters])
    ],
    "data =": lambda parameters: setattr(parameters[0], "data", parameters[0].data * 0.5),
    "numpy": lambda parameters: parameters[0].detach().numpy().__imul__(0.5),
    "data.mul_": lambda parameters: parameters[1].data.mul_(0.5),
    "data[...] =": lambda parameters: parameters[1].data.__setitem__(0, 1.0),
    "foreach of data": lambda parameters: torch._foreach_mul_([p.data for p in parameters], 0.5),
    "detach": lambda parameters: parameters[0].detach().zero_(),
}


@pytest.mark.mpi
@pytest.mark.sizes
class TestOnAllRanks:
    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
    def test_counts_once(self, write: Callable[[list[Tensor]], Any]) -> None:
        """As with a replica a rank: in the next forward, after a step, and after another change."""
        models = [make(), make(shared=False)]
        outputs = []
        for model, optimizer in models:
            train(model, optimizer, 0)
            for seed in (1, 2):
                with torch.no_grad():
                    write(list(model.parameters()))
                outputs.append(model(torch.ones(2, 6)).detach())
                train(model, optimizer, seed)
        with together():
            assert torch.equal(torch.stack(outputs[:2]), torch.stack(outputs[2:]))
            for own, truth in zip(*(model.parameters() for model, _ in models), strict=True):
                assert torch.equal(own, truth)
        shared = models[0][0]._shared_parameters
        assert shared is not None
        with together():
            assert not shared._mapping.has_own_pages()

    @pytest.mark.mpi(min_size=2)
    def test_evaluation_with_an_average_on_one_rank(self) -> None:
        model, optimizer = make()
        train(model, optimizer, 0)
        parameters = list(model.module.parameters())
        kept = [p.detach().clone() for p in parameters]
        if RANK == 0:
            swap_in(parameters, [p * 0.5 for p in kept])
            with torch.no_grad():
                model.module(torch.ones(2, 6))
        with together():
            factor = 0.5 if RANK == 0 else 1.0
            assert all(torch.equal(p, k * factor) for p, k in zip(parameters, kept, strict=True))
        if RANK == 0:
            swap_in(parameters, kept)
        train(model, optimizer, 1)
        assert_same_bits(model.named_parameters())

    @pytest.mark.mpi(min_size=2)
    @pytest.mark.parametrize("where", ["on one rank", "on all ranks"])
    def test_that_differ(self, where: str) -> None:
        """With plain DistributedDataParallel the replicas would differ from then on."""
        model, optimizer = make()
        train(model, optimizer, 0)
        if where == "on all ranks" or RANK == SIZE - 1:
            with torch.no_grad():
                model.module[0].weight[0, 0] = RANK
        loss_of(model, share(batch_of(2, 6))).backward()
        with together(), pytest.raises(RuntimeError, match=r"changed by the program.*0\.weight"):
            optimizer.step()

    @pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
    def test_allowed_in_writing(self, write: Callable[[list[Tensor]], Any]) -> None:
        models = [make(), make(shared=False)]
        for model, optimizer in models:
            train(model, optimizer, 0)
            with torch.no_grad(), model.writing():
                write(list(model.parameters()))
                model.module(torch.zeros(2, 6))
            train(model, optimizer, 1)
        with together():
            for own, truth in zip(*(model.parameters() for model, _ in models), strict=True):
                assert torch.equal(own, truth)

    def test_step_in_writing(self) -> None:
        """It would step a private copy."""
        model, optimizer = make()
        loss_of(model, share(batch_of(2, 6))).backward()
        message = r"step\(\) within writing"
        with together(), model.writing(), pytest.raises(RuntimeError, match=message):
            optimizer.step()

    @pytest.mark.essential
    def test_load_that_a_layer_refuses(self) -> None:
        """And that is caught: what was loaded before stays, training goes on, as in plain DDP."""
        models = [make(lambda: Picky(6, 6)), make(lambda: Picky(6, 6), shared=False)]
        for model, optimizer in models:
            given = {name: value * 0.5 for name, value in model.module.state_dict().items()}
            with together(), pytest.raises(RuntimeError, match="old format"):
                model.module.load_state_dict(given)
            for seed in range(3):
                train(model, optimizer, seed)
            assert_same_bits(model.named_parameters())
        with together():
            for own, truth in zip(*(model.parameters() for model, _ in models), strict=True):
                assert torch.equal(own, truth)

    @pytest.mark.mpi(min_size=2)
    def test_load_on_one_rank(self) -> None:
        """As at the end, to evaluate the best model: nobody waits."""
        model, optimizer = make()
        train(model, optimizer, 0)
        given = {name: value * 0.5 for name, value in model.module.state_dict().items()}
        if RANK == 0:
            model.module.load_state_dict(given)
        with together():
            same = map(torch.equal, model.module.state_dict().values(), given.values())
            assert all(same) == (RANK == 0)

    def test_loads_within_others(self) -> None:
        """Of a module around the wrapped one, and of one that loads a part by itself."""
        torch.manual_seed(0)
        model = DDP(Nested(6, 200), shared_parameters=True)
        optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
        around = nn.ModuleDict({"other": Nested(2, 2), "model": model.module})
        given = {name: value * 0.5 for name, value in around.state_dict().items()}
        around.load_state_dict(given)
        train(model, optimizer, 0)
        around.load_state_dict(given)
        with together():
            assert all(map(torch.equal, around.state_dict().values(), given.values()))

    def test_load_by_parts(self) -> None:
        """As some libraries do it."""
        model, optimizer = make()
        layer = model.module[0]
        given = {name: value.clone() * 0.5 for name, value in layer.state_dict().items()}

        def load() -> None:
            layer._load_from_state_dict(given, "", {}, True, [], [], [])

        load()
        with together():
            assert all(torch.equal(layer.state_dict()[name], given[name]) for name in given)
        train(model, optimizer, 0)


class Picky(nn.Linear):
    """Refuses what it is given."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        raise RuntimeError("old format")


class Nested(nn.Linear):
    """Loads a part by itself."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.part = nn.Linear(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(super().forward(x))  # type: ignore[no-any-return]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = {name: state_dict[f"{prefix}part.{name}"] for name in ("weight", "bias")}
        self.part.load_state_dict(given)
        super()._load_from_state_dict(state_dict, prefix, *args)


INTERRUPTED = """
import os, signal, sys, time, torch, mpiddp
from mpiddp.optim import NodeOptimizer

mpiddp.init_process_group()
rank = torch.distributed.get_rank()
model = mpiddp.DistributedDataParallel(torch.nn.Linear(300, 300), shared_parameters=True)
optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.01)

class Late(Exception):
    pass

def interrupt(*_):
    raise Late

signal.signal(signal.SIGALRM, interrupt)
model(torch.ones(1, 300)).sum().backward()
file = sys.argv[1]
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        optimizer.step()
    except Late:
        print("late", flush=True)
    try:
        optimizer.step()
    except RuntimeError as error:
        print("rank 0 says:", error, flush=True)
    open(file, "w").close()
else:
    while not os.path.exists(file):
        time.sleep(0.01)
    try:
        optimizer.step()
    except RuntimeError as error:
        print("rank 1 says:", error, flush=True)
os._exit(0)
"""


@pytest.mark.once
def test_exception_of_a_signal_handler(tmp_path: Path) -> None:
    """The rank does not know any more where the others are: no rank goes on, and all say why."""
    program = tmp_path / "interrupted.py"
    program.write_text(INTERRUPTED)
    done = mpirun.run(2, [program, tmp_path / "left"], timeout=60)
    said = [line for line in done.stdout.splitlines() if "says:" in line]
    assert "late" in done.stdout
    assert len(said) == 2, done.stdout + done.stderr
    for line in said:
        assert "rank 0 failed: an exception, as of a signal handler" in line
