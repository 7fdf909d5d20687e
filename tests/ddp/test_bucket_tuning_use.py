"""bucket_cap_mb="auto": how it is asked for, what it tells, and what memory it leaves behind."""

import json
import re
from pathlib import Path
from typing import Any

import mpirun
import pytest
from replicas import RANK, gather, together
from torch import nn
from tuned_buckets import Net, layout, train

import mpiddp
from mpiddp import DistributedDataParallel as DDP

several_ranks = pytest.mark.mpi(min_size=2)


@pytest.mark.mpi
class TestVisible:
    @several_ranks
    def test_metrics_and_logging_data(self) -> None:
        model = DDP(Net(), bucket_cap_mb="auto")
        before = mpiddp.metrics(model)
        train(model, steps=10)
        during = mpiddp.metrics(model)
        train(model)
        after, data = mpiddp.metrics(model), model._get_ddp_logging_data()
        facts = model.reducer.tuning.facts()
        with together():
            assert [each["bucket_tuning"] for each in (before, during, after)] == [1, 1, 0]
            assert after["bucket_cap_mb"] == facts["bucket_cap_mb"]
            assert after["bucket_gain"] == facts["gain"]
            assert data["bucket_cap_bytes"] == facts["bucket_cap_mb"] * 2**20
            assert data["bucket_tuning"] == facts["words"]
            sizes = [
                sum(model.reducer.parameters[index].nbytes for index in bucket)
                for bucket in layout(model)
            ]
            assert data["rebuilt_bucket_sizes"] == ", ".join(map(str, sizes))
            assert len(facts["step_ms"]) >= 2
            json.dumps(facts)

    def test_nothing_without_it(self) -> None:
        model = DDP(nn.Linear(2, 2))
        assert model.reducer.tuning is None
        assert "bucket_tuning" not in model._get_ddp_logging_data()
        found = mpiddp.metrics(model)
        assert (found["bucket_tuning"], found["bucket_gain"]) == (0, 0)
        assert found["bucket_cap_mb"] in (1, 25)
        assert mpiddp.metrics(DDP(nn.Linear(2, 2), bucket_cap_mb=3))["bucket_cap_mb"] == 3

    @several_ranks
    def test_in_a_trace(self, tmp_path: Path) -> None:
        model = DDP(Net(), bucket_cap_mb="auto")
        (folder,) = set(gather(str(tmp_path)) if RANK == 0 else gather(None)) - {None}
        with mpiddp.trace(folder):
            train(model)
        from mpiddp.tracing.merging import header, path_of

        (facts,) = header(path_of(Path(folder), RANK))["mpiddp"]["bucket_tuning"]
        with together():
            assert facts == json.loads(json.dumps(model.reducer.tuning.facts()))


@pytest.mark.mpi
class TestErrors:
    @pytest.mark.parametrize(
        ("value", "kind", "words"),
        [
            ("automatic", ValueError, "a number of MiB or \"auto\", not 'automatic'"),
            ("", ValueError, 'a number of MiB or "auto"'),
            ("25", ValueError, "a number of MiB or \"auto\", not '25'"),
            (-1, ValueError, "not negative: -1"),
            (float("nan"), ValueError, "a finite number"),
            (True, TypeError, "a number of MiB, not True"),
            (b"auto", TypeError, "a number of MiB"),
        ],
    )
    def test_other_values(self, value: Any, kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=re.escape(words)):
            DDP(nn.Linear(2, 2), bucket_cap_mb=value)

    def test_together_with_a_list(self) -> None:
        with pytest.raises(ValueError, match="does not work together with bucket_cap_mb_list"):
            DDP(nn.Linear(2, 2), bucket_cap_mb="auto", bucket_cap_mb_list=[1, 2])

    @several_ranks
    @pytest.mark.parametrize("init_sync", [True, False])
    def test_ranks_that_differ(self, init_sync: bool) -> None:
        cap = "auto" if RANK == 1 else None
        with pytest.raises(RuntimeError, match=r"bucket_cap_mb is .*not auto.* on rank") as raised:
            DDP(nn.Linear(2, 2), bucket_cap_mb=cap, init_sync=init_sync)
        with together():
            assert "in different ways" in str(raised.value)


