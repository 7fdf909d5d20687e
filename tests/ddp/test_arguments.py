"""Wrong arguments and models that differ between ranks: each error names what is wrong."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpirun
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch_versions import HAS_FORWARD_SYNC_BUFFERS, for_torch

from mpiddp import DistributedDataParallel as DDP

mpi = pytest.mark.mpi


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


class WithBuffer(nn.Module):
    """A linear layer and one buffer."""

    def __init__(self, buffer: torch.Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


class WithParameter(nn.Module):
    """A linear layer and one parameter of any kind."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.odd = nn.Parameter(value)


@pytest.fixture(autouse=True)
def _still_works(request: pytest.FixtureRequest) -> Any:
    """After each refused construction the same ranks can construct and train a good model."""
    yield
    if request.node.get_closest_marker("mpi") is not None:
        model = nn.Linear(4, 4)
        wrapped = DDP(model)
        wrapped(torch.full((2, 4), float(rank()))).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.unique().tolist() == [size() - 1]


@mpi
class TestModule:
    @pytest.mark.parametrize("module", [None, 3, "model", nn.Linear, torch.ones(2)])
    def test_is_no_module(self, module: Any) -> None:
        with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, not \w+"):
            DDP(module)

    @pytest.mark.smoke
    def test_without_parameters(self) -> None:
        with pytest.raises(RuntimeError, match="parameter that requires a gradient"):
            DDP(nn.ReLU())

    def test_without_parameters_that_need_gradients(self) -> None:
        with pytest.raises(RuntimeError, match="parameter that requires a gradient"):
            DDP(nn.Linear(2, 2).requires_grad_(False))

    def test_with_uninitialised_parameters(self) -> None:
        with pytest.raises(RuntimeError, match="uninitialized parameters"):
            DDP(nn.LazyLinear(2))

    def test_on_another_device(self) -> None:
        with pytest.raises(ValueError, match=r"on the CPU.* on meta"):
            DDP(nn.Linear(2, 2, device="meta"))

    def test_buffer_on_another_device(self) -> None:
        with pytest.raises(ValueError, match=r"table.* meta"):
            DDP(WithBuffer(torch.empty(2, device="meta")))

    @pytest.mark.parametrize(
        "dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=lambda dtype: str(dtype)
    )
    def test_parameter_of_a_dtype_that_cannot_be_averaged(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=rf"odd.*{dtype}|{dtype}.*odd"):
            DDP(WithParameter(torch.ones(3).to(dtype)))

    def test_parameter_or_buffer_that_is_sparse(self) -> None:
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
        with pytest.raises((TypeError, ValueError, RuntimeError), match=r"odd.*sparse"):
            DDP(WithParameter(sparse))
        with pytest.raises((TypeError, ValueError, RuntimeError), match=r"table.*sparse"):
            DDP(WithBuffer(sparse))


