"""Each tensor that mpiddp makes names its device.

Else it is on the user's default device (`torch.set_default_device`, `with torch.device(...)`), and
MPI is given an address that no CPU can read.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKES = re.compile(
    r"\btorch\.(arange|empty|empty_strided|eye|full|linspace|ones|rand|randn|scalar_tensor|tensor|"
    r"zeros)\("
)
# What it makes when it is loaded is within `torch.device("cpu")`.
WITHIN = {"cython/torch_internals/tensors.pyx"}

pytestmark = pytest.mark.once


def without_device(source: str) -> list[str]:
    """Return the calls that make tensors on whatever device is the default."""
    found = []
    for call in MAKES.finditer(source):
        end, depth = call.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        if "device=" not in source[call.end() : end]:
            found.append(source[call.start() : end])
    return found


def test_every_device_is_named() -> None:
    files = [*ROOT.glob("mpiddp/**/*.py"), *ROOT.glob("cython/**/*.pyx")]
    names = {path.relative_to(ROOT).as_posix(): path for path in files}
    assert len(names) > 300
    found = {name: without_device(path.read_text()) for name, path in names.items()}
    assert {name: calls for name, calls in found.items() if calls and name not in WITHIN} == {}


def test_what_is_found() -> None:
    assert without_device("a = torch.ones(f(1), 2) + torch.zeros(3, device=where(1))") == [
        "torch.ones(f(1), 2)"
    ]
