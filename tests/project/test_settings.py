"""Environment variables: declared once, and compared when the ranks meet.

Tests of ranks that differ start processes of their own, since a process can initialise MPI only
once.
"""

import re
import textwrap
from pathlib import Path

import mpirun
import pytest

from mpiddp import settings

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).parents[2]

PREAMBLE = """\
import os, sys

# Before torch, which reads its own when it is imported.
second = "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK"))


def set_on_second(name, value):
    if second:
        os.environ[name] = value


"""

IMPORTS = """
import torch
import torch.distributed as dist
import mpiddp

torch.set_num_threads(1)


def total(group=None):
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def refusal(begin=mpiddp.init_process_group):
    try:
        begin()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("accepted")


"""


def run(folder: Path, before: str, after: str, *runner: str) -> tuple[int, str, str]:
    """Run a script that does `before` ahead of its imports and `after` behind them."""
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(before) + IMPORTS + textwrap.dedent(after))
    done = mpirun.run(2, [*runner, script], timeout=80)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done.returncode, done.stdout, done.stderr


@pytest.mark.once
def test_no_variable_is_read_elsewhere() -> None:
    names = {setting.name for setting in settings.SETTINGS}
    assert len(names) == len(settings.SETTINGS)
    files = [*ROOT.glob("mpiddp/**/*.py"), *ROOT.glob("cython/**/*.pyx")]
    assert len(files) > 50
    for path in files:
        text = path.read_text()
        if path.name == "settings.py":
            assert names == set(re.findall(r'"(MPIDDP_\w+)"', text))
            assert not re.search(r"^(from|import) mpiddp", text, re.MULTILINE)
        else:
            assert not re.findall(r"""["'](MPIDDP_\w+)["']""", text), path
            # Nor one whose name is put together.
            assert not re.findall(r"environ.*MPIDDP|getenv.*MPIDDP", text), path


@pytest.mark.once
def test_what_each_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
        assert setting.read() == setting.unset
        assert setting.type
        assert setting.default
        assert setting.meaning.endswith(".")
    allowed = {
        settings.TRANSPORT: {"auto": "auto", "shared": "shared", "mpi": "mpi"},
        settings.DEVICE_TRANSPORT: {name: name for name in ("auto", "staging", "device", "ring")},
        settings.WIRE: {name: name for name in ("auto", "direct", "two-level", "iallreduce")},
        settings.COLLECTIVES: {
            "memory": "memory",
            "copies": "copies",
            "messages": "messages",
        },
        settings.PROGRESS_THREAD: {"0": False, "1": True},
        settings.KERNELS: {"": None, "plain": "plain"},
        settings.DEBUG: {"0": 0, "1": 1, "100": 100},
        settings.SHARED_PARAMETERS: {"0": "", "1": "1", "numa": "numa", "4": "4"},
        settings.BUCKET_CAP_MB: {"auto": "auto", "4": 4.0, "0.5": 0.5, "0": 0.0},
        settings.DUMP_SIGNAL: {"USR2": 12, "sigusr1": 10, "RTMIN+2": 36, "40": 40, "none": 0},
        settings.PREEMPTION_SIGNALS: {"USR2, term": (12, 15), "none": ()},
        settings.STALL_SECONDS: {"2.5": 2.5, "none": float("inf")},
        settings.SLOW_RANKS: {"0": False, "1": True},
        settings.PROGRESS: {"0": 0.0, "2.5": 2.5},
        settings.START_SECONDS: {"2.5": 2.5, "none": float("inf")},
        settings.PROGRAMS: {"own": "own", "all": "all"},
        settings.HEARTBEAT_SECONDS: {"20": 20.0, "none": float("inf")},
        settings.INTERFACE: {"ib0, 10.1.0.0/16": ("ib0", "10.1.0.0/16")},
        settings.JOIN: {"": None, "/shared/run-1": Path("/shared/run-1")},
        settings.TRIAL_SECONDS: {"2.5": 2.5},
        settings.TRACE: {"": None, "traces": Path("traces")},
        settings.TRACE_STEPS: {"1": 1, "20": 20},
    }
    assert list(allowed) == list(settings.SETTINGS)
    for setting, values in allowed.items():
        for text, value in values.items():
            monkeypatch.setenv(setting.name, text)
            assert setting.read() == value
    for setting, text in (
        (settings.TRANSPORT, ""),
        (settings.DEVICE_TRANSPORT, "Ring"),
        (settings.WIRE, "two"),
        (settings.COLLECTIVES, "mpi"),
        (settings.PROGRESS_THREAD, "yes"),
        (settings.DEBUG, "-1"),
        (settings.SHARED_PARAMETERS, "yes"),
        (settings.BUCKET_CAP_MB, "automatic"),
        (settings.BUCKET_CAP_MB, "-1"),
        (settings.BUCKET_CAP_MB, "inf"),
        (settings.DUMP_SIGNAL, "KILL"),
        (settings.DUMP_SIGNAL, "64000"),
        (settings.DUMP_SIGNAL, "later"),
        (settings.PREEMPTION_SIGNALS, "USR2,KILL"),
        (settings.STALL_SECONDS, "0"),
        (settings.SLOW_RANKS, "no"),
        (settings.PROGRESS, "none"),
        (settings.START_SECONDS, "never"),
        (settings.HEARTBEAT_SECONDS, "-1"),
        (settings.INTERFACE, "ib0,"),
        (settings.TRIAL_SECONDS, "0"),
        (settings.TRIAL_SECONDS, "nan"),
        (settings.TRIAL_SECONDS, "soon"),
    ):
        monkeypatch.setenv(setting.name, text)
        with pytest.raises(ValueError, match=rf"^{setting.name} must be .*, not '{text}'$"):
            setting.read()
        assert setting.read_before_init() == setting.unset


