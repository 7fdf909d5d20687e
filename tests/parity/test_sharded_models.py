"""What torch itself builds on a process group: its own DDP, FSDP2, tensor parallel, DTensor.

Each scenario runs on our backend and on Gloo in the same processes, and ends with the same numbers.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = [
    pytest.mark.mpi,
    # Gloo has no all-to-all for DTensor, says torch.
    pytest.mark.filterwarnings("ignore:CPU process group does not support alltoall"),
]
several = pytest.mark.mpi(min_size=2)

# Two dimensions, as large as the number of ranks allows.
GRID = (SIZE, 1) if SIZE % 2 else (2, SIZE // 2)


def two_meshes(shape: tuple[int, ...], *names: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Return a mesh of groups of ours, and one of groups of Gloo. Collective."""
    gloo: dict[int | str, Any] = dict.fromkeys(range(len(shape)), "gloo")
    ours = init_device_mesh("cpu", shape, mesh_dim_names=names or None)
    theirs = init_device_mesh("cpu", shape, mesh_dim_names=names or None, backend_override=gloo)
    for dimension in range(len(shape)):
        assert dist.get_backend(ours.get_group(dimension)) == "mpiddp"
        assert dist.get_backend(theirs.get_group(dimension)) == "gloo"
    return ours, theirs


@pytest.fixture(scope="module")
def lines(gloo: dist.ProcessGroup) -> tuple[DeviceMesh, DeviceMesh]:
    """Return meshes of all ranks in one dimension, of ours and of Gloo."""
    return two_meshes((SIZE,))


@pytest.fixture(scope="module")
def grids(gloo: dist.ProcessGroup) -> tuple[DeviceMesh, DeviceMesh]:
    """Return meshes of all ranks in two dimensions, of ours and of Gloo."""
    return two_meshes(GRID, "rows", "columns")


class TestTorchsOwnWrapper:
    """torch's class, not ours, with torch's C++ reducer."""

    @pytest.mark.essential(keep=2)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.parametrize("case", ["mlp", "attention", "tied"])
    def test_gradients(self, case, views, gloo):
        self.compare(gloo, CASES[case], gradient_as_bucket_view=views)

    @pytest.mark.parametrize(
        "options",
        [
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"bucket_cap_mb": 0.0005},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_options(self, options, gloo):
        self.compare(gloo, CASES["mlp"], **options)

    def compare(self, gloo, case, **options):
        module = case.make()
        pair = [
            TorchDDP(copy.deepcopy(module), process_group=group, **options)
            for group in (dist.group.WORLD, gloo)
        ]
        for step in range(4):
            batch = share(case.batch(2 * SIZE))
            for model in pair:
                model.zero_grad(set_to_none=step % 2 == 0)
                loss_of(model, batch).backward()
            with together():
                assert_gradients_close(*map(gradients_of, pair))
            assert_replicated(pair[0])

    @pytest.mark.parametrize("hook", ["fp16", "PowerSGD"])
    def test_hooks(self, hook, gloo):
        """They run on futures of asynchronous collectives."""
        pair = []
        for group in (dist.group.WORLD, gloo):
            torch.manual_seed(3)
            model = TorchDDP(mlp(6, 9, 4).float(), process_group=group)
            if hook == "fp16":
                model.register_comm_hook(group, default_hooks.fp16_compress_hook)
            else:
                state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, random_seed=4)
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            pair.append(model)
        for _ in range(4):
            x = torch.randn(2, 6) + RANK
            for model in pair:
                model.zero_grad()
                loss_of(model, x).backward()
            with together():
                assert_gradients_close(*map(gradients_of, pair), factor=100)
            assert_replicated(pair[0])

    def test_accumulation_and_sharded_optimizer(self, gloo):
        pair, optimizers = [], []
        for group in (dist.group.WORLD, gloo):
            torch.manual_seed(3)
            pair.append(TorchDDP(mlp(6, 9, 4), process_group=group))
            optimizers.append(
                ZeroRedundancyOptimizer(
                    pair[-1].parameters(), torch.optim.Adam, process_group=group, lr=0.01
                )
            )
        for _ in range(3):
            x = torch.randn(2, 6, dtype=torch.float64) + RANK
            for model, optimizer in zip(pair, optimizers, strict=True):
                optimizer.zero_grad()
                with model.no_sync():
                    loss_of(model, x).backward()
                loss_of(model, -x).backward()
                optimizer.step()
            compare_parameters(*pair)
            assert_replicated(pair[0])


