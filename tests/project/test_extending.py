"""A new transport, collective, communication hook or diagnosis: one file, and one line beside it.

CONTRIBUTING.md says where. Each test adds a toy one to a copy of the installed package in that
way, and uses it on two ranks.
"""

import re
import shutil
from pathlib import Path

import mpirun
import pytest

import mpiddp

INSTALLED = Path(mpiddp.__file__).parent
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"

pytestmark = [pytest.mark.timeout(120), pytest.mark.once]


class Copy:
    """A copy of the installed package, to add to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(INSTALLED, folder / "mpiddp", ignore=shutil.ignore_patterns("__pycache__"))

    def add(self, file: str, text: str) -> None:
        """Add a file, where CONTRIBUTING names its room."""
        path = self.folder / "mpiddp" / file
        assert not path.exists()
        assert f"`mpiddp/{path.parent.name}/`" in CONTRIBUTING.read_text()
        path.write_text(text)

    def add_line(self, file: str, after: str, line: str, imports: str) -> None:
        """Add a line to a file that CONTRIBUTING names, and the import that it needs."""
        assert f"`mpiddp/{file}`" in CONTRIBUTING.read_text()
        path = self.folder / "mpiddp" / file
        text = path.read_text()
        assert text.count(after) == 1
        text = text.replace(after, f"{after}\n{line}")
        # Before the first import of our own.
        text, places = re.subn(
            r"^(?=from mpiddp)", f"{imports}\n", text, count=1, flags=re.MULTILINE
        )
        assert places == 1
        path.write_text(text)

    def run(self, *arguments: str) -> str:
        """Run Python with it on two ranks; return what they printed."""
        done = mpirun.run(2, list(arguments), 100, {"PYTHONPATH": str(self.folder)})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def package(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


TRAIN = """
import torch, mpiddp
mpiddp.init_process_group()
rank = mpiddp.get_topology().rank
model = mpiddp.DistributedDataParallel(torch.nn.Linear(3, 1), {arguments})
{then}
model(torch.full((1, 3), float(rank))).sum().backward()
assert model.module.weight.grad.tolist() == [[0.5] * 3], model.module.weight.grad
{last}
mpiddp.destroy_process_group()
"""


@pytest.mark.slow
def test_transport(package: Copy) -> None:
    package.add(
        "transports/toy.py",
        '''"""MPI_Iallreduce of one chunk at a time."""

from mpiddp.transports.messages import MessageTransport
from mpiddp.transports.wire import Wire


def make_toy(communicator, node_count):
    return MessageTransport(Wire(communicator, window=1))
''',
    )
    package.add_line(
        "transports/choice.py",
        '    "mpi": _make_iallreduce,',
        '    "toy": make_toy,',
        "from mpiddp.transports.toy import make_toy",
    )
    last = """
channel = model.reducer.channel
assert type(channel.transport).__name__ == "MessageTransport"
try:
    mpiddp.DistributedDataParallel(torch.nn.Linear(3, 1), transport="boy")
except ValueError as error:
    print(error)
"""
    program = TRAIN.format(arguments='transport="toy"', then="", last=last)
    printed = package.run("-c", program)
    assert "transport must be one of auto, shared, exchange, mpi, toy, not 'boy'" in printed


@pytest.mark.slow
def test_collective(package: Copy) -> None:
    package.add(
        "collectives/rotation.py",
        '''"""Each rank gets the tensor of the rank before it."""

import torch

from mpiddp.collectives import point_to_point


def rotate(group, tensor):
    source = tensor.clone()
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    pending = point_to_point.receive_bytes(group, tensor, before, 0)
    yield [*pending, *point_to_point.send_bytes(group, source, after, 0)]
    return [tensor]
''',
    )
    package.add_line(
        "process_group/group.py",
        "    # Data movement. Any dtype, any strides.",
        "    def rotate(self, one): return "
        'self._start("rotate", rotation.rotate, (one,), None, [one])',
        "from mpiddp.collectives import rotation",
    )
    program = """
import torch, torch.distributed as dist, mpiddp
mpiddp.init_process_group()
rank = dist.get_rank()
tensor = torch.full((3,), float(rank))
dist.group.WORLD.rotate(tensor).wait()
assert tensor.tolist() == [float(1 - rank)] * 3, tensor
mpiddp.destroy_process_group()
"""
    package.run("-c", program)


@pytest.mark.thorough
def test_communication_hook(package: Copy) -> None:
    package.add(
        "ddp/toy_hooks.py",
        '''"""Gradients travel in float16, by another name."""


def half(state, bucket):
    raise AssertionError("a recognised hook is not called")
''',
    )
    package.add_line(
        "ddp/hooks.py",
        "        (compression.fp16, torch.float16),",
        "        (toy_hooks.half, torch.float16),",
        "from mpiddp.ddp import toy_hooks",
    )
    then = "from mpiddp.ddp.toy_hooks import half; model.register_comm_hook(None, half)"
    last = "assert model.reducer.compression is torch.float16"
    package.run("-c", TRAIN.format(arguments="", then=then, last=last))


@pytest.mark.thorough
def test_diagnosis(package: Copy) -> None:
    package.add(
        "transports/toy_report.py",
        '''"""How many buckets a toy could carry."""

from mpiddp.findings import Finding


def report_toys(world):
    return [Finding("warning", f"toys: {world.allreduce(1)}", "buy more")]
''',
    )
    package.add_line(
        "doctor.py",
        "    travelling.report_memory,",
        "    report_toys,",
        "from mpiddp.transports.toy_report import report_toys",
    )
    assert "\nwarning toys: 2\n        -> buy more\n" in package.run("-m", "mpiddp.doctor")
