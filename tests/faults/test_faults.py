"""Each fault at each moment: the job ends in time, says why, and leaves nothing."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import patience
import pytest
from cells import HOST_FAULTS, Cell, cells, sample
from fault_hosts import Labs, NoSlurmError, reason_without, shared_files
from fault_job import run
from fault_starts import ON_HOSTS

import mpiddp

# How many jobs run at once: most only wait.
_AT_ONCE = 4
_MPI = mpiddp.compiled_against()[0]
_CELLS = cells(_MPI)
_SAMPLE = [cell.name for cell in sample(_MPI)]
# Those of `make test`: they need no hosts.
_FEW = [
    name for name in _SAMPLE if name.endswith("-mpirun") and name.startswith(("kill-", "sys-exit-"))
]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name not in _SAMPLE:
        return [pytest.mark.slow]
    return [pytest.mark.once, *([] if name in _FEW else [pytest.mark.thorough])]


_PARAMETERS = [pytest.param(cell, id=cell.name, marks=_marks(cell.name)) for cell in _CELLS]


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[str]]]:
    """Start the jobs of all cells that this run has, some at once; return what is wrong."""
    wanted = [
        item.callspec.params["cell"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_fault"
    ]
    before = shared_files()
    labs = Labs()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mpiddp-faults-", dir="/tmp") as name:
        jobs = ThreadPoolExecutor(_AT_ONCE)
        try:
            yield {
                cell.name: jobs.submit(_problem, cell, Path(name) / cell.name, labs)
                for cell in wanted
            }
        finally:
            jobs.shutdown(cancel_futures=True)
            left = labs.close()
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{len(wanted)} jobs that meet a fault took {time.monotonic() - began:.0f} s")
    assert shared_files() - before | left == set()


# Waits for its own job, which begins when the one before has ended, or before.
@pytest.mark.timeout(300)
@pytest.mark.alone  # looks for what is left on the machine
@pytest.mark.parametrize("cell", _PARAMETERS)
def test_fault(cell: Cell, problems: Mapping[str, Future[str]]) -> None:
    if cell.start in ON_HOSTS and (why := reason_without(slurm=cell.start != "mpirun-hosts")):
        pytest.skip(why)
    try:
        found = problems[cell.name].result()
    except NoSlurmError as error:
        pytest.skip(str(error))
    assert not found, found


def _problem(cell: Cell, folder: Path, labs: Labs) -> str:
    """Return what is wrong about how the job of a cell ends, "" if nothing is."""
    on_hosts, slurm = cell.start in ON_HOSTS, cell.start.startswith("srun")
    limit = patience.enough(cell.limit)
    if on_hosts and reason_without(slurm):
        return ""
    folder.mkdir()
    started = time.monotonic()
    with contextlib.ExitStack() as until_done:
        lab = None
        if cell.fault in HOST_FAULTS:
            lab = until_done.enter_context(labs.own(slurm))
        elif on_hosts:
            lab = labs.shared()
        outcome = run(cell.fault, cell.moment, cell.start, folder, limit, lab, cell.launcher_ends)
        files = lab.shared_files() if lab is not None and cell.fault in HOST_FAULTS else set()
    said = f"; it said:\n{outcome.said}"
    if not outcome.met:
        return f"the fault was not met, in {time.monotonic() - started:.0f} s{said}"
    ended = outcome.over if cell.launcher_ends else outcome.seconds
    if ended is None or ended > limit:
        return f"it had not ended after {limit:.0f} s, left were {outcome.left}{said}"
    if outcome.left:
        return f"when its host was there again, left were {outcome.left}{said}"
    if not cell.said.search(outcome.said):
        return f"it did not say {cell.said.pattern!r}{said}"
    right = {"any": True, "not 0": outcome.status != 0}
    if cell.launcher_ends and not right.get(cell.status, str(outcome.status) == cell.status):
        return f"its status was {outcome.status}{said}"
    if files:
        return f"shared memory was left: {files}"
    return ""
