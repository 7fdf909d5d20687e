"""PyTorch Lightning and Hugging Face Accelerate on MPI, against training in one process.

Their scripts lie in tests/support/scripts/. Each test starts processes of its own: either
`python -m mpiddp SCRIPT`, where the script does not know of us, or `python SCRIPT` that names our
backend.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import mpirun
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

pytestmark = pytest.mark.timeout(100)

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"


def ways(mark: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Try scripts that name our backend or not, which changes whose DDP they get."""
    return pytest.mark.parametrize(
        ("backend", "wrapper"),
        [
            pytest.param([], "mpiddp", id="unmodified"),
            pytest.param(["mpiddp"], "torch.nn.parallel.distributed", id="named", marks=mark),
        ],
    )


def launch(script: str, folder: Path, backend: list[str]) -> dict[int, dict[str, Any]]:
    """Run a script on two ranks and return what each rank says."""
    command = [*([] if backend else ["-m", "mpiddp"]), SCRIPTS / script, folder, *backend]
    done: subprocess.CompletedProcess[str] = mpirun.run(2, command, timeout=90)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    assert done.returncode == 0
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(one["rank"] for one in said) == [0, 1]
    return {one.pop("rank"): one for one in said}


def data(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the points and targets that both scripts draw."""
    points = torch.rand(size, 20, generator=torch.Generator().manual_seed(seed))
    return points, points.sum(1, keepdim=True)


def train_alone(
    epochs: int,
    batch_size: int,
    shuffle: bool = False,
    accumulated: int = 1,
    clip: float = float("inf"),
) -> tuple[nn.Module, list[float]]:
    """Return the model and losses of one process that takes both ranks' batches at once."""
    points, targets = data(64, 5)
    sampler: DistributedSampler[int] = DistributedSampler(range(64), 1, 0, shuffle=shuffle)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in torch.tensor(list(sampler)).split(batch_size):
            loss = nn.functional.mse_loss(model(points[batch]), targets[batch])
            (loss / accumulated).backward()
            losses.append(loss.item())
            if len(losses) % accumulated == 0:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return model, losses


def assert_same_parameters(state: dict[str, Tensor], expected: nn.Module) -> None:
    assert set(state) == set(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, msg=f"{name}: {state[name]}, not {tensor}")


@pytest.mark.thorough
@pytest.mark.once
@ways(pytest.mark.slow)
def test_lightning(tmp_path: Path, backend: list[str], wrapper: str) -> None:
    """Trainer with strategy "ddp": its samplers, checkpoints, logging and metrics too."""
    said = launch("lightning_trainer.py", tmp_path, backend)
    # Lightning shuffles what it trains on, whatever the loader does.
    model, _ = train_alone(epochs=3, batch_size=16, shuffle=True)
    points, targets = data(32, 6)
    error = nn.functional.mse_loss(model(points), targets).item()
    for one in said.values():
        # An unmodified script finds what the library has asked for.
        asked = "mpiddp" if backend else "gloo"
        assert (one["world"], one["backend"], one["ddp"]) == (2, asked, wrapper)
        # Lightning started no processes of its own.
        found = "MPIEnvironment" if backend else "TorchElasticEnvironment"
        assert one["environment"] == found
        assert one["metrics"] == pytest.approx(
            {"error": error, "mean of ranks": error, "sum of ranks": 4 * error}
        )
        assert one["ranks"] == [0, 1]
        assert one["seen"] == sorted(points[:, 0].tolist())
        assert one["predicted"] == 2
    for name in ("last.ckpt", "end.ckpt"):
        state = torch.load(tmp_path / name, weights_only=True)["state_dict"]
        plain = {key.removeprefix("net."): value for key, value in state.items()}
        assert_same_parameters(plain, model)


@pytest.mark.thorough
@pytest.mark.once
@ways(pytest.mark.slow)
def test_accelerate(tmp_path: Path, backend: list[str], wrapper: str) -> None:
    """prepare(), accumulation, clipping, gathering of what does not divide by the ranks."""
    said = launch("accelerate_trainer.py", tmp_path, backend)
    model, losses = train_alone(epochs=2, batch_size=8, accumulated=2, clip=1.0)
    for one in said.values():
        # An unmodified script finds what the library has asked for.
        asked = "mpiddp" if backend else "gloo"
        assert (one["world"], one["backend"], one["ddp"]) == (2, asked, wrapper)
        assert one["kind"] == "DistributedType.MULTI_CPU"
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        assert one["seen"] == data(30, 6)[1].flatten().tolist()
        assert one["padded"] == [0, -1, 1, 1]
        assert one["objects"] == [{"rank": 0}, {"rank": 1}]
    assert_same_parameters(torch.load(tmp_path / "end.pt", weights_only=True), model)
