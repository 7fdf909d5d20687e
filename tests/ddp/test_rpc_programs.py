"""Programs of torch's RPC under `python -m mpiddp`: a training script, and torch's own tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mpirun
import pytest
import torch.distributed.rpc as rpc

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not rpc.is_available(), reason="torch was built without RPC"),
]

SCRIPTS = Path(__file__).parents[1] / "scripts"
# Of torch's DistributedOptimizer.
QUIET = ["-W", "ignore"]


def rows(text: str) -> list[dict[str, Any]]:
    """Return what the ranks have printed as JSON, by rank."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda row: row["rank"])


def test_same_losses_as_under_torchrun() -> None:
    script = str(SCRIPTS / "rpc_embedding.py")
    torchrun = [sys.executable, *QUIET, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    on_gloo = subprocess.run(
        [*torchrun, script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    on_mpi = mpirun.run(2, [*QUIET, "-m", "mpiddp", script], timeout=60)
    print(on_mpi.stdout, on_mpi.stderr)  # pytest shows it when the test fails
    assert on_mpi.returncode == 0
    assert len(rows(on_mpi.stdout)) == 2
    assert rows(on_mpi.stdout) == rows(on_gloo.stdout)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(4, "test_ddp_dist_autograd_local_vs_remote"),
        pytest.param(4, "test_ddp_comparison", marks=pytest.mark.slow),
        pytest.param(4, "test_ddp_comparison_uneven_inputs", marks=pytest.mark.slow),
        pytest.param(4, "test_ddp_dist_autograd_sparse_grads", marks=pytest.mark.slow),
        pytest.param(6, "test_backward_no_ddp", marks=pytest.mark.slow),
        pytest.param(6, "test_backward_ddp_inside", marks=pytest.mark.slow),
        pytest.param(6, "test_backward_ddp_outside", marks=pytest.mark.slow),
        pytest.param(6, "test_backward_ddp_outside_uneven_inputs", marks=pytest.mark.slow),
    ],
)
def test_of_torch(ranks: int, name: str, tmp_path: Path) -> None:
    command = ["-m", "mpiddp", SCRIPTS / "torch_rpc_suite.py", name]
    done = mpirun.run(ranks, command, timeout=100, env={"TMPDIR": str(tmp_path)})
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    assert done.returncode == 0
    assert all(f"rank {rank}: {name} passed" in done.stdout for rank in range(ranks))
