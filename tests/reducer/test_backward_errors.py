"""After an exception in backward a wrapper is done for; wrapping again goes on."""

import copy
from pathlib import Path
from typing import Any

import mpirun
import pytest
import torch
from models import loss_of, mlp
from replicas import (
    SIZE,
    assert_gradients_close,
    assert_replicated,
    gradients_of,
    share,
    together,
)
from torch import nn

from mpiddp import DistributedDataParallel as DDP

SAID = (
    r"previous backward pass ended before all gradients were reduced: [1-9] of 4 parameters .*"
    r"cannot go on.*on all ranks.*wrap the module again.*DistributedDataParallel\(model\.module\)"
)


class _Fragile(nn.Module):
    """Its backward raises when it is told to, with some gradients ready and others not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(3, 4), mlp(4, 2)
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y.register_hook(self._break)
        out: torch.Tensor = self.last(y)
        return out

    def _break(self, gradient: torch.Tensor) -> None:
        if self.breaks:
            raise ValueError("broken on purpose")


@pytest.mark.essential(keep=2)
@pytest.mark.mpi
@pytest.mark.timeout(60)
@pytest.mark.parametrize("old_is_kept", [False, True], ids=["replaced", "old is kept"])
@pytest.mark.parametrize("bucket", [25, 1e-6], ids=["one bucket", "many"])
def test_wrap_again(views, old_is_kept, bucket):
    model = _Fragile()
    options: dict[str, Any] = {"gradient_as_bucket_view": views, "bucket_cap_mb": bucket}
    wrapped = DDP(model, **options)
    for broken_in in (0, 2):
        for _ in range(broken_in):
            loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64)).backward()
        model.breaks = True
        with together(), pytest.raises(ValueError, match="broken on purpose"):
            loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64)).backward()
        model.breaks = False
        with together(), pytest.raises(RuntimeError, match=SAID):
            wrapped(torch.ones(2, 3, dtype=torch.float64))
        old = wrapped
        if not old_is_kept:
            del old
        wrapped = DDP(wrapped.module, **options)
        for _ in range(3):
            batch = torch.randn(2 * SIZE, 3, dtype=torch.float64)
            alone = copy.deepcopy(model)
            alone.zero_grad()
            loss_of(alone, batch).backward()
            wrapped.zero_grad()
            loss_of(wrapped, share(batch)).backward()
            with together():
                assert_gradients_close(gradients_of(wrapped), gradients_of(alone))
            assert_replicated(wrapped)


@pytest.mark.thorough
@pytest.mark.timeout(120)
# Not "mpi" as a test's id: pytest-mpi takes that for its mark and skips the test.
@pytest.mark.parametrize(
    "transport",
    [pytest.param("auto", id="memory"), pytest.param("mpi", id="messages", marks=pytest.mark.slow)],
)
def test_wrap_again_after_one_rank_failed(tmp_path: Path, transport: str) -> None:
    """The others find out by a time-out; what they have launched never ends."""
    script = tmp_path / "script.py"
    script.write_text(
        """
from datetime import timedelta
import torch, torch.distributed as dist, mpiddp
from mpi4py import MPI
from mpiddp import DistributedDataParallel as DDP

mpiddp.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
x = torch.full((2, 4), rank + 1.0)


def fail(*gradients):
    raise ValueError("broken on purpose")


wrapped = DDP(model, bucket_cap_mb=1e-6)
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=3))
for attempt in range(2):
    broken = model[0].register_full_backward_hook(fail) if rank == 1 and attempt < 1 else None
    try:
        model.zero_grad()
        wrapped(x).sum().backward()
    except (ValueError, RuntimeError) as error:
        assert ("has waited 3 s" in str(error)) == (rank != 1), error
        MPI.COMM_WORLD.Barrier()  # has no time limit: rank 1 is here first
        wrapped = DDP(wrapped.module, bucket_cap_mb=1e-6)
    else:
        assert attempt == 1
    if broken is not None:
        broken.remove()
mean = model[0].weight.grad.clone()
model.zero_grad()
plain = model(torch.full((2, 4), 2.0 if size == 3 else 1.5)).sum()
plain.backward()
assert torch.allclose(mean, model[0].weight.grad), rank
print("right on rank", rank)
mpiddp.destroy_process_group()
"""
    )
    done = mpirun.run(3, [script], timeout=100, env={"MPIDDP_TRANSPORT": transport})
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.count("right on rank") == 3
