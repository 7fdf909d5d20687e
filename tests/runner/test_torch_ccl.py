"""Programs that were written for torch-ccl find its backend and its module, both of mpiddp."""

import json
import os
from pathlib import Path

import mpirun
import pytest
from script_runs import by_rank, launch, objects_in, start

pytestmark = [pytest.mark.once, pytest.mark.timeout(100)]

# As such programs begin, with the variables of Intel's mpirun or without.
PROGRAM = """
import importlib.metadata, json, os
import torch
import torch.distributed as dist
import {module}
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

if {runner}:  # else these lines must go: see docs/start/ccl.md
    os.environ["RANK"] = str(os.environ.get("PMI_RANK", os.environ.get("RANK", 0)))
    os.environ["WORLD_SIZE"] = str(os.environ.get("PMI_SIZE", os.environ.get("WORLD_SIZE", 1)))
os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = "29500"
dist.init_process_group({named!r})
rank, size = dist.get_rank(), dist.get_world_size()

import mpiddp
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
asked = ("ccl", "cpu:ccl", "cpu:gloo,xpu:ccl", None, "gloo")
groups = [dist.new_group(backend=name) for name in asked]
override = {{"a": "ccl", "b": "cpu:ccl", "c": "gloo"}}
shape = (1, 1, size)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"), backend_override=override)
groups += [mesh.get_group(name) for name in "abc"]
print(json.dumps(dict(
    rank=rank,
    total=total.item(),
    world=[dist.get_backend(), dist.group.WORLD.name(), mpiddp.get_backend()],
    groups=[dist.get_backend(group) for group in groups],
    true=[mpiddp.get_backend(group) for group in groups],
    wrapper=type(DDP(torch.nn.Linear(2, 2))).__module__,
    version=importlib.metadata.version("oneccl_bind_pt") if {runner} else None,
)))
dist.destroy_process_group()
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.essential(keep=1)
@pytest.mark.parametrize(
    ("module", "named"), [("oneccl_bindings_for_pytorch", "ccl"), ("torch_ccl", "cpu:ccl,xpu:ccl")]
)
def test_an_unmodified_program(tmp_path: Path, module: str, named: str) -> None:
    (tmp_path / "run.py").write_text(PROGRAM.format(module=module, named=named, runner=True))
    done = launch(tmp_path / "run.py")
    assert done.returncode == 0
    assert done.stderr.count(f"mpiddp: there is no {module}; mpiddp stands in for it") == 1
    said = by_rank(done.stdout)
    assert sorted(said) == [0, 1]
    for one in said.values():
        assert one["total"] == 3
        assert one["world"] == [named, "ccl", "mpiddp"]
        assert one["groups"] == [
            "ccl", "cpu:ccl", "cpu:gloo,xpu:ccl", named, "gloo", "ccl", "cpu:ccl", "gloo",
        ]  # fmt: skip
        assert one["true"] == [*["mpiddp"] * 4, "gloo", "mpiddp", "mpiddp", "gloo"]
        assert one["wrapper"] == "mpiddp"
        assert one["version"].startswith("2.8")


@pytest.mark.thorough
def test_the_name_without_the_runner(tmp_path: Path) -> None:
    """Known to torch once mpiddp is imported, and tells the program what it named."""
    (tmp_path / "run.py").write_text(PROGRAM.format(module="mpiddp", named="ccl", runner=False))
    done = mpirun.run(2, [tmp_path / "run.py"], 80, {"GLOO_SOCKET_IFNAME": "lo"})
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    said = by_rank(done.stdout)
    assert sorted(said) == [0, 1]
    for one in said.values():
        assert one["total"] == 3
        assert one["world"] == ["ccl", "ccl", "mpiddp"]
        assert one["groups"][:2] == ["ccl", "cpu:ccl"]
        # torch gives such a group to the backend of the CPU, or to that which serves all.
        assert one["true"] == [
            "mpiddp", "cpu:mpiddp", "cpu:gloo,xpu:mpiddp", "mpiddp", "gloo", "mpiddp", "cpu:mpiddp",
            "gloo",
        ]  # fmt: skip
        assert one["wrapper"] == "torch.nn.parallel.distributed"


# Another's backend of that name; what it is asked to make, it refuses.
INSTALLED = """
from torch.distributed import Backend

