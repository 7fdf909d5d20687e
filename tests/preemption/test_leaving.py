"""A rank that has left keeps nobody waiting who is asked to end."""

from pathlib import Path

import mpirun
import pytest
from script_runs import SCRIPTS


@pytest.mark.essential(keep=1)
@pytest.mark.thorough
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


WITHOUT_A_WORLD = """
import mpiddp
from mpiddp import preemption

for _ in range(2):
    try:
        preemption.install()
    except RuntimeError as error:
        assert "call mpiddp.init_process_group() first" in str(error)
    else:
        raise AssertionError
    mpiddp.init_process_group()
    preemption.install()
    assert not preemption.requested()
    mpiddp.destroy_process_group()
"""


@pytest.mark.essential
@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_begins_and_ends_with_the_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_A_WORLD)
    done = mpirun.run(2, [script], timeout=50)
    assert done.returncode == 0, done.stderr
