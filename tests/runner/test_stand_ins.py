"""Scripts for packages that are not installed run as they are, on modules of mpiddp."""

import importlib
import importlib.util
import json
import os
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
    # A folder of tests has that name, too.
    monkeypatch.setattr(sys, "path", [one for one in sys.path if not Path(one, "horovod").is_dir()])
    stand_ins.install(0)
    stand_ins.install(0)
    assert sum(isinstance(one, stand_ins._Finder) for one in sys.meta_path) == 1
    yield
    packages = ("apex", "horovod", "whole")
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
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
    """They ask for the package, and then import other parts of it. Of Horovod all is there."""
    assert importlib.util.find_spec("apex") is None
    assert importlib.util.find_spec("apex.parallel") is not None
    for name in ("horovod", "horovod.common", "horovod.torch", "horovod.torch.elastic.state"):
        assert importlib.util.find_spec(name) is not None
    assert importlib.util.find_spec("horovod.tensorflow") is None


# What programs import of Horovod 0.28, by module.
NAMES = {
    "horovod": "run __version__",
    "horovod.common.elastic": "ObjectState State run_fn HorovodInternalError",
    "horovod.common.exceptions": """HorovodInternalError HostsUpdatedInterrupt
        HorovodVersionMismatchError""",
    "horovod.common.process_sets": """ProcessSet global_process_set add_process_set
        remove_process_set""",
    "horovod.common.util": """check_extension ccl_built ddl_built env extension_available
        gloo_built gpu_available is_iterable mpi_built nccl_built num_rank_is_power_2 split_list""",
    "horovod.runner": "run",
    "horovod.torch": """allreduce init mpi_ops compression functions optimizer elastic
        DistributedOptimizer SyncBatchNorm Compression""",
    "horovod.torch.compression": "Compression Compressor FP16Compressor NoneCompressor",
    "horovod.torch.elastic": "run TorchState ElasticSampler",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": "TorchState",
    "horovod.torch.functions": """allgather_object broadcast_object broadcast_optimizer_state
        broadcast_parameters""",
    "horovod.torch.mpi_ops": """allreduce_async_ grouped_allreduce_async_ sparse_allreduce_async
        synchronize poll join barrier rank size local_rank cross_size init shutdown nccl_built
        rocm_built Average Sum Adasum Min Max Product global_process_set HorovodInternalError
        Compression""",
    "horovod.torch.optimizer": """DistributedOptimizer _DistributedOptimizer
        _DistributedAdasumOptimizer""",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
}


@pytest.mark.once
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("module", NAMES)
def test_names_of_horovod(module: str) -> None:
    """Imported by themselves, and found from the package: `import horovod.torch as hvd`."""
    whole = importlib.import_module("horovod")
    for part in module.split(".")[1:]:
        whole = getattr(whole, part)
    found = importlib.import_module(module)
    for name in NAMES[module].split():
        assert getattr(found, name) is not None
        assert getattr(whole, name) is not None


@pytest.mark.once
@pytest.mark.usefixtures("installed")
def test_helpers_of_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    util = importlib.import_module("horovod.common.util")
    monkeypatch.setenv("GOES", "before")
    monkeypatch.delenv("COMES", raising=False)
    with util.env(COMES=1, GOES=None):
        assert os.environ["COMES"] == "1"
        assert "GOES" not in os.environ
    assert "COMES" not in os.environ
    assert os.environ["GOES"] == "before"
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert [util.is_iterable(one) for one in ("", [], 5, None)] == [True, True, False, False]
    assert util.mpi_built()
    assert not util.gloo_built()
    assert [n for n in range(1, 9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.extension_available("torch")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"and not for horovod\.tensorflow"):
        util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")


RUN = """
import json, sys
import horovod
import horovod.torch as hvd


def work(base, more):
    hvd.init()
    total = hvd.allreduce(base + more * hvd.rank(), op=hvd.Sum)
    if base.item() == 5:
        raise RuntimeError("five")
    return total.item(), hvd.rank()


import torch
asked = int(sys.argv[1])
results = horovod.run(work, (torch.tensor(10),), {"more": 2}, num_proc=asked)
assert not hvd.is_initialized()
try:
    failure = horovod.run(work, (torch.tensor(5),), {"more": 2}, num_proc=asked)
except RuntimeError as error:
    failure = str(error)
print(json.dumps({"rank": results[0][1], "results": results, "failure": failure}))
"""


@pytest.mark.thorough
@pytest.mark.once
def test_horovod_run_calls_the_ranks_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    done = launch(tmp_path / "run.py", "2")
    assert done.returncode == 0
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(told) == 2
    for one in told:
        assert one["results"] == [[22, 0], [22, 1]]
        assert "the function of horovod.run failed on rank 0" in one["failure"]
        assert "five" in one["failure"]
    refused = launch(tmp_path / "run.py", "3")
    assert refused.returncode != 0
    assert "horovod.run was asked for 3 processes, but MPI started 2" in refused.stderr


@pytest.mark.once
@pytest.mark.usefixtures("installed")
def test_horovod_run_without_the_runner() -> None:
    with pytest.raises(RuntimeError, match=r"without python -m mpiddp"):
        importlib.import_module("horovod").run(print)


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


@pytest.mark.thorough
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


@pytest.mark.once
@pytest.mark.usefixtures("installed")
def test_nothing_is_said_of_horovod_that_is_only_imported(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Libraries import it to see whether it is there. Said once by who begins it, see below."""
    for module in NAMES:
        importlib.import_module(module)
    assert capfd.readouterr().err == ""
    hvd = importlib.import_module("horovod.torch")
    assert hvd.init is importlib.import_module("horovod.torch.mpi_ops").init
