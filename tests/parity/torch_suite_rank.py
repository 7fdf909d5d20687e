"""One rank of torch_suite.py: run tests of torch's suite in turn, each in a world of its own.

    mpirun -n 3 python torch_suite_rank.py MODE DIRECTORY SECONDS

DIRECTORY/tests holds the names of the tests, one a line. The rank writes what launch.RankReport
reads, and prints to DIRECTORY/rank-N.out. After a test that failed the ranks are no longer in
the same place, so the job ends there. A test that takes more than SECONDS ends it too, with the
tracebacks of all threads.
"""

import contextlib
import faulthandler
import functools
import json
import os
import sys
import time
import traceback
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

MODE, DIRECTORY, SECONDS = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
WORLD_SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"])

# What the suite reads while it is imported. It leaves out tests for other backends than this one:
# those that Gloo passes are asked of all.
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE=str(WORLD_SIZE),
    TEMP_DIR=str(DIRECTORY),
    INIT_METHOD=f"file://{DIRECTORY}/unused",
    PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    GLOO_SOCKET_IFNAME="lo",
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch_suite_cpu  # noqa: E402
from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402

torch_suite_cpu.enable_tests()

from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

BACKEND = "gloo" if MODE == "gloo" else "mpiddp"
# These ask for the backend only to see whether they are to be on CPUs.
ASK_FOR_GLOO = "test_accumulate_gradients_no_sync"
# Seconds in which the other ranks may fail as well before the job is ended.
GRACE = 2.0


class OneRank(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The suite in a process that is a rank already, where torch's own would start processes."""

    def __init__(self, name: str, rendezvous: Path) -> None:
        super().__init__(name)
        self.rank = RANK
        self.file_name = str(rendezvous)
        self.skip_return_code_checks: list[Any] = []


def main() -> None:
    """Run the tests that are listed, up to the first that fails."""
    wrappers = prepare()
    with open(DIRECTORY / f"rank-{RANK}.jsonl", "a", encoding="utf-8") as report:

        def say(**event: Any) -> None:
            report.write(json.dumps(event) + "\n")
            report.flush()

        say(event="start", size=WORLD_SIZE)
        for number, name in enumerate((DIRECTORY / "tests").read_text().split()):
            say(event="running", test=name)
            print(f"--- {name}", file=sys.stderr, flush=True)
            began, wrapped = time.monotonic(), wrappers[0]
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            outcome, reason = run(name, DIRECTORY / f"test-{number}")
            faulthandler.cancel_dump_traceback_later()
            if outcome == "failed":
                say(event="failed", test=name, text=reason)
                time.sleep(GRACE)
                os._exit(1)
            seconds = time.monotonic() - began
            facts = json.dumps({"why": reason, "seconds": seconds, "wraps": wrappers[0] > wrapped})
            say(event="done", test=name, outcome=outcome, reason=facts)
        say(event="end")


def prepare() -> list[int]:
    """Let the suite find what MODE says. Not collective.

    Returns:
        A list of one number that grows with each DistributedDataParallel that is constructed.
    """
    torch.set_num_threads(1)
    constructed = [0]
    wrappers = [torch.nn.parallel.DistributedDataParallel]
    torch_suite_cpu.stand_in(suite)
    if MODE != "gloo":
        import mpiddp
        from mpiddp.runner.torchrun import replace_ddp

        os.environ["BACKEND"] = BACKEND
        if MODE == "ours":
            replace_ddp(derived=False)
            wrappers.append(mpiddp.DistributedDataParallel)

    def count(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def counting(*args: Any, **kwargs: Any) -> None:
            constructed[0] += 1
            init(*args, **kwargs)

        return counting

    for wrapper in wrappers:
        init = torch_suite_cpu.without_devices(wrapper.__init__)
        wrapper.__init__ = count(init)  # type: ignore[method-assign, assignment]
    return constructed


def run(name: str, directory: Path) -> tuple[str, str]:
    """Run one test; return "passed", "skipped" or "failed", and why.

    Collective.
    """
    skipped = getattr(getattr(OneRank, name), "__unittest_skip_why__", None)
    if skipped is not None:
        return "skipped", skipped
    for folder in ("barrier", "test_dir"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(directory)
    suite.INIT_METHOD = f"file://{directory}/second_world"
    suite.BACKEND = "gloo" if name.startswith(ASK_FOR_GLOO) else BACKEND
    suite.Barrier.barrier_id = 0
    try:
        test = OneRank(name, directory / "world")
        dist.init_process_group(
            init_method=test.init_method,
            backend=BACKEND,
            world_size=WORLD_SIZE,
            rank=RANK,
            timeout=timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)),
        )
        common_utils.set_rng_seed()
        outcome = call(getattr(test, name))
        # Not by the backend: one rank of a test may still wait in vain for the others.
        wait_for_ranks(directory)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        return "failed", text
    return outcome


def wait_for_ranks(directory: Path) -> None:
    """Wait until all ranks have come to the end of the test in `directory`. Collective."""
    (directory / f"ended-{RANK}").touch()
    while not all((directory / f"ended-{rank}").exists() for rank in range(WORLD_SIZE)):
        time.sleep(0.005)


def call(test: Callable[[], None]) -> tuple[str, str]:
    """Run a test that must not fail. Return whether it was skipped, and why."""
    try:
        test()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        for known in TEST_SKIPS.values():
            if known.exit_code == end.code:
                return "skipped", known.message
        raise
    return "passed", ""


if __name__ == "__main__":
    output = os.open(DIRECTORY / f"rank-{RANK}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with contextlib.suppress(KeyboardInterrupt):
        main()
