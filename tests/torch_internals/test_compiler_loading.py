"""A program that compiles nothing does not import torch's compiler, and one that does finds it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import mpirun
import pytest
import torch

from mpiddp.torch_internals.compiler_loading import compiler_not_asked


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "the end\n", done.stderr


WRAPS = """
import sys
import torch
import mpiddp
from torch.nn import Linear, SyncBatchNorm

mpiddp.init_process_group()


def imported():
    return "torch._dynamo" in sys.modules


class Mine(torch.nn.parallel.DistributedDataParallel):
    pass


before = imported()
module = torch.nn.Sequential(Linear(2, 2), SyncBatchNorm(2), Linear(2, 1))
for wrapper in (mpiddp.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel, Mine):
    ours = wrapper is mpiddp.DistributedDataParallel
    wrapped = wrapper(mpiddp.SyncBatchNorm.convert_sync_batchnorm(module) if ours else Linear(2, 1))
    wrapped(torch.ones(3, 2)).sum().backward()
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        optimizer = kind(wrapped.parameters())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        print(wrapper.__name__, imported())
    if ours:
        assert not wrapped._use_python_reducer
        assert "_dynamo" not in vars(torch)

# As torch itself would have it, whatever was wrapped before.
torch._dynamo.config.optimize_ddp = "python_reducer"
assert imported()
assert mpiddp.DistributedDataParallel(Linear(2, 1))._use_python_reducer
mpiddp.destroy_process_group()
"""


@pytest.mark.essential
@pytest.mark.smoke
def test_wrapping_and_training_import_no_compiler(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRAPS)
    done = mpirun.run(1, [script], timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["DistributedDataParallel False"] * 3


ANSWERS = """
import torch
from mpiddp.torch_internals import compiler_loading
from torch._dynamo.utils import get_optimize_ddp_mode
assert get_optimize_ddp_mode() == compiler_loading.OPTIMIZE_DDP_MODE
print("the end")
"""


@pytest.mark.smoke
def test_the_known_answer_is_that_of_torch() -> None:
    run(ANSWERS)


EXCLUDES = """
import sys
import torch
from mpiddp.torch_internals.compiler_loading import disable_compilation
from torch.nn.parallel import DistributedDataParallel

seen = []


@disable_compilation
def excluded(tensor):
    seen.append(torch.compiler.is_compiling())
    return tensor + 1


def compiled(tensor):
    return excluded(tensor * 2) * 3


class Once(DistributedDataParallel):
    def __init__(self):
        pass


assert excluded(torch.ones(1)).item() == 2
with Once()._inside_ddp_forward():
    pass

weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
optimizers = [torch.optim.SGD([weight], lr=0.25), torch.optim.Adam([weight], lr=0.25)]
for optimizer in optimizers:
    optimizer.step()
assert weight.tolist() == [0.5, 0.5]
start = torch.ones(1, requires_grad=True)
moved = start * 1
moved.grad = 1.0 * start
torch.optim.SGD([moved], lr=0.25, differentiable=True).step()
assert torch.autograd.grad(moved.sum(), start)[0].item() == 0.75
assert torch.is_grad_enabled()

assert early or "torch._dynamo" not in sys.modules
graphs = torch.compile(compiled, backend="eager")
for _ in range(2):
    assert graphs(torch.ones(1)).item() == 9
assert seen == [False] * 3, seen
found = torch._dynamo.explain(compiled)(torch.ones(1))
assert (found.graph_count, found.graph_break_count) == (2, 1), found
for optimizer in optimizers:
    torch.compile(optimizer.step, backend="eager")()
assert torch.allclose(weight, torch.zeros(2), atol=1e-4), weight
assert torch.optim.SGD.step.__wrapped__.__code__.co_name == "_use_grad"


@disable_compilation
def later(tensor):
    return excluded(tensor)


assert torch._dynamo.explain(lambda tensor: later(tensor * 2) * 3)(torch.ones(1)).graph_count == 2
print("the end")
"""


@pytest.mark.essential
@pytest.mark.smoke
@pytest.mark.parametrize("first", ["", "import torch._dynamo"], ids=["late", "early"])
def test_excluded_before_and_after_the_import(first: str) -> None:
    run(f"{first}\nearly = {bool(first)}\n{EXCLUDES}")


STAND_IN = """
import sys, threading, torch
from mpiddp.torch_internals.compiler_loading import compiler_not_asked

with compiler_not_asked(), compiler_not_asked():
    assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
    assert "torch._dynamo" not in sys.modules
    from torch import _dynamo as early
with compiler_not_asked():
    assert early.config.optimize_ddp is True  # imports it
    assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo is sys.modules["torch._dynamo"]
assert early.utils.get_optimize_ddp_mode() == "ddp_optimizer"
torch._dynamo.config.optimize_ddp = "python_reducer"
assert early.utils.get_optimize_ddp_mode() == "python_reducer"
print("the end")
"""


def test_what_stands_in_for_the_compiler_imports_it() -> None:
    run(STAND_IN)


def test_several_threads() -> None:
    failed: list[BaseException] = []

    def wrap() -> None:
        try:
            for _ in range(200):
                with compiler_not_asked():
                    assert torch._dynamo.utils.get_optimize_ddp_mode()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=wrap) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
