"""The list of torch's private names: it is complete, and the installed torch has them."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import mpiddp
from mpiddp.torch_internals import private_names
from mpiddp.torch_internals.private_names import PRIVATE_NAMES, PrivateName

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).resolve().parents[2]

# Reached through names of their own: modules, or bases of what is listed.
BELOW = {
    "torch._C",
    "torch._utils",
    "torch._C._autograd",
    "torch._C._distributed_c10d",
    "torch._C._dynamo",
    "torch._C._dynamo.eval_frame",
    "torch._C._distributed_autograd",
    "torch.autograd.Variable._execution_engine",
    "torch.distributed.distributed_c10d._world",
    "torch.nn.modules.batchnorm._BatchNorm",
}


def is_private(name: str) -> bool:
    return any(re.match("_(?!_)", part) for part in name.split("."))


def names_in(source: str) -> Iterator[str]:
    """Yield the names of torch that a module reaches from what it imports, in full."""
    tree = ast.parse(source)
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "torch":
                    known[each.asname or "torch"] = each.name if each.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for each in node.names:
                known[each.asname or each.name] = f"{node.module}.{each.name}"

    def full(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            before = full(node.value)
            return before and f"{before}.{node.attr}"
        return None

    yield from known.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := full(node)):
            yield name


def names_used() -> dict[str, set[str]]:
    """Return torch's private names in the source, and the files that use each."""
    found = defaultdict(set)
    for folder in ("mpiddp", "cython"):
        for path in sorted((ROOT / folder).rglob("*.py*")):
            where = str(path.relative_to(ROOT / folder).with_suffix(""))
            if path.suffix == ".py":
                names = set(names_in(path.read_text()))
            elif path.suffix == ".pyx":
                names = set(re.findall(r"\btorch(?:\.\w+)+", path.read_text()))
            else:
                continue
            for name in filter(is_private, names):
                found[name].add(where)
    return found


def test_every_name_is_listed_where_it_is_used() -> None:
    listed = defaultdict(set)
    for each in PRIVATE_NAMES:
        listed[each.name].update(each.used_in)
    missing = []
    for name, files in names_used().items():
        covered = [where for known, where in listed.items() if f"{name}.".startswith(f"{known}.")]
        if not covered and name not in BELOW:
            missing.append(name)
        elif covered and not files <= set().union(*covered):
            missing.append(f"{name} in {sorted(files - set().union(*covered))}")
    assert not missing


def test_every_listed_name_is_in_its_files() -> None:
    wrong = []
    for each in PRIVATE_NAMES:
        for where in each.used_in:
            text = "".join(
                path.read_text()
                for path in (ROOT / "mpiddp" / f"{where}.py", ROOT / "cython" / f"{where}.pyx")
                if path.exists()
            )
            if not re.search(rf"\b{each.name.rpartition('.')[2]}\b", text):
                wrong.append(f"{each.name} in {where}")
    assert not wrong


def test_what_our_classes_override_is_listed() -> None:
    from torch.distributed import Logger, ProcessGroup, Reducer, Work

    from mpiddp.ddp.logger import Logger as OurLogger
    from mpiddp.ddp.torch_reducer import TorchReducer
    from mpiddp.process_group.group import ProcessGroup as OurGroup
    from mpiddp.process_group.work import Work as OurWork

    listed = {each.name for each in PRIVATE_NAMES}
    missing = []
    for ours, theirs, name in (
        (mpiddp.DistributedDataParallel, TorchDDP, "torch.nn.parallel.DistributedDataParallel"),
        (OurGroup, ProcessGroup, "torch.distributed.ProcessGroup"),
        (OurWork, Work, "torch.distributed.Work"),
        (TorchReducer, Reducer, "torch.distributed.Reducer"),
        (OurLogger, Logger, "torch.distributed.Logger"),
    ):
        for base in ours.__mro__[: ours.__mro__.index(theirs) if theirs in ours.__mro__ else None]:
            if base.__module__ == "mpiddp.torch_internals.versions":
                continue  # what an older torch lacks
            missing += [
                f"{name}.{member}"
                for member in vars(base)
                if is_private(member) and hasattr(theirs, member) and not member.startswith("_abc_")
                if not {f"{name}.{member}", f"{name}().{member}"} & listed
            ]
    assert not missing


def test_the_installed_torch_has_them() -> None:
    assert private_names.gone() == []


def test_what_has_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [
        PrivateName("torch._C._went_away", ("ddp/wrapper",), "a test"),
        PrivateName("torch.went.away", ("ddp/wrapper",), "a test"),
        PrivateName("torch.nn.parallel.DistributedDataParallel()._away", (), "a test"),
    ]
    known = [
        PrivateName("torch._C._not_yet", (), "a test", since="9.0"),
        PrivateName("torch._C._no_more", (), "a test", until="2.0"),
        PrivateName("torch.nn.parallel.DistributedDataParallel()._comm_hooks", (), "a test"),
    ]
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", wrong + known)
    assert private_names.gone() == wrong


def test_the_file_alone_says_what_has_gone() -> None:
    if MPI.COMM_WORLD.Get_rank() == 0:
        file = ROOT / "mpiddp" / "torch_internals" / "private_names.py"
        told = subprocess.run(
            [sys.executable, str(file)], capture_output=True, text=True, timeout=100, check=False
        )
        assert (told.returncode, told.stdout) == (0, "")