SAME = "it must be the same on all ranks"

# What rank 1 alone has in its environment, and what all ranks say to it.
DIFFERENT = {
    ("MPIDDP_PROGRESS_THREAD", "0"): (
        f"RuntimeError: MPIDDP_PROGRESS_THREAD is unset on rank 0 and 0 on rank 1: {SAME}"
    ),
    ("MPIDDP_PROGRESS_THREAD", "no"): (
        "ValueError: rank 1: MPIDDP_PROGRESS_THREAD must be 0 or 1, not 'no'"
    ),
    ("MPIDDP_TRANSPORT", "mpi"): (
        f"RuntimeError: MPIDDP_TRANSPORT is auto on rank 0 and mpi on rank 1: {SAME}"
    ),
    ("MPIDDP_TRANSPORT", "tcp"): (
        "ValueError: rank 1: MPIDDP_TRANSPORT must be auto, shared, exchange or mpi, not 'tcp'"
    ),
    ("MPIDDP_DEVICE_TRANSPORT", "ring"): (
        f"RuntimeError: MPIDDP_DEVICE_TRANSPORT is auto on rank 0 and ring on rank 1: {SAME}"
    ),
    ("MPIDDP_KERNELS", "abacus"): "ValueError: rank 1: MPIDDP_KERNELS must be one of plain",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): (
        f"RuntimeError: TORCH_DISTRIBUTED_DEBUG is OFF or INFO on rank 0 and DETAIL on rank 1: "
        f"{SAME}"
    ),
    ("TORCH_DIST_INIT_BARRIER", "1"): (
        f"RuntimeError: TORCH_DIST_INIT_BARRIER is 0 on rank 0 and 1 on rank 1: {SAME}"
    ),
    ("MPIDDP_WIRE", "direct"): (
        f"RuntimeError: MPIDDP_WIRE is auto on rank 0 and direct on rank 1: {SAME}"
    ),
    # Rank 1 would wait for a job there, and rank 0 for rank 1.
    ("MPIDDP_JOIN", "/nowhere"): (
        f"RuntimeError: MPIDDP_JOIN is unset on rank 0 and /nowhere on rank 1: {SAME}"
    ),
}


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        pytest.param(*one, marks=[pytest.mark.once] * (number not in (0, 1, 6)))
        for number, one in enumerate(DIFFERENT)
    ],
)
def test_told_on_all_ranks(tmp_path: Path, variable: str, value: str) -> None:
    status, out, _ = run(
        tmp_path,
        f"os.environ.pop({variable!r}, None); set_on_second({variable!r}, {value!r})",
        f"""
        expected = {DIFFERENT[variable, value]!r}
        for begin in (mpiddp.init_process_group, lambda: dist.init_process_group("mpiddp")):
            told = refusal(begin)
            assert told.startswith(expected), told
            assert not dist.is_initialized() and "RANK" not in os.environ
        # Nothing is left of it.
        os.environ.pop({variable!r}, None)
        dist.set_debug_level(dist.DebugLevel.OFF)
        mpiddp.system.kernels.use("plain")
        mpiddp.init_process_group()
        assert total() == 2
        print("all well")
        """,
    )
    assert status == 0
    assert out.count("all well") == 2


