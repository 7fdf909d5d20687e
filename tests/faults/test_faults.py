"""Each fault at each moment: the job ends in time, says why, and leaves nothing."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cells import RANKS, Cell, cells
from fault_job import run, shared_files

# How many jobs of the sample run at once: most only wait.
_AT_ONCE = 3


def problem(cell: Cell, folder: Path) -> str:
    """Return what is wrong about how the job of a cell ends, "" if nothing is."""
    outcome = run(cell.fault, cell.moment, folder, cell.limit, RANKS)
    said = f"; it said:\n{outcome.said}"
    if not (folder / "began").exists():
        return f"the fault was not met{said}"
    if outcome.seconds is None or outcome.seconds > cell.limit:
        return f"processes were left after {cell.limit} s{said}"
    if not cell.said.search(outcome.said):
        return f"it did not say {cell.said.pattern!r}{said}"
    if outcome.status == 0 if cell.status is None else outcome.status != cell.status:
        return f"its status was {outcome.status}{said}"
    return ""


@pytest.mark.timeout(150)
@pytest.mark.slow
@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.name)
def test_fault(cell: Cell, tmp_path: Path) -> None:
    before = shared_files()
    found = problem(cell, tmp_path)
    assert not found, found
    assert shared_files() <= before


@pytest.mark.timeout(400)
@pytest.mark.once
def test_sample(tmp_path: Path) -> None:
    """A third of the cells, some at once; all of them are in `make test-faults`."""
    sample = [cell for cell in cells() if zlib.crc32(cell.name.encode()) % 3 == 0]
    before = shared_files()
    for cell in sample:
        (tmp_path / cell.name).mkdir()
    with ThreadPoolExecutor(_AT_ONCE) as jobs:
        found = jobs.map(lambda cell: problem(cell, tmp_path / cell.name), sample)
        problems = {cell.name: text for cell, text in zip(sample, found, strict=True) if text}
    assert problems == {}
    assert shared_files() <= before
