"""What a script may expect of mp.spawn besides that its ranks run. Run by 2 ranks or more."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def note(index, folder):
    with open(os.path.join(folder, f"{index}-{os.getpid()}"), "w") as file:
        file.write(os.environ["RANK"])


def initialise(index, world_size, url):
    """Leave the process group, as a process that ends may."""
    dist.init_process_group("nccl", init_method=url, rank=index, world_size=world_size)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == world_size
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(note, args=(folder,), nprocs=3)
        assert len(os.listdir(folder)) == 3


def change(index, options, weights):
    options["rank"] = options["rank"] * 2 + index
    weights[index] += 1


def fail(index, how):
    if how == "raise":
        raise ValueError(f"broken by {index}")
    if how == "exit" and index == 1:
        sys.exit(3)
    if how == "initialise":
        dist.init_process_group()
        raise ValueError("broken with a process group")


def value(index):
    return index


def test(world_size):
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory() as folder:
        # Each rank has another folder and URL; as with one parent, one of them holds.
        mp.spawn(note, args=(folder,), nprocs=world_size)
        found = os.listdir(folder)
        assert len(found) == (0 if rank else world_size), found
        for number in range(2):
            url = f"tcp://127.0.0.1:{20000 + rank + number}"
            assert mp.spawn(initialise, args=(world_size, url), nprocs=world_size) is None
            assert not dist.is_initialized()

    options = {"rank": 0}
    for _ in range(2):
        weights = torch.zeros(world_size)
        context = mp.start_processes(
            change, (options, weights), world_size, join=False, start_method="fork"
        )
        assert isinstance(context, mp.ProcessContext)
        assert context.join(timeout=1)
        assert len(context.pids()) == world_size
        assert context.pids()[rank] == os.getpid()
        assert weights.tolist() == [float(index == rank) for index in range(world_size)]
    assert options == {"rank": 0}

    for how, kind in (("raise", mp.ProcessRaisedException), ("exit", mp.ProcessExitedException)):
        try:
            mp.spawn(fail, args=(how,), nprocs=world_size)
        except kind as error:
            told = error.error_index, "ValueError: broken by 0" in str(error)
        assert told == ((0, True) if how == "raise" else (1, False))

    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(note, args=(folder,), nprocs=1)
        assert len(os.listdir(folder)) == 1
    dist.destroy_process_group()

    config = LaunchConfig(1, 1, world_size, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    assert elastic_launch(config, dist.get_node_local_rank)() == {
        rank: rank for rank in range(world_size)
    }

    for _ in range(2):
        try:
            mp.spawn(fail, args=("initialise",), nprocs=world_size)
        except mp.ProcessRaisedException:
            pass
        except RuntimeError as error:
            if "left its process group" in str(error):
                print(f"rank {rank}: all well")


if __name__ == "__main__":
    test(int(os.environ["WORLD_SIZE"]))
