"""A script for Horovod under `python -m mpiddp`, where Horovod is not installed."""

import pytest
from script_runs import SCRIPTS, by_rank, launch

pytestmark = pytest.mark.timeout(180)


@pytest.mark.thorough
@pytest.mark.essential
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_same_losses_as_on_one_rank(ranks: int) -> None:
    script = SCRIPTS / "horovod_trainer.py"
    alone, together = (launch(script, ranks=number) for number in (1, ranks))
    assert alone.returncode == together.returncode == 0
    assert together.stderr.count("there is no horovod.torch; mpiddp.horovod stands in for it") == 1
    expected = by_rank(alone.stdout)[0]
    found = by_rank(together.stdout)
    assert sorted(found) == list(range(ranks))
    for row in found.values():
        assert row["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert row["sum"] == pytest.approx(expected["sum"], rel=1e-5)