@mpi
class TestArguments:
    @pytest.mark.parametrize(
        "name",
        [
            "broadcast_buffers",
            "forward_sync_buffers",
            "init_sync",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
            "skip_all_reduce_unused_params",
            "batched_grad_copy",
        ],
    )
    def test_flag_of_another_type(self, name: str) -> None:
        with pytest.raises((TypeError, NotImplementedError), match=name):  # either refusal names it
            DDP(nn.Linear(4, 4), **{name: "yes"})

    @pytest.mark.parametrize("value", [b"25", True, [1], torch.tensor(1.0), 1j])
    def test_bucket_cap_mb_of_another_type(self, value: Any) -> None:
        with pytest.raises(TypeError, match="bucket_cap_mb must be a number of MiB, not"):
            DDP(nn.Linear(4, 4), bucket_cap_mb=value)

    @pytest.mark.parametrize("value", [-1, -0.5, float("inf"), float("nan")])
    def test_bucket_cap_mb_out_of_range(self, value: float) -> None:
        with pytest.raises(ValueError, match=rf"bucket_cap_mb must be a finite .*{value}"):
            DDP(nn.Linear(4, 4), bucket_cap_mb=value)

    @pytest.mark.parametrize("value", [5, "12", [1, "2"], [None], [True], {1: 2}])
    def test_bucket_cap_mb_list_of_another_type(self, value: Any) -> None:
        with pytest.raises(TypeError, match="bucket_cap_mb_list must be"):
            DDP(nn.Linear(4, 4), bucket_cap_mb_list=value)

    @pytest.mark.parametrize("value", [[-1], [1, float("nan")], [float("inf")]])
    def test_bucket_cap_mb_list_out_of_range(self, value: list[float]) -> None:
        with pytest.raises(ValueError, match="bucket_cap_mb_list must be a finite"):
            DDP(nn.Linear(4, 4), bucket_cap_mb_list=value)

    @pytest.mark.parametrize("value", [[0], [0, 1], ["cpu"], 0, "cpu"])
    def test_device_ids(self, value: Any) -> None:
        with pytest.raises((TypeError, ValueError), match="device_ids"):
            DDP(nn.Linear(4, 4), device_ids=value)

    @pytest.mark.parametrize("value", [0, 1, "cuda"])
    def test_output_device(self, value: Any) -> None:
        with pytest.raises((TypeError, ValueError), match="output_device"):
            DDP(nn.Linear(4, 4), output_device=value)

    @pytest.mark.parametrize("value", ["world", 3, dist.GroupMember.NON_GROUP_MEMBER])
    def test_process_group_of_another_type(self, value: Any) -> None:
        with pytest.raises(
            TypeError, match=r"process group of mpiddp, not (str|int).*init_process_group\(\)"
        ):
            DDP(nn.Linear(4, 4), process_group=value)

    def test_gloo_group(self, gloo: dist.ProcessGroup) -> None:
        with pytest.raises(
            TypeError, match=r"process group of mpiddp, not gloo.*init_process_group\(\)"
        ):
            DDP(nn.Linear(4, 4), process_group=gloo)

    @pytest.mark.essential
    def test_unknown_name(self) -> None:
        with pytest.raises(TypeError, match="bucket_cap_gb"):
            DDP(nn.Linear(4, 4), bucket_cap_gb=1)  # type: ignore[call-arg]


