"""Scripts for packages that are not installed run as they are, on modules of mpiddp."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_runs import SCRIPTS, by_rank, launch, start

import mpiddp.apex
from mpiddp.runner import stand_ins

pytestmark = pytest.mark.timeout(100)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins, as rank 0 of the runner has them, until the end of the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stand_ins.install(0)
    stand_ins.install(0)
    assert sum(isinstance(one, stand_ins._Finder) for one in sys.meta_path) == 1
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apex", "whole")]:
        del sys.modules[name]


@pytest.mark.essential
@pytest.mark.once
@pytest.mark.usefixtures("installed")
def test_what_is_imported(capfd: pytest.CaptureFixture[str]) -> None:
    apex = importlib.import_module("apex")
    assert capfd.readouterr().err == ""
    assert apex.parallel is importlib.import_module("apex.parallel")
    assert capfd.readouterr().err == (
        "mpiddp: there is no apex.parallel; mpiddp.apex stands in for it\n"
    )
    assert apex.parallel.DistributedDataParallel is mpiddp.apex.DistributedDataParallel
    assert sorted(apex.parallel.__all__) == sorted(mpiddp.apex.__all__)
    assert mpiddp.apex.__name__ == "mpiddp.apex"
    assert mpiddp.apex.__spec__.name == "mpiddp.apex"
    with pytest.raises(AttributeError, match="apex is not installed, and mpiddp stands in only"):
        _ = apex.amp
    with pytest.raises(ImportError, match="cannot import name 'amp' from 'apex'"):
        from apex import amp  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"apex\.parallel\.LARC"):
        importlib.import_module("apex.parallel.LARC")


@pytest.mark.once
@pytest.mark.usefixtures("installed")
def test_libraries_do_not_take_it_for_the_whole() -> None:
    """They ask for the package, and then import other parts of it."""
    assert importlib.util.find_spec("apex") is None
    assert importlib.util.find_spec("apex.parallel") is not None


@pytest.mark.once
@pytest.mark.usefixtures("installed")
def test_what_is_installed_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a part that it lacks, as Apex does since 2025, is still stood in for."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("amp = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("apex").amp == 5
    assert importlib.import_module("apex.parallel").Reducer is mpiddp.apex.Reducer
    del sys.modules["apex.parallel"]
    (tmp_path / "apex" / "parallel.py").write_text("Reducer = 6\n")
    importlib.invalidate_caches()
    assert importlib.import_module("apex.parallel").Reducer == 6


@pytest.mark.once
@pytest.mark.usefixtures("installed")
def test_packages_within_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in may have parts that are stand-ins."""
    table = {"whole": "", "whole.part": "mpiddp.apex", "whole.part.deeper": "mpiddp.compression"}
    monkeypatch.setattr(stand_ins, "STAND_INS", table)
    deeper = importlib.import_module("whole.part.deeper")
    assert sys.modules["whole.part"].deeper is deeper
    assert importlib.import_module("whole").part.SyncBatchNorm is mpiddp.apex.SyncBatchNorm


@pytest.mark.once
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_same_losses_with_apex(ranks: int) -> None:
    """As in one process on the whole batch, since the layers' statistics are those of all."""
    done = launch(SCRIPTS / "apex_trainer.py", ranks=ranks)
    assert done.returncode == 0
    assert done.stderr.count("mpiddp.apex stands in") == 1
    trained = by_rank(done.stdout)
    assert sorted(trained) == list(range(ranks))
    alone = start("-m", "mpiddp", SCRIPTS / "apex_trainer.py")
    expected = json.loads(alone.stdout)
    for mine in trained.values():
        assert mine["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert mine["sum"] == pytest.approx(expected["sum"], rel=1e-4)
