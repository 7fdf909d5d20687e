"""The tiers `essential` and `smoke`: every room is in both, and one is a part of the other."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
# A folder tests/apex would hide from scripts that they have no Apex.
ELSEWHERE = {"apex": "ddp/test_apex.py"}

pytestmark = pytest.mark.once


def marks_of(file: Path) -> Iterator[str]:
    """Yield the names of the marks in the decorators of a file, and in its pytestmark."""
    for node in ast.walk(ast.parse(file.read_text())):
        found: list[ast.expr] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found = node.decorator_list
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found = [node.value]
        for each in found:
            for part in ast.walk(each):
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "pytest.mark":
                    yield part.attr


def test_every_room_is_in_both() -> None:
    folders = {sign.parent.name for sign in (ROOT / "mpiddp").glob("*/__init__.py")}
    assert "ddp" in folders
    for room in sorted(folders):
        where = ROOT / "tests" / ELSEWHERE.get(room, room)
        files = [where] if where.is_file() else sorted(where.glob("test_*.py"))
        marks = {mark for file in files for mark in marks_of(file)}
        for tier in ("essential", "smoke"):
            assert tier in marks, f"no test of {where} is marked {tier}"


def test_what_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest, tiers\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    tiers.settle(items)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    essential\n    smoke\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "numbers = pytest.mark.parametrize('number', range(6))\n"
        "@pytest.mark.essential(keep=2)\n"
        "@pytest.mark.smoke(keep=3)\n"
        "@numbers\n"
        "def test_both(number): pass\n"
        "@pytest.mark.smoke\n"
        "@numbers\n"
        "class TestAll:\n"
        "    def test_one(self, number): pass\n"
        "def test_none(): pass\n"
    )

    def chosen(expression: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", expression]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.fspath(SUPPORT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        print(done.stdout, done.stderr)
        return [
            line.rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("test")
        ]

    whole = [f"test_one[{number}]" for number in range(6)]
    # Those that are `essential` by themselves, 0 and 3, and those that are since they are `smoke`.
    assert chosen("essential") == [*(f"test_both[{one}]" for one in (0, 2, 3, 4)), *whole]
    assert chosen("smoke") == [*(f"test_both[{one}]" for one in (0, 2, 4)), *whole]
    assert chosen("smoke and not essential") == []
