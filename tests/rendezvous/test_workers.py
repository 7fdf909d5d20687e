"""Processes that a rank starts by spawn and forkserver: data loaders, and none becomes the rank.

test_fork.py is about those by fork.
"""

from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(100)

# In a script of its own: the children import it again.
LOADERS = """\
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import mpiddp


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert not dist.is_initialized()
        if index == 0:
            try:
                mpiddp.init_process_group()
            except RuntimeError as error:
                assert "which rank" in str(error) and "has started" in str(error), error
            else:
                raise AssertionError("it has begun")
        return torch.full((4,), float(index))


def main():
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    model = mpiddp.DistributedDataParallel(torch.nn.Linear(4, 1))
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context=sys.argv[1])
    total = 0.0
    for batch in loader:
        model(batch).sum().backward()
        total += batch[:, 0].sum().item()
    assert total == 28
    dist.barrier()
    mpiddp.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
"""


@pytest.mark.essential(keep=1)
@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize("how", ["forkserver", "spawn"])
def test_data_loader(tmp_path: Path, how: str) -> None:
    """Training goes on beside it, and a worker that calls init_process_group is refused."""
    script = tmp_path / "script.py"
    script.write_text(LOADERS)
    done = mpirun.run(2, [script, how], timeout=90)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.count("done") == 2