@pytest.mark.mpi
class TestVariable:
    @pytest.mark.parametrize(("text", "cap"), [("3", 3), ("0.5", 0.5)])
    def test_a_number(self, monkeypatch: pytest.MonkeyPatch, text: str, cap: float) -> None:
        monkeypatch.setenv("MPIDDP_BUCKET_CAP_MB", text)
        assert DDP(nn.Linear(2, 2)).bucket_bytes_cap == cap * 2**20
        assert DDP(nn.Linear(2, 2)).reducer.assign_buckets.size_limits == [cap * 2**20]

    @pytest.mark.parametrize("text", ["3", "auto"])
    def test_arguments_come_first(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setenv("MPIDDP_BUCKET_CAP_MB", text)
        for options in ({"bucket_cap_mb": 2}, {"bucket_cap_mb_list": [2]}):
            model = DDP(nn.Linear(2, 2), **options)
            assert model.reducer.assign_buckets.size_limits == [2 << 20]
            assert model.reducer.tuning is None

    def test_auto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MPIDDP_BUCKET_CAP_MB", "auto")
        assert DDP(nn.Linear(2, 2)).reducer.tuning is not None


UNMODIFIED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(24)]))
for step in range(100):
    model.zero_grad()
    model(torch.randn(4, 256)).square().mean().backward()
print("cap", model._get_ddp_logging_data()["bucket_cap_bytes"])
dist.destroy_process_group()
"""


@pytest.mark.smoke
@pytest.mark.timeout(120)
def test_programs_that_nobody_changes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNMODIFIED)
    env = {"MPIDDP_BUCKET_CAP_MB": "auto"}
    done = mpirun.run(3, ["-m", "mpiddp", script], timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "mpiddp: Sequential: " in line]
    assert len(lines) == 1, done.stderr
    assert re.search(r"MiB a bucket: a step took|no bucket size was clearly faster", lines[0])
    caps = set(re.findall(r"cap \d+", done.stdout))
    assert len(caps) == 1
    env = {"MPIDDP_BUCKET_CAP_MB": "2"}
    done = mpirun.run(2, ["-m", "mpiddp", script], timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"cap {2 << 20}\n") == 2


MEMORY = """
import sys, torch, torch.distributed as dist, mpiddp
from mpiddp import DistributedDataParallel as DDP
torch.set_num_threads(1)
mpiddp.init_process_group()
cap = "auto" if sys.argv[1] == "auto" else None
views = sys.argv[3] == "views"
model = DDP(
    torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]),
    bucket_cap_mb=cap, transport=sys.argv[2], gradient_as_bucket_view=views,
)
for step in range(100):
    model.zero_grad()
    model(torch.randn(4, 1024)).square().mean().backward()
if cap:
    assert model.reducer.tuning.facts()["steps"] > 20
with open("/proc/self/status") as file:
    rss = [int(line.split()[1]) for line in file if line.startswith(("RssAnon", "RssShmem"))]
print("MiB", sum(rss) / 1024)
mpiddp.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.timeout(200)
@pytest.mark.parametrize("memory", ["copies", "views"])
@pytest.mark.parametrize("transport", ["shared", "mpi"])
def test_old_buckets_are_given_back(tmp_path: Path, transport: str, memory: str) -> None:
    """After some 20 layouts of 48 MiB a rank has no more memory than with the default."""
    script = tmp_path / "train.py"
    script.write_text(MEMORY)

    def used(cap: str) -> float:
        done = mpirun.run(2, [script, cap, transport, memory], timeout=80)
        assert done.returncode == 0, done.stderr
        return max(float(each) for each in re.findall(r"MiB (\S+)", done.stdout))

    default, tuned = used("default"), used("auto")
    assert tuned < default + 24, (default, tuned)