@mpi
class TestRefusedAsInTorch:
    """The same exception types as torch's class over Gloo."""

    def both(self, gloo: dist.ProcessGroup, kind: type[Exception], **options: Any) -> str:
        module = nn.Linear(4, 4)
        if "param_to_hook_all_reduce" in options:
            options["param_to_hook_all_reduce"] = module.weight
        if "process_group" in options:
            options["process_group"] = dist.group.WORLD
        with pytest.raises(kind) as ours:
            DDP(module, **options)
        if "process_group" in options or "device_mesh" not in options:
            options["process_group"] = gloo
        with pytest.raises(kind):
            TorchDDP(nn.Linear(4, 4), **options)
        return str(ours.value)

    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize(
        "options",
        [
            {"delay_all_reduce_named_params": []},
            {"param_to_hook_all_reduce": ...},
            {"device_ids": [0]},
            {"device_ids": [0, 1]},
            {"output_device": "cpu"},
        ],
        ids=lambda options: "".join(options),
    )
    def test_value(self, options: dict[str, Any], gloo: dist.ProcessGroup) -> None:
        assert next(iter(options)) in self.both(gloo, ValueError, **options)

    def test_mesh_and_group(self, gloo: dist.ProcessGroup) -> None:
        mesh = init_device_mesh("cpu", (size(),))
        said = self.both(gloo, RuntimeError, device_mesh=mesh, process_group=...)
        assert "both process_group and device_mesh" in said

    def test_mesh_of_two_dimensions(self, gloo: dist.ProcessGroup) -> None:
        mesh = init_device_mesh("cpu", (1, size()), mesh_dim_names=("a", "b"))
        assert "Only 1D" in self.both(gloo, RuntimeError, device_mesh=mesh)

    def test_no_mesh(self, gloo: dist.ProcessGroup) -> None:
        assert "ndim" in self.both(gloo, AttributeError, device_mesh=object())

    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize(
        "options",
        [
            {"check_reduction": True},
            {"broadcast_buffers": True},
            {"broadcast_buffers": False},
            {"broadcast_buffers": False, "forward_sync_buffers": True},
        ],
        ids=lambda options: "".join(options),
    )
    def test_warnings(self, options: dict[str, bool], gloo: dist.ProcessGroup) -> None:
        said: list[list[tuple[type[Warning], str]]] = []
        expected = options.get("forward_sync_buffers", options.get("broadcast_buffers", True))
        theirs = for_torch(options) | {"process_group": gloo}
        for wrap, taken in ((DDP, options), (TorchDDP, theirs)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                wrapped = wrap(nn.BatchNorm1d(4), **taken)
            said.append([(warning.category, str(warning.message)) for warning in caught])
            assert wrapped.broadcast_buffers is expected
            if wrap is DDP or HAS_FORWARD_SYNC_BUFFERS:
                assert wrapped.forward_sync_buffers is expected
            assert wrapped.will_sync_module_buffers() is expected
        assert said[0] == said[1]
        # Torch warns at broadcast_buffers once it has another name for it.
        deprecated = "check_reduction" in options or HAS_FORWARD_SYNC_BUFFERS
        assert (FutureWarning in dict(said[0])) is deprecated

    @pytest.mark.parametrize(
        "options", [{"dim": 1}, {"device_ids": []}, {"batched_grad_copy": True}]
    )
    def test_accepted_on_the_cpu(self, options: dict[str, Any], gloo: dist.ProcessGroup) -> None:
        ours = DDP(nn.Linear(4, 4), **options)
        theirs = TorchDDP(nn.Linear(4, 4), process_group=gloo, **for_torch(options))
        for name in ("dim", "device_ids", "output_device", "device"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.batched_grad_copy is options.get("batched_grad_copy", False)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(4, 3, **options)


def transposed() -> nn.Linear:
    layer = linear()
    layer.weight = nn.Parameter(torch.randn(4, 3).t())
    return layer


def other_order() -> nn.Module:
    layer = linear()
    weight = layer.weight
    del layer.weight
    layer.weight = weight
    return layer


def frozen_bias() -> nn.Module:
    layer = linear()
    layer.bias.requires_grad_(False)
    return layer


def ignoring_bias() -> nn.Module:
    layer = linear()
    DDP._set_params_and_buffers_to_ignore_for_model(layer, ["bias"])
    return layer


# The model of the last rank, what the error calls the difference, and what stands there
# for the last rank. All others construct linear(), or WithBuffer.
DIFFERENT = {
    "shape": (lambda: nn.Linear(5, 3), "parameter weight", "shape (3, 5)"),
    "dtype": (lambda: linear(dtype=torch.float64), "parameter weight", "torch.float64"),
    "strides": (transposed, "parameter weight", "strides (1, 3)"),
    "fewer parameters": (lambda: linear(bias=False), "parameter bias", "absent"),
    "more parameters": (
        lambda: nn.ModuleDict({"more": linear()}),
        "parameter more.bias",
        "shape (3,)",
    ),
    "frozen": (frozen_bias, "parameter bias's need of a gradient", "absent"),
    "ignored": (ignoring_bias, "parameter bias", "absent"),
    "buffer more": (lambda: WithBuffer(torch.zeros(2)), "buffer table", "shape (2,)"),
}

DIFFERENT_BUFFERS = {
    "shape": (torch.zeros(3), "shape (3,)"),
    "dtype": (torch.zeros(2, dtype=torch.int64), "torch.int64"),
    "none": (None, "absent"),
}

DIFFERENT_ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "bucket_cap_mb": (1, 2),
    "bucket_cap_mb_list": ([1], [1, 2]),
    "gradient_as_bucket_view": (False, True),
    "find_unused_parameters": (False, True),
    "forward_sync_buffers": (True, False),
    "shared_parameters": (False, True),
}


def refused(construct: Callable[[], object]) -> str:
    """Return what every rank is told, the same but for its own number."""
    with pytest.raises(RuntimeError, match="the ranks construct different models") as error:
        construct()
    text = str(error.value)
    assert text.startswith(f"rank {rank()}: ")
    text = text.removeprefix(f"rank {rank()}: ")
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, text)
    assert everyone == [text] * size()
    return text