# What is another version on rank 1, and what all ranks say then.
VERSIONS = {
    "mpiddp": (
        "launch_checks.__version__ = '0.0.7'",
        "mpiddp is version {} on rank 0 and version 0.0.7",
    ),
    "torch": ("torch.__version__ = '1.2.3+cpu'", "torch is version {} on rank 0 and version 1.2.3"),
    # With an mpiddp that was compiled with it.
    "MPI": (
        "mpi_world.refuse_two_libraries = lambda: None\n"
        "MPI.get_vendor = lambda: ('Another MPI', (9, 1, 0))",
        "MPI is {} on rank 0 and Another MPI 9.1.0",
    ),
}


@pytest.mark.thorough
def test_versions_that_differ(tmp_path: Path) -> None:
    """One rank finds other libraries, as where a node has another environment."""
    status, out, _ = run(
        tmp_path,
        "",
        f"""
        from mpi4py import MPI
        from mpiddp.rendezvous import launch_checks, mpi_world
        VERSIONS = {VERSIONS!r}
        own = launch_checks.compared()
        for name, (change, expected) in VERSIONS.items():
            before = launch_checks.__version__, torch.__version__, MPI.get_vendor
            if second:
                exec(change)
            told = refusal(mpiddp.init_process_group)
            expected = "RuntimeError: " + expected.format(own[name].removeprefix("version "))
            assert told == f"{{expected}} on rank 1: {SAME}", told
            launch_checks.__version__, torch.__version__, MPI.get_vendor = before
        mpiddp.init_process_group()
        assert total() == 2
        print("all well")
        """,
    )
    assert status == 0
    assert out.count("all well") == 2


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "runner", [pytest.param([], id="plain"), pytest.param(["-m", "mpiddp"], id="runner")]
)
def test_ends_the_job(tmp_path: Path, runner: list[str]) -> None:
    status, out, error = run(
        tmp_path,
        "set_on_second('MPIDDP_PROGRESS_THREAD', '0')",
        "mpiddp.init_process_group()\nprint('still here')\n",
        *runner,
    )
    assert status == 1
    assert "still here" not in out
    assert "MPIDDP_PROGRESS_THREAD is unset on rank 0 and 0 on rank 1" in error


@pytest.mark.thorough
@pytest.mark.once
def test_what_may_differ(tmp_path: Path) -> None:
    status, out, _ = run(
        tmp_path,
        """
        for name in ("MPIDDP_TRANSPORT", "TORCH_DISTRIBUTED_DEBUG"):
            os.environ.pop(name, None)
        set_on_second("MPIDDP_TRANSPORT", "auto")
        set_on_second("MPIDDP_KERNELS", "plain")
        set_on_second("MPIDDP_TRIAL_SECONDS", "3")
        set_on_second("TORCH_DISTRIBUTED_DEBUG", "INFO")
        """,
        "mpiddp.init_process_group()\nassert total() == 2\nprint('all well')\n",
    )
    assert status == 0
    assert out.count("all well") == 2


@pytest.mark.thorough
def test_debug_level_of_a_later_group(tmp_path: Path) -> None:
    status, out, _ = run(
        tmp_path,
        "os.environ.pop('TORCH_DISTRIBUTED_DEBUG', None)",
        f"""
        mpiddp.init_process_group()
        detail = dist.DebugLevel.DETAIL
        if second:
            dist.set_debug_level(detail)
        told = refusal(dist.new_group)
        expected = "TORCH_DISTRIBUTED_DEBUG is OFF or INFO on rank 0 and DETAIL on rank 1: {SAME}"
        assert told == f"RuntimeError: {{expected}}", told
        # Groups that exist go on, and of one rank it concerns nobody else.
        assert total() == 2
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        assert total(alone) == 1
        dist.set_debug_level(detail)
        assert total(dist.new_group()) == 2
        print("all well")
        """,
    )
    assert status == 0
    assert out.count("all well") == 2
