"""Processes come to a program that trains under mpiddp.elastic."""

import time
from pathlib import Path

import pytest
from elastic_runs import needs_ulfm, said, start, train

from mpiddp import elastic

pytestmark = pytest.mark.timeout(150)


def test_grow_is_refused() -> None:
    with pytest.raises(ValueError, match="count must be 1 or more, not 0"):
        elastic.grow(0)
    with pytest.raises(Exception, match=r"for a function under elastic\.run"):
        elastic.grow(1)


@pytest.mark.thorough
def test_more_ranks() -> None:
    """On MPICH too: nobody is lost."""
    done = train(2, 200, "--grow=50:1")
    assert done.returncode == 0
    came, *others = said(done)
    assert came["rank"] == -1
    assert came["worlds"] == [[3, 50]]
    assert [each["worlds"] for each in others] == [[[2, 0], [3, 50]]] * 2
    assert "mpiddp: rank 0: 1 has come; training goes on with 3 after" in done.stderr


@pytest.mark.thorough
@needs_ulfm
def test_another_one_for_the_lost() -> None:
    done = train(3, 300, "--kill=1:0.3", '--options={"replace": true}')
    assert done.returncode == 0
    came, *others = said(done)
    assert came["rank"] == -1
    assert [each["rank"] for each in others] == [0, 2]
    assert [world[0] for each in others for world in each["worlds"]] == [3] * 4
    assert {each["steps"] for each in (came, *others)} == {300}
    assert "1 of 3 ranks was lost, 1 has come; training goes on with 3 after" in done.stderr


@needs_ulfm
@pytest.mark.slow
def test_who_came_is_lost_too() -> None:
    options = '--options={"replace": true, "most_losses": 3}'
    done = train(2, 10**6, "--kill=1:0.3", "--kill=-1:0.3", options)
    assert "rank 0: ranks were lost 4 times, more often than most_losses=3" in done.stderr
    assert done.stderr.count("1 of 2 ranks was lost, 1 has come") == 3


@pytest.mark.thorough
def test_world_that_is_not_made_in_time(tmp_path: Path) -> None:
    """One rank does not come to the making of the new world, and is not dead either."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nimport mpiddp\nfrom mpiddp import elastic\n"
        "from mpiddp.elastic import recovery\n"
        "import torch.distributed as dist\n"
        "recovery._LAST_LIMIT = 2.0\n"
        "mpiddp.init_process_group()\n"
        "@elastic.run\n"
        "def train(state):\n"
        "    if dist.get_rank() == 1:\n"
        "        time.sleep(60)\n"
        "    elastic.grow(1)\n"
        "train(elastic.State(step=0))\n"
    )
    began = time.monotonic()
    done = start(2, str(script), lossy=False)
    assert done.returncode != 0
    assert (
        "mpiddp: a new world was not made within 2 s: this rank gives up. Started again, it begins "
        "anew"
    ) in done.stderr
    assert time.monotonic() - began < 40


@needs_ulfm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_one_is_lost_while_another_comes() -> None:
    """The second loss comes while the survivors wait for the process that comes."""
    for seconds in (1.0, 2.0, 3.0):
        kills = ["--kill=1:0.3", f"--kill=2:{seconds}"]
        done = train(3, 500, *kills, '--options={"replace": true}', limit=200)
        if "a new world was not made" in done.stderr:  # see docs/how-to/elastic.md
            continue
        assert done.returncode == 0
        ended = said(done)
        assert [each["worlds"][-1][0] for each in ended] == [3] * 3
        assert 0 in [each["rank"] for each in ended]