@pytest.mark.mpi(min_size=2)
class TestRanksConstruct:
    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize("difference", DIFFERENT)
    def test_different_models(self, difference: str) -> None:
        make, name, is_there = DIFFERENT[difference]
        last = size() - 1
        text = refused(lambda: DDP(make() if rank() == last else linear()))
        assert f"on rank {last} {name} is " in text
        assert is_there in text.partition(f"{name} is ")[2].partition(" but ")[0]
        assert "on rank 0" in text

    @pytest.mark.parametrize("difference", DIFFERENT_BUFFERS)
    def test_different_buffers(self, difference: str) -> None:
        buffer, is_there = DIFFERENT_BUFFERS[difference]
        last = size() - 1
        text = refused(lambda: DDP(WithBuffer(buffer if rank() == last else torch.zeros(2))))
        assert f"on rank {last} buffer table is " in text
        assert is_there in text.partition(" but ")[0]
        assert "shape (2,), torch.float32" in text.partition(" but ")[2]

    @pytest.mark.smoke
    def test_parameters_in_another_order(self) -> None:
        last = size() - 1
        text = refused(lambda: DDP(other_order() if rank() == last else linear()))
        assert f"on rank {last} parameters are registered in another order" in text

    @pytest.mark.parametrize("name", DIFFERENT_ARGUMENTS)
    def test_with_different_arguments(self, name: str) -> None:
        last = size() - 1
        value = DIFFERENT_ARGUMENTS[name][rank() == last]
        text = refused(lambda: DDP(nn.BatchNorm1d(4), **{name: value}))
        assert f"on rank {last} argument {name} is " in text

    @pytest.mark.mpi(min_size=3)
    def test_each_a_model_of_its_own(self) -> None:
        text = refused(lambda: DDP(nn.Linear(4, 1 + (rank() > 0))))
        others = ", ".join(map(str, range(1, size())))
        assert f"on ranks {others} parameter weight is shape (2, 4)" in text
        assert "but shape (1, 4)" in text

    def test_models_that_differ_in_very_much(self) -> None:
        last = size() - 1
        text = refused(
            lambda: DDP(nn.Sequential(*(nn.Linear(4, 4 + (rank() == last)) for _ in range(100))))
        )
        assert len(text) < 3000


INIT = r"""
import os, re
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpiddp

world = MPI.COMM_WORLD
half = world.Split(world.rank)
between = half.Create_intercomm(0, world, 1 - world.rank)


def expect(kind, pattern, *args, **kwargs):
    try:
        mpiddp.init_process_group(*args, **kwargs)
    except kind as error:
        assert type(error) is kind, repr(error)
        assert re.search(pattern, str(error)), error
    else:
        raise AssertionError(f"accepted {args} {kwargs}")
    # Nothing is left of it.
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


for comm in (0, 1.5, "world", [world], object(), MPI.COMM_WORLD.handle, MPI.GROUP_EMPTY, MPI):
    expect(TypeError, rf"comm must be .*not {type(comm).__name__}", comm)
expect(ValueError, "comm is MPI.COMM_NULL", MPI.COMM_NULL)
expect(ValueError, "comm is an intercommunicator.*Merge", between)
for timeout in (30, 1.5, "1 minute", None):
    expect(TypeError, rf"timeout must be .*not {type(timeout).__name__}", timeout=timeout)
for timeout in (timedelta(0), timedelta(seconds=-1)):
    expect(ValueError, "timeout must be positive", timeout=timeout)
for value in ("", "yes", "2", "-1", "true"):
    os.environ["MPIDDP_PROGRESS_THREAD"] = value
    expect(ValueError, rf"MPIDDP_PROGRESS_THREAD must be 0 or 1, not '{value}'")
del os.environ["MPIDDP_PROGRESS_THREAD"]
expect(TypeError, "backend", backend="nccl")

# Before there is a world.
for call, pattern in (
    (lambda: mpiddp.DistributedDataParallel(torch.nn.Linear(2, 2)), "init_process_group"),
    (mpiddp.get_topology, "init_process_group"),
    (mpiddp.destroy_process_group, "init_process_group"),
):
    try:
        call()
    except RuntimeError as error:
        assert re.search(pattern, str(error)), error
    else:
        raise AssertionError(pattern)
    if dist.is_initialized():
        dist.destroy_process_group()

mpiddp.init_process_group(world.Dup(), timedelta(seconds=30))
assert dist.group.WORLD.timeout == timedelta(seconds=30)
for call in (mpiddp.init_process_group, lambda: mpiddp.init_process_group(MPI.COMM_SELF)):
    try:
        call()
    except RuntimeError as error:
        assert "destroy_process_group" in str(error)
    else:
        raise AssertionError("initialised twice")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == 2
wrapped = mpiddp.DistributedDataParallel(torch.nn.Linear(1, 1))
mpiddp.destroy_process_group()
mpiddp.init_process_group()
for _ in range(2):
    wrapped.zero_grad()
    wrapped(torch.ones(1, 1) + dist.get_rank()).sum().backward()
    assert wrapped.module.weight.grad.item() == 1.5
assert dist.group.WORLD.timeout == timedelta(minutes=30)
print("all refused")
"""


@pytest.mark.timeout(100)
def test_init_process_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INIT)
    done = mpirun.run(2, [script], timeout=60)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("all refused") == 2
