"""Traces of whole programs: by the runner, by the environment, and where a rank fails."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import mpirun
import pytest

import mpiddp
from mpiddp.tracing import merging

pytestmark = pytest.mark.timeout(100)

TRAIN = """
import os, sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

{imports}

dist.init_process_group({backend!r})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=2, num_workers=2)
for step, (batch,) in enumerate(data):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    {within}
{after}
"""


def script(folder: Path, imports="", within="", after="dist.destroy_process_group()") -> Path:
    path = folder / "train.py"
    backend = "mpiddp" if imports else "gloo"
    if imports:
        imports += "; torch.nn.parallel.DistributedDataParallel = mpiddp.DistributedDataParallel"
    path.write_text(TRAIN.format(imports=imports, within=within, after=after, backend=backend))
    return path


def read(folder: Path) -> dict:
    with gzip.open(folder / merging.MERGED, "rt") as file:
        return json.load(file)


@pytest.mark.essential
def test_the_runner_traces_a_script(tmp_path):
    place = tmp_path / "trace"
    args = ["-m", "mpiddp", "--trace", place, script(tmp_path)]
    done = mpirun.run(2, args, 60, {"MPIDDP_TRACE_STEPS": "5"})
    assert done.returncode == 0, done.stderr
    assert f"a trace of 5 steps is in {place}" in done.stderr
    merged = read(place)
    assert [facts["reductions"] for facts in merged["mpiddp"]["ranks"]] == [5, 5]
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 1}


@pytest.mark.thorough
def test_the_environment_traces_to_the_end(tmp_path):
    path = script(tmp_path, "import mpiddp")
    done = mpirun.run(3, [path], 60, {"MPIDDP_TRACE": str(tmp_path / "trace")})
    assert done.returncode == 0, done.stderr
    facts = read(tmp_path / "trace")["mpiddp"]["ranks"]
    assert [each["reductions"] for each in facts] == [8] * 3
    assert all(each["clock"]["aligned_at_end"] for each in facts)
    assert max(each["clock"]["error_us"] for each in facts) > 0


@pytest.mark.thorough
def test_a_world_of_one(tmp_path):
    path = script(tmp_path, "import mpiddp")
    done = mpirun.run(1, [path], 60, {"MPIDDP_TRACE": str(tmp_path / "trace")})
    assert done.returncode == 0, done.stderr
    assert [each["reductions"] for each in read(tmp_path / "trace")["mpiddp"]["ranks"]] == [8]


@pytest.mark.essential
def test_a_program_that_does_not_destroy_its_group(tmp_path):
    """Each rank writes its own file, and the command makes one of them."""
    place = tmp_path / "trace"
    path = script(tmp_path, "import mpiddp", after="")
    done = mpirun.run(2, [path], 60, {"MPIDDP_TRACE": str(place)})
    assert done.returncode == 0, done.stderr
    assert not (place / merging.MERGED).exists()
    command = [sys.executable, "-m", "mpiddp.tracing", place]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.stdout.strip() == str(place / merging.MERGED), told.stderr
    facts = read(place)["mpiddp"]["ranks"]
    assert [each["reductions"] for each in facts] == [8, 8]
    assert not any(each["clock"]["aligned_at_end"] for each in facts)


def test_a_rank_that_fails_writes_its_file(tmp_path):
    place = tmp_path / "trace"
    fail = "if step == 3 and dist.get_rank() == 1: raise ValueError('here')"
    path = script(tmp_path, "import mpiddp", within=fail)
    done = mpirun.run(2, [path], 60, {"MPIDDP_TRACE": str(place)})
    assert done.returncode != 0
    assert "ValueError: here" in done.stderr
    facts = merging.header(merging.path_of(place, 1))["mpiddp"]
    assert facts["reductions"] == 4
    assert not facts["clock"]["aligned_at_end"]


def test_a_folder_that_cannot_be_written_does_not_end_the_job(tmp_path):
    (tmp_path / "trace").write_text("a file")
    path = script(tmp_path, "import mpiddp", after="dist.destroy_process_group(); print('trained')")
    done = mpirun.run(2, [path], 60, {"MPIDDP_TRACE": str(tmp_path / "trace")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    assert "rank 1: the trace of this rank could not be written" in done.stderr


def test_a_trace_needs_a_process_group(tmp_path):
    with pytest.raises(RuntimeError, match="init_process_group"), mpiddp.trace(tmp_path):
        pass


def test_merging_says_what_is_wrong(tmp_path, capsys):
    from mpiddp.tracing import __main__ as command

    assert command.main([]) == 2
    assert command.main([os.fspath(tmp_path)]) == 1
    assert "holds no trace" in capsys.readouterr().err
    path = merging.path_of(tmp_path, 0)
    path.parent.mkdir()
    with gzip.open(path, "wt") as file:
        file.write('{"distributedInfo": {"pg_config": []}, "mpiddp": {}, ')
        file.write(merging.FIRST_LINE + '{"ph": "X"},\n')
    assert command.main([os.fspath(tmp_path)]) == 1
    assert "is not whole" in capsys.readouterr().err
    assert not (tmp_path / merging.MERGED).exists()


# Its own warnings are not ours, so it has a process of its own.
ANALYSIS = """
import json, sys
from hta.trace_analysis import TraceAnalysis

analysis = TraceAnalysis(trace_dir=sys.argv[1])
symbols = analysis.t.symbol_table.get_sym_table()
told = {"steps": [int(step) for step in analysis.get_profiler_steps()]}
for rank, trace in analysis.t.traces.items():
    assert (trace["dur"] >= 0).all()
    names = [symbols[number] for number in trace["name"]]
    told[rank] = names.count("wait at the end of backward")
print(json.dumps(told))
"""


def test_holistic_trace_analysis_reads_it(tmp_path):
    pytest.importorskip("hta", reason="only `make test-all` installs it")
    path = script(tmp_path, "import mpiddp")
    done = mpirun.run(2, [path], 60, {"MPIDDP_TRACE": str(tmp_path / "trace")})
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-c", ANALYSIS, tmp_path / "trace" / "ranks"]
    read = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert read.returncode == 0, read.stderr
    # The last step may be cut off, so it leaves it out.
    assert json.loads(read.stdout) == {"steps": list(range(2, 8)), "0": 7, "1": 7}
