"""`python -m mpiddp` says at its end that each rank has trained alone, and only then."""

import textwrap

import pytest
from script_runs import launch, start

pytestmark = [pytest.mark.timeout(100), pytest.mark.once]

BEGINNING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 4)
def train(model, before_step=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
"""
ALONE = "train(model)"
ENDINGS = {
    "wrapped": """
        train(torch.nn.parallel.DistributedDataParallel(model))
        """,
    "by hand": """
        def average():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        train(model, average)
        """,
    "in slices": """
        def average():
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            dist.reduce_scatter_tensor(torch.empty(len(flat) // 2), flat)
        train(model, average)
        """,
    "on another backend": """
        beside = dist.new_group(backend="gloo")
        train(torch.nn.parallel.DistributedDataParallel(model, process_group=beside))
        """,
    "wrapped, with a hook of all optimizers": """
        from torch.optim.optimizer import register_optimizer_step_post_hook
        register_optimizer_step_post_hook(lambda *_: None)
        train(torch.nn.parallel.DistributedDataParallel(model))
        """,
    "without training": """
        model(torch.ones(2, 8))
        """,
}  # fmt: skip
SAID = (
    "mpiddp: 2 ranks have trained, and no gradient was averaged over them: each has trained a model"
)


@pytest.mark.essential
def test_said_once_where_each_rank_trained_alone() -> None:
    """The all-reduce of a loss averages no gradient."""
    done = launch("-c", BEGINNING + ALONE)
    assert done.returncode == 0
    assert done.stderr.count(SAID) == 1


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_not_said_where_gradients_were_averaged(ending: str) -> None:
    done = launch("-c", BEGINNING + textwrap.dedent(ending))
    assert done.returncode == 0
    assert "trained" not in done.stderr


def test_one_rank_is_alone_anyway() -> None:
    done = start("-m", "mpiddp", "-c", BEGINNING + ALONE)
    assert done.returncode == 0
    assert "trained" not in done.stderr
