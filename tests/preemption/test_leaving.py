"""A rank that has left keeps nobody waiting who is asked to end."""

import mpirun
import pytest
from script_runs import SCRIPTS


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("leaving", "asked"),
    [
        # Without the first rank nobody decides.
        pytest.param(0, "not asked", id="the first rank"),
        pytest.param(2, "asked", id="another rank"),
    ],
)
def test_a_rank_has_left(leaving: int, asked: str) -> None:
    script = SCRIPTS / "leave_without_destroying.py"
    done = mpirun.run(3, [script, str(leaving)], timeout=50)
    print(done.stderr)
    assert done.returncode == 0
    said = {f"rank {rank} was {asked} to end" for rank in range(3) if rank != leaving}
    assert set(done.stdout.splitlines()) == said | {f"rank {leaving} leaves"}
