"""Each fault at each moment: the job ends in time, says why, and leaves nothing."""

import zlib
from pathlib import Path

import pytest
from cells import RANKS, Cell, cells
from fault_job import run

# Of the cells, those whose number is divisible by this are in CI.
_SAMPLE = 4


def _parameters() -> list[object]:
    return [
        pytest.param(
            cell,
            id=cell.name,
            marks=[] if zlib.crc32(cell.name.encode()) % _SAMPLE == 0 else [pytest.mark.slow],
        )
        for cell in cells()
    ]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("cell", _parameters())
def test_fault(cell: Cell, tmp_path: Path) -> None:
    outcome = run(cell.fault, cell.moment, tmp_path, cell.limit, RANKS)
    print(outcome.said)  # pytest shows it when the test fails
    assert (tmp_path / "began").exists(), "the fault was not met"
    assert outcome.seconds is not None, f"processes were left after {cell.limit} s"
    assert outcome.seconds < cell.limit
    assert cell.said.search(outcome.said)
    assert outcome.status == cell.status if cell.status is not None else outcome.status != 0
    assert outcome.left == []
