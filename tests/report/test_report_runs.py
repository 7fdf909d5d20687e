"""Reports of real trainings in which a fault was planted."""

import json
import subprocess
import sys
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(200)

SCRIPT = Path(__file__).parents[1] / "scripts" / "slow_steps.py"
NAP = 150


def reported(folder: Path, ranks: int, fault: str) -> tuple[dict, str]:
    """Return the report as JSON, and all that it advises."""
    done = mpirun.run(ranks, [SCRIPT, fault], 90, {"MPIDDP_TRACE": str(folder)})
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "mpiddp.report", folder]
    told = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=90, check=True
    )
    report = json.loads(told.stdout)
    assert len(report["ranks"]) == ranks
    assert [step["number"] for step in report["steps"]] == list(range(2, 17))
    for rank in report["ranks"]:
        assert sum(rank["parts_ms"].values()) == pytest.approx(rank["step_ms"], rel=0.01)
    return report, "\n".join(f"{f['text']} -> {f['remedy']}" for f in report["findings"])


@pytest.mark.thorough(keep=1)
@pytest.mark.essential
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slow_rank(tmp_path, ranks):
    report, advice = reported(tmp_path, ranks, "slow_rank")
    slow = report["slow"][0]
    assert slow["rank"] == 1
    assert slow["longer_part"] == "between forward and backward"
    # A busy machine may have made it the slowest before.
    assert slow["first_step"] <= 6
    assert slow["last_step"] >= 15
    assert slow["slowest_in"] >= 9
    assert slow["others_wait_ms"] > NAP / 2
    waits = [each["parts_ms"]["waiting for the slowest rank"] for each in report["ranks"]]
    assert min(waits) == waits[1]
    assert "all wait for rank 1 on " in advice


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slow_loader(tmp_path, ranks):
    report, advice = reported(tmp_path, ranks, "slow_loader")
    for rank in report["ranks"]:
        # The last batch raises at once.
        assert rank["parts_ms"]["data loading"] > NAP * 0.9
    assert "loading data takes 1" in advice
    assert "num_workers" in advice


@pytest.mark.thorough
def test_a_slow_loader_of_one_rank(tmp_path):
    report, advice = reported(tmp_path, 3, "slow_loader_of_one")
    assert report["slow"][0]["rank"] == 1
    assert report["slow"][0]["longer_part"] == "data loading"
    assert "Longer than with the others was data loading: by 1" in advice
    assert "loading data takes" not in advice


@pytest.mark.thorough(keep=1)
@pytest.mark.essential
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_bucket(tmp_path, ranks):
    report, advice = reported(tmp_path, ranks, "one_bucket")
    (bucket,) = report["buckets"]
    assert bucket["bytes"] == 6 * (512 * 512 + 512) * 4
    assert len(bucket["parameters"]) == 12
    assert "since all gradients are in one bucket (6.0 MiB)" in advice
    assert "bucket_cap_mb" in advice


@pytest.mark.thorough
def test_several_buckets_hide_more(tmp_path):
    report, advice = reported(tmp_path, 2, "none")
    assert len(report["buckets"]) == 6
    assert "all gradients are in one bucket" not in advice
    assert report["communication"]["hidden_ms"] > 0


def test_the_text_and_the_page(tmp_path):
    done = mpirun.run(2, ["-m", "mpiddp", "--trace", tmp_path, SCRIPT, "none"], 90)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "mpiddp.report", tmp_path]
    told = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert told.stdout.startswith("2 ranks on 1 node, 15 steps (2 to 16), ")
    for title in ("What to change", "Where the time of a step goes", "By rank", "Buckets"):
        assert f"\n{title}" in told.stdout
    if "plotly is not installed" not in told.stderr:
        assert f"Charts: {tmp_path / 'report.html'}" in told.stdout