def whole(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Return a model whose layers and root are sharded one by one."""
    torch.manual_seed(5)
    # 7 and 3 divide by no number of ranks that the tests use.
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def compare_training(
    pair: Sequence[nn.Module], x_of: Callable[[], Tensor], clip: bool = True
) -> None:
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in pair]
    for _ in range(3):
        x = x_of()
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        compare_parameters(*pair)


def compare_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    """Compare all of each parameter. Collective."""
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        gathered = whole(own), whole(other)
        with together():
            assert_close(*gathered, name, factor=1e4)


class TestFullyShard:
    @pytest.mark.essential(keep=1)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.parametrize("reshard", [False, True], ids=["kept", "resharded"])
    def test_training(self, reshard, lines):
        pair = [sharded(mesh, reshard_after_forward=reshard) for mesh in lines]
        if SIZE > 1:
            weight = pair[0][0].weight
            assert weight.to_local().shape[0] < weight.shape[0]
        compare_training(pair, lambda: torch.randn(2, 6) + RANK)

    def test_against_one_process(self, lines):
        """The gradients of a sharded model are those of the whole batch."""
        model = sharded(lines[0])
        torch.manual_seed(5)
        alone = nn.Sequential(
            nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3)
        )
        batch = torch.randn(2 * SIZE, 6)
        model(share(batch)).square().mean().backward()
        alone(batch).square().mean().backward()
        for (name, own), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
            gathered = whole(own.grad)
            with together():
                assert_close(gathered, plain.grad, name)

    def test_low_precision(self, lines):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        pair = [sharded(mesh, mp_policy=policy) for mesh in lines]
        compare_training(pair, lambda: torch.randn(2, 6) + RANK)

    def test_reduction_in_low_precision(self, lines):
        """Summed in bfloat16: Gloo rounds after each addition, we once."""
        model = sharded(lines[0], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        exact = sharded(lines[0])
        x = torch.randn(2, 6) + RANK
        for each in (model, exact):
            each(x).square().mean().backward()
        for (name, own), other in zip(model.named_parameters(), exact.parameters(), strict=True):
            rough, plain = whole(own.grad), whole(other.grad)
            with together():
                assert_close(rough.bfloat16(), plain.bfloat16(), name, factor=SIZE)
                assert rough.dtype == torch.float32

    @pytest.mark.essential
    @several
    def test_replicas_of_shards(self, grids):
        pair = [sharded(mesh) for mesh in grids]
        compare_training(pair, lambda: torch.randn(2, 6) + RANK)

    def test_accumulation_and_prefetching(self, lines):
        pair = [sharded(mesh) for mesh in lines]
        for model in pair:
            model[0].set_modules_to_forward_prefetch([model[2]])
            model[4].set_modules_to_backward_prefetch([model[2]])
        for step in range(4):
            x = torch.randn(2, 6) + RANK
            for model in pair:
                assert isinstance(model, FSDPModule)
                model.set_requires_gradient_sync(step % 2 == 1)
                model(x).square().mean().backward()
        for (name, own), other in zip(*(m.named_parameters() for m in pair), strict=True):
            gathered = whole(own.grad), whole(other[1].grad)
            with together():
                assert_close(*gathered, name)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 4 * SIZE)
        self.down = nn.Linear(4 * SIZE, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


PLANS = {
    "columns and rows": lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": lambda: {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
    },
}


class TestTensorParallel:
    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("plan", PLANS)
    def test_training(self, plan, lines):
        torch.manual_seed(5)
        alone = Block()
        pair = [parallelize_module(copy.deepcopy(alone), mesh, PLANS[plan]()) for mesh in lines]
        for _ in range(2):
            x = torch.randn(2, 3 * SIZE, 6)
            own = x.chunk(SIZE, 1)[RANK] if plan == "sequence" else x
            alone.zero_grad()
            expected = alone(x)
            expected.square().sum().backward()
            if plan == "sequence":
                expected = expected.chunk(SIZE, 1)[RANK]
            for model in pair:
                model.zero_grad()
                out = model(x)
                out.square().sum().backward()
                with together():
                    assert own.shape == expected.shape
                    assert_close(out, expected, "output")
                for name, parameter in alone.named_parameters():
                    gathered = whole(model.get_parameter(name).grad)
                    with together():
                        assert_close(gathered, parameter.grad, name, factor=10)

    @several
    def test_with_sharding(self, grids):
        """Tensor parallel in one dimension of the mesh, FSDP2 in the other."""
        pair = []
        for mesh in grids:
            torch.manual_seed(5)
            model = parallelize_module(Block(), mesh["columns"], PLANS["columns and rows"]())
            pair.append(fully_shard(model, mesh=mesh["rows"]))
        row = grids[0].get_local_rank("rows")
        compare_training(pair, lambda: torch.randn(GRID[0], 2, 6)[row], clip=False)


LAYOUTS: list[Placement] = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_layouts(source, target, lines):
    """A DTensor changes how it is spread; uneven shards and empty ones too."""
    tensor = torch.arange(7.0 * 2).view(7, 2)
    for mesh in lines:
        spread = distribute_tensor(tensor, mesh, [source])
        moved = spread.redistribute(mesh, [target])
        gathered = moved.full_tensor()
        with together():
            assert torch.equal(gathered, tensor)
            assert moved.placements == (target,)
        partial = DTensor.from_local(spread.full_tensor(), mesh, [Partial()])
        reduced = partial.redistribute(mesh, [target]).full_tensor()
        with together():
            assert torch.equal(reduced, SIZE * tensor)
