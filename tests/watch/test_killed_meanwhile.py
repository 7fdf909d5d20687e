"""A rank dies in the middle of what makes or measures buckets, compares steps or shows a save.

The others of its node end the job at once and name it, as where it dies in a collective of the
user's: no launcher does it for them here.
"""

import re
from pathlib import Path

import patience
import pytest
from left_alone import AT_ONCE, run

pytestmark = pytest.mark.timeout(100)

SOURCE = """
from pathlib import Path

from mpiddp import checkpoint, shown_progress
from mpiddp.ddp.bucket_tuning import BucketTuning
from mpiddp.ddp.slow_ranks import StepComparison
from mpiddp.reducer import building

where, who, folder = {where!r}, {who}, Path(__file__).parent / "checkpoints"
torch.set_num_threads(1)


def dying(function, number=1, later=False):
    "Return what dies when it is called so often: before it does anything, or later."
    calls = 0

    def called(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number and later:
            function(*arguments, **options)
        if calls == number:
            time.sleep(0.3)  # the others wait by now
            die(True)
        return function(*arguments, **options)

    return called


def arrange():
    if where == "times":
        BucketTuning._slowest = dying(BucketTuning._slowest, 2)
    elif where == "layout":
        BucketTuning._lay_out = dying(BucketTuning._lay_out, 2)
    elif where == "allocate":
        building._allocate = dying(building._allocate)
    elif where == "compare":
        StepComparison.begin = dying(StepComparison.begin)
    elif where == "compared":
        StepComparison.begin = dying(StepComparison.begin, later=True)
    elif where == "write":
        shown_progress.advance = dying(shown_progress.advance, 3)


if where in ("write", "wait"):
    large, small = {{"large": torch.ones(1 << 24)}}, {{"small": torch.ones(3)}}
    checkpoint.save(small, folder, step=1)
    dist.barrier()
    if rank == who and where == "wait":
        import threading
        threading.Timer(0.5, die, [True]).start()
    elif rank == who:
        arrange()
    elif where == "wait":
        shown_progress.advance = lambda number: time.sleep(0.5)  # a disk that is slow
    for step in range(2, 9):
        checkpoint.save(large, folder, step=step)
else:
    layers = [torch.nn.Linear(256, 256) for _ in range(12)]  # two sizes make different buckets
    model = mpiddp.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb="auto")
    if rank == who:
        arrange()
    for _ in range(100):
        model.zero_grad()
        model(torch.ones(4, 256)).sum().backward()
print("still here", flush=True)
"""


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("where", "who"),
    [
        ("times", 1),
        ("layout", 1),
        ("compare", 1),
        ("write", 0),
        ("allocate", 1),
        ("allocate", 0),
        ("times", 0),
        ("layout", 0),
        ("compared", 1),
        ("wait", 1),
    ],
    ids=lambda value: str(value),
)
def test_others_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, who: int
) -> None:
    monkeypatch.setenv("MPIDDP_PROGRESS", "0.02")
    done, seconds = run(tmp_path, SOURCE.format(where=where, who=who))
    assert "still here" not in done.stdout
    assert 0 < seconds < patience.enough(AT_ONCE)
    assert re.search(
        rf"mpiddp: rank [012]: rank {who} \(process \d+ on \S+\) (was ended by SIGKILL|has ended"
        r"( with status 3)?), and this rank waits for its part of .*\. The job ends",
        done.stderr,
    )
