"""benchmarks/trainers.py: one folder for both MPIs, all is compared, a failure ends no other."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.once]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("trainers", "measuring"):  # forgotten after the test
        monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module("trainers")


def test_one_that_fails_ends_no_other(
    trainers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, third = (program.name for program in trainers.PROGRAMS[:3])

    def compare(program, packages, rounds):
        if program.name in (first, third):
            raise trainers.Failed(f"code {len(program.name)}")
        return [{"case": program.name, "losses": [1.0, 0.5]}]

    written = tmp_path / "trainers.json"
    monkeypatch.setattr(trainers, "compare", compare)
    monkeypatch.setattr(trainers, "install", lambda folder: folder)
    monkeypatch.setattr(sys, "argv", ["trainers", "--json", str(written), first, second, third])
    with pytest.raises(SystemExit) as end:
        trainers.main()
    assert end.value.code == "\n".join(
        f"{name} failed: code {len(name)}" for name in (first, third)
    )
    assert f"{second}: losses [1.0, 0.5]" in capsys.readouterr().out
    [record] = json.loads(written.read_text("utf-8"))["trainers"]
    assert record["case"] == second


@pytest.mark.parametrize(
    ("different", "fails"),
    [
        ({"losses": [2.0, 1.00001]}, ""),
        ({"losses": [2.0, 1.001]}, "losses"),
        ({"losses": [2.0]}, "losses"),
        ({"losses": [2.0, float("nan")]}, "losses"),
        ({"sums": 3.1}, "sums"),
        ({"more": 1}, "more"),
        ({"wrapper": "mpiddp.ddp.wrapper", "times": [1.0, 3.0]}, ""),
    ],
)
def test_what_ranks_say_is_compared(
    trainers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    different: dict[str, object],
    fails: str,
) -> None:
    one = {"wrapper": "torch", "losses": [2.0, 1.0], "sums": 3.0, "times": [1.0, 2.0]}

    def run(program, packages, launched):
        return {("a", 0): one, ("a", 1): {**one, **(different if launched else {})}}

    monkeypatch.setattr(trainers, "run", run)
    if fails:
        with pytest.raises(trainers.Failed, match=f"'a', 1.* has {fails} .* here, .* on Gloo"):
            trainers.compare(trainers.PROGRAMS[0], tmp_path, 1)
    else:
        [record] = trainers.compare(trainers.PROGRAMS[0], tmp_path, 1)
        assert record["losses on Gloo"] == [2.0, 1.0]


def test_no_environment_decides_the_folder(
    trainers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def place() -> Path:
        folders = []

        def stop(command, **more):
            folders.append(command[-1])
            raise StopIteration

        monkeypatch.setattr(trainers.subprocess, "run", stop)
        with pytest.raises(StopIteration):
            trainers.install(tmp_path)
        return folders[0]

    here = place()
    assert here.parent == tmp_path
    monkeypatch.setattr(sys, "prefix", "/elsewhere")
    monkeypatch.setattr(sys, "executable", "/elsewhere/bin/python")
    assert place() == here


def test_torch_is_linked_with_what_it_needs_and_no_mpi(
    trainers: ModuleType, tmp_path: Path
) -> None:
    trainers.link("torch", tmp_path)
    linked = {path.name for path in tmp_path.iterdir()}
    assert linked >= {"torch", "sympy", "mpmath"}  # sympy needs mpmath
    assert not linked & {"mpi4py", "mpiddp", "numpy", "pytest"}
    assert (tmp_path / "torch" / "__init__.py").exists()
