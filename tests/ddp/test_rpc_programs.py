"""Programs of torch's RPC under `python -m mpiddp`: a training script, and torch's own tests."""

from pathlib import Path

import mpirun
import pytest
import torch.distributed.rpc as rpc
from script_runs import SCRIPTS, by_rank

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not rpc.is_available(), reason="torch was built without RPC"),
]


@pytest.mark.essential
@pytest.mark.thorough
def test_same_losses_as_under_torchrun() -> None:
    script = SCRIPTS / "rpc_embedding.py"
    on_gloo = mpirun.run_torchrun(2, [script], timeout=60)
    on_mpi = mpirun.run(2, ["-m", "mpiddp", script], timeout=60)
    print(on_gloo.stderr, on_mpi.stdout, on_mpi.stderr)  # pytest shows it when the test fails
    assert on_mpi.returncode == 0
    assert len(by_rank(on_mpi.stdout)) == 2
    assert by_rank(on_mpi.stdout) == by_rank(on_gloo.stdout)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(4, "test_ddp_dist_autograd_local_vs_remote", marks=pytest.mark.once),
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
