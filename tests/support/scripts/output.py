"""Print through Python, C and child processes, many lines at once, and then end."""

import ctypes
import multiprocessing
import os
import subprocess
import sys

import torch.distributed as dist


def say(what):
    print(f"{what} child", flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    libc = ctypes.CDLL(None)
    dist.barrier()
    for number in range(2000):
        print(f"rank {rank} line {number}", "x" * (number % 90), "end")
    libc.printf(b"from C of rank %d\n", rank)
    subprocess.run(["sh", "-c", f"echo shell of rank {rank}; echo its stderr {rank} >&2"])
    process = multiprocessing.get_context("fork").Process(target=say, args=(f"rank {rank}",))
    process.start()
    process.join()
    print(f"rank {rank} after all of them")
    print(f"progress 1\rprogress {rank} 2", file=sys.stderr)
    dist.barrier()
    sys.stdout.write(f"no newline {rank}")
    if "fail" in sys.argv and rank == 1:
        raise ValueError("broken on purpose")
    if "fail" in sys.argv:
        dist.barrier()
    os.write(2, b"last words\n")