def make(options, more):
    raise RuntimeError("made by another")

Backend.register_backend("ccl", make, extended_api=True, devices=["cpu", "xpu"])
"""

ASKS = """
import json, torch.distributed as dist, oneccl_bindings_for_pytorch
def failure(make):
    try:
        make()
    except RuntimeError as error:
        return str(error)
world = failure(lambda: dist.init_process_group("ccl", world_size=1, rank=0, store=dist.HashStore())
                if {alone} else dist.init_process_group("ccl"))
group = failure(lambda: dist.new_group(backend="ccl")) if world is None else None
where = oneccl_bindings_for_pytorch.__file__
print(json.dumps(dict(rank=0, world=world, group=group, where=where)))
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """A torch-ccl that is installed; the environment in which it is found."""
    folder = tmp_path / "site"
    (folder / "oneccl_bindings_for_pytorch").mkdir(parents=True)
    (folder / "oneccl_bindings_for_pytorch" / "__init__.py").write_text(INSTALLED)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path}


@pytest.mark.thorough
def test_one_that_is_installed_is_left_alone(installed: dict[str, str], tmp_path: Path) -> None:
    """Its module is imported; the world is ours, as for "gloo"; other groups are its own."""
    done = start("-m", "mpiddp", "-c", ASKS.format(alone=False), env=installed)
    assert done.returncode == 0
    assert "ccl of oneccl_bindings_for_pytorch, which is installed, by mpiddp" in done.stderr
    assert "stands in" not in done.stderr
    (said,) = objects_in(done.stdout)
    assert said["where"].startswith(str(tmp_path))
    assert (said["world"], said["group"]) == (None, "made by another")
    kept = start("-m", "mpiddp", "--backend", "keep", "-c", ASKS.format(alone=True), env=installed)
    assert objects_in(kept.stdout)[0]["world"] == "made by another"
    assert "which is installed" not in kept.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["oneccl_bindings_for_pytorch", "mpiddp"])
def test_one_that_is_imported_keeps_the_name(installed: dict[str, str], first: str) -> None:
    done = start("-c", f"import {first}, mpiddp\n{ASKS.format(alone=True)}", env=installed)
    assert done.returncode == 0
    assert objects_in(done.stdout)[0]["world"] == "made by another"


# What DeepSpeed does: it takes oneCCL for there, and compiles against it, if this can be imported.
DEEPSPEED = """
try:
    import oneccl_bindings_for_pytorch
    oneccl_imported_p = True
except ImportError as e:
    oneccl_imported_p = False

def name():
    return "ccl" if oneccl_imported_p else "gloo"
"""


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["oneccl_bindings_for_pytorch", "sys"])
def test_deepspeed_does_not_compile_against_it(tmp_path: Path, first: str) -> None:
    (tmp_path / "deepspeed" / "accelerator").mkdir(parents=True)
    (tmp_path / "deepspeed" / "accelerator" / "cpu_accelerator.py").write_text(DEEPSPEED)
    (tmp_path / "run.py").write_text(
        f"import {first}\nfrom deepspeed.accelerator.cpu_accelerator import name\nprint(name())\n"
        "import oneccl_bindings_for_pytorch\n"
    )
    done = start("-m", "mpiddp", tmp_path / "run.py")
    assert done.returncode == 0
    assert done.stdout == "gloo\n"


@pytest.mark.thorough
def test_the_option_of_the_runner_takes_the_name() -> None:
    says = "import torch.distributed as d, json; d.init_process_group('gloo'); "
    says += "print(json.dumps([d.get_backend(), type(d.group.WORLD).__module__]))"
    done = start("-m", "mpiddp", "--backend", "ccl", "-c", says)
    assert done.returncode == 0
    assert json.loads(done.stdout) == ["gloo", "mpiddp.process_group.group"]
