# Step 6: particular edits. Runs inside restructure.py.
CH = r"\nif TYPE_CHECKING:\n"
# collectives work on a protocol of the group
for n in ("reductions", "movement", "point_to_point"):
    p = f"mpiddp/collectives/{n}.py"
    sub(p, r"^    from mpiddp\.process_group\.group import ProcessGroup\n", "")
    sub(p, r"^    from mpiddp\.process_group\.work import Operation\n", "    from mpiddp.collectives.operation import Group, Operation\n")
    sub(p, r"\bProcessGroup\b", "Group")
# the record of an operation lies with them
sub("mpiddp/process_group/work.py", r'^Operation = Generator\[.*\]\n\n', "")
for p in under("mpiddp", suffixes={".py"}):
    t = read(p)
    t2 = re.sub(r"^(\s*)from mpiddp\.process_group\.work import ([^(\n]*)\n", lambda m: "".join(
        ([f"{m[1]}from mpiddp.process_group.work import {', '.join(x for x in m[2].split(', ') if x != 'Operation')}\n"] if m[2] != "Operation" else []) +
        ([f"{m[1]}from mpiddp.collectives.operation import Operation\n"] if "Operation" in m[2].split(", ") else [])), t, flags=re.M)
    if t2 != t: write(p, t2)
sub("mpiddp/process_group/work.py", r"^if TYPE_CHECKING:\n", "if TYPE_CHECKING:\n    from mpiddp.collectives.operation import Operation\n")
# the parts of a group know what they need of it
for n in ("work", "call_check", "roll_call", "gpu_tensors", "monitored_barrier", "state_broadcast"):
    p = f"mpiddp/process_group/{n}.py"
    sub(p, r"^    from mpiddp\.process_group\.(operation_runner|group) import (OperationRunner|ProcessGroup)\n", "    from mpiddp.process_group.interface import RunningGroup\n")
    sub(p, r"(?<!`)\b(OperationRunner|ProcessGroup)\b(?!`)", "RunningGroup")
sub("mpiddp/process_group/work.py", r"`RunningGroup`", "`ProcessGroup`", optional=True)
# the pool of channels
p = "mpiddp/transports/channel_pool.py"
sub(p, r"^    from mpiddp\.process_group\.group import ProcessGroup\n", "")
sub(p, r"^class ChannelPool:", '''class Owner(Protocol):
    """What the pool needs of the process group that it belongs to."""

    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def engine(self) -> Engine:
        """The process's progress engine."""

    @property
    def communicator(self) -> MPI.Intracomm:
        """Of the group's ranks."""

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> object:
        """Reduce tensors over all ranks. Collective."""


class ChannelPool:''')
sub(p, r"group: ProcessGroup\b", "group: Owner")
sub(p, r"^from typing import TYPE_CHECKING$", "from typing import TYPE_CHECKING, Protocol")
sub(p, r"^    from mpiddp\.engine\.engine import Channel$", "    from mpiddp.engine.engine import Channel, Engine")
sub(p, r'^"""The engine\'s \w+ for', '"""The engine\'s channels for')
# types that pointed upwards
for n in ("python_hook", "mixed_precision"):
    p = f"mpiddp/ddp/{n}.py"
    sub(p, r"^    from mpiddp\.ddp\.torch_reducer import TorchReducer\n", "    from mpiddp.reducer.state import ReducerState\n")
    sub(p, r"\bTorchReducer\b", "ReducerState")
p = "mpiddp/ddp/logger.py"
sub(p, r"^from mpiddp\.ddp\.torch_reducer import TorchReducer\n", "from mpiddp.reducer.reducer import Reducer\n")
sub(p, r"\bTorchReducer\b", "Reducer")
p = "mpiddp/reducer/sparse.py"
sub(p, r"from mpiddp\.ddp\.torch_reducer import ReducerState|from mpiddp\.reducer\.reducer import ReducerState", "from mpiddp.reducer.state import ReducerState", optional=True)
# ranks_of_node is patched where it is looked up
# the runner
p = "mpiddp/runner/command.py"
sub(p, r'\n\nif __name__ == "__main__":\n    sys\.exit\(main\(\)\)\n', "")
write(p, read(p).rstrip("\n") + "\n")
p = "mpiddp/runner/program.py"
sub(p, r'^_OWN_FILES = .*\n', '''_HERE = os.path.dirname(__file__)
_OWN_FILES = (
    __file__,
    os.path.join(_HERE, "command.py"),
    os.path.join(os.path.dirname(_HERE), "__main__.py"),
)
''')
# the face
p = "mpiddp/__init__.py"
t = read(p)
t = re.sub(r"^(init_by_name|monitored_barrier|split_group|patches)\.install\(\)\n", "", t, flags=re.M)
t = re.sub(r"^from mpiddp[^\n]* import ((init_by_name|monitored_barrier|split_group)(, )?)+(  # noqa: E402)?\n", "", t, flags=re.M)
t = re.sub(r"^from mpiddp\.(rendezvous|process_group) import .*\n", "", t, flags=re.M)
t = t.replace("from mpiddp import compression  # noqa: E402\n", "from mpiddp import compression  # noqa: E402\n", 1)
t = re.sub(r"^(_Backend\.register_backend\(.*\)\n)", r"\1_patches.install()\n", t, flags=re.M)
t = t.replace("from mpiddp.ddp.wrapper import", "from mpiddp.rendezvous import patches as _patches  # noqa: E402\nfrom mpiddp.ddp.wrapper import", 1)
write(p, t)
# build
p = "pyproject.toml"
sub(p, r'module = \["mpiddp\.process_group(\.group)?"\]', 'module = ["mpiddp.process_group.group"]')
sub(p, r'module = \["mpiddp\.distributed"\]', 'module = ["mpiddp.ddp.wrapper", "mpiddp.ddp.uneven_inputs", "mpiddp.ddp.hook_registration"]')
p = "Makefile"
sub(p, r"^\t\$\(wildcard cython/\*\.pyx.*\)$", "\t$(shell find cython mpiddp -type d -not -name __pycache__) \\\n\t$(shell find cython mpiddp -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.h' -o -name py.typed)")
sub(p, r"^SOURCES := setup\.py pyproject\.toml cython mpiddp \\", "SOURCES := setup.py pyproject.toml \\\\")
sub(p, r"^\t@rm -rf build/mypy && mkdir.*\n\t@ln -s .*\n", "\t@rm -rf build/mypy && mkdir -p build/mypy\n\t@cp -rs $(CURDIR)/mpiddp build/mypy/\n\t@cd cython && find . -name '*.pyi' -exec ln -s $(CURDIR)/cython/{} $(CURDIR)/build/mypy/mpiddp/{} \\;\n")
sub(p, r"\$\(BIN\)/mypy --follow-imports=silent", "MYPYPATH=tests/support $(BIN)/mypy --follow-imports=silent")
sub(p, r" tests/\.hypothesis", " tests/support/.hypothesis", optional=True)
sub("MANIFEST.in", r"^exclude cython/\*\.c", "global-exclude cython/*.c\nrecursive-exclude cython *.c")
sub("MANIFEST.in", r"^global-exclude cython/\*\.c\n", "", optional=True)
sub(".gitignore", r"^cython/\*\.c$", "cython/**/*.c")
# tests
for p in under("tests", suffixes={".py"}):
    if Path(p).parts[1] in ("support", "conftest.py"): continue
    sub(p, r"Path\(__file__\)(\.resolve\(\))?\.parents\[1\]", r"Path(__file__)\1.parents[2]", optional=True)
    sub(p, r'Path\(__file__\)\.parent / "scripts"', 'Path(__file__).parents[1] / "support" / "scripts"', optional=True)
    sub(p, r'"PYTHONPATH": str\(Path\(__file__\)\.parent\)', '"PYTHONPATH": str(Path(__file__).parents[1] / "support")', optional=True)
sub("tests/support/simulated_gpu/__init__.py", r'parents\[2\] / "build"', 'parents[3] / "build"')
sub("tests/system/test_kernel_machines.py", r'/ "cython"$', '/ "cython" / "system"')
sub("benchmarks/gpu.py", r'parents\[1\] / "tests"\)', 'parents[1] / "tests" / "support")')
sub("benchmarks/run.py", r'HERE\.parent / "tests"\)', 'HERE.parent / "tests" / "support")')
p = "tests/support/launch.py"
sub(p, r"^TESTS = .*$", "SUPPORT = Path(__file__).resolve().parent\nTESTS = SUPPORT.parent")
sub(p, r"cwd=TESTS,", "cwd=SUPPORT,")
sub(p, r"# pytest runs in tests/, where", "# pytest runs in tests/support/, where")
t = read("tests/conftest.py")
if "support" not in t:
    t = t.replace("import os\nimport re\n", "import os\nimport re\nimport sys\n", 1)
    t = re.sub(r"^(from datetime import timedelta\n)", r"\1from pathlib import Path\n", t, count=1, flags=re.M)
    t = re.sub(r"^# How long a collective waits", "# What tests import besides mpiddp; launch.py starts pytest there.\nif (support := str(Path(__file__).parent / \"support\")) not in sys.path:\n    sys.path.insert(0, support)\n\n# How long a collective waits", t, count=1, flags=re.M)
    write("tests/conftest.py", t)
p = "tests/support/staged_channels.py"
p = "tests/project/test_launch.py"
sub(p, r"Path\(launch\.__file__\)\.parents\[1\]", "launch.TESTS.parent")
exec(read(HERE / "setup_edits.py"))

# nodes are looked up where tests can simulate them
for n in ("choice", "gpu_choice"):
    p = f"mpiddp/transports/{n}.py"
    sub(p, r"^    from mpiddp\.(transports|mpi) import (choice|transport|nodes).*\n", "", optional=True)
    sub(p, r"(?<![\w.`\"])(?:choice\.|transport_choice\.|nodes\.)?ranks_of_node\(", "nodes.ranks_of_node(")
    sub(p, r"^from mpiddp\.mpi\.nodes import ranks_of_node\n", "", optional=True)
    sub(p, r"^import torch\n\n", "import torch\n\nfrom mpiddp.mpi import nodes\n", 1)
p = "tests/rendezvous/test_rendezvous.py"
t = read(p)
def split_imports(m):
    out = []
    for x in m[2].split(", "): out.append(f"{m[1]}import {x.strip()}")
    return "\n".join(out)
write(p, re.sub(r"^( +)import (mpiddp\.[\w.]+(?:, mpiddp\.[\w.]+)+)$", split_imports, t, flags=re.M))

sub("mpiddp/process_group/state_broadcast.py", r"\bRunningGroup\b", "StateGroup")
sub("mpiddp/ddp/wrapper.py", r"^    reducer: TorchReducer  # type: ignore.*\n", "")
# Cython imports that only one half of a split file needs
def drop(path, *lines):
    for l in lines: sub(path, rf"^{re.escape(l)}\n", "", 1)
drop("cython/reducer/state.pyx", "import weakref")
drop("cython/transports/gpu_staged_memory.pyx", "import weakref", "import torch")
drop("cython/transports/gpu_staging.pyx", "import mmap", "cimport cython")
sub("cython/transports/gpu_staging.pyx", r"^from libc\.stdlib cimport calloc, free\n", "")

# code lines of Cython that renames made too long
p = "cython/reducer/reducer.pyx"
sub(p, r"^        if not has_gradient\(parameter\) or \(self\.grads_before and self\._is_old\(index, parameter\.grad\)\):", "        if not has_gradient(parameter) or (\n            self.grads_before and self._is_old(index, parameter.grad)\n        ):", optional=True)
sub(p, r"^                    self\.mark_ready\(index, self\.parameters\[index\], self\.parameters\[index\]\.grad, False\)", "                    parameter = self.parameters[index]\n                    self.mark_ready(index, parameter, parameter.grad, False)", optional=True)

# errors of the reducer know of it what they tell
p = "mpiddp/reducer/errors.py"
t = read(p)
if "ReducerState" in t:
    t = re.sub(r"^    from mpiddp\.reducer\.(reducer|state) import ReducerState\n", "", t, flags=re.M)
    t = t.replace("ReducerState", "OwnerOfGradients")
    t = t.replace("\n\ndef ", '''

class OwnerOfGradients(Protocol):
    """What errors tell of a reducer."""

    @property
    def expecting(self) -> bool:
        """Whether a forward asked for gradients to be reduced."""

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Whether each gradient is a view into its bucket."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters, by index."""

    @property
    def describe_parameter(self) -> Callable[[int], str]:
        """Returns the name of a parameter."""


def ''', 1)
    t = re.sub(r"^from typing import ([^\n]*)$", r"from typing import \1, Protocol", t, count=1, flags=re.M)
    write(p, t)
# until settings.py declares it, the variable that two rooms read is a leaf
if not Path("mpiddp/settings.py").exists():
    write("mpiddp/settings.py", '"""Environment variables that several rooms read."""\n\n# 0: progress is made from autograd\'s hooks alone. 1: by a thread. Unset: by a thread where\n# messages need it or cores are left over.\nPROGRESS_THREAD_VARIABLE = "MPIDDP_PROGRESS_THREAD"\n')
    sub("mpiddp/transports/choice.py", r"(^#[^\n]*\n)*^PROGRESS_THREAD_VARIABLE = .*\n\n", "")
    sub("mpiddp/transports/choice.py", r"^from mpiddp\.mpi import nodes\n", "from mpiddp.mpi import nodes\nfrom mpiddp.settings import PROGRESS_THREAD_VARIABLE\n")
    for q in under("mpiddp", "tests", suffixes={".py"}):
        sub(q, r"from mpiddp\.transports\.choice import PROGRESS_THREAD_VARIABLE", "from mpiddp.settings import PROGRESS_THREAD_VARIABLE", optional=True)

# one line for each new transport, collective and diagnosis
p = "mpiddp/transports/choice.py"
t = read(p)
m = re.search(r'(?:^#[^\n]*\n)*^TRANSPORTS = \("auto", "shared", "mpi"\)\n', t, re.M)
if not m: fail(f"{p}: no TRANSPORTS")
else:
    t = t.replace(m[0], "", 1)
    makers = '''

def _make_iallreduce(communicator: MPI.Comm, node_count: int) -> IallreduceTransport:
    window, chunk_bytes = chunks_in_flight(node_count)
    return IallreduceTransport(communicator, chunk_bytes=chunk_bytes, window=window)


# The transports that treat all ranks of a communicator alike, by name, and what makes one of the
# communicator and the number of its nodes. A new transport has its line here.
MAKERS: dict[str, Callable[[MPI.Comm, int], HostTransport]] = {
    "mpi": _make_iallreduce,
}

''' + re.sub(r'^TRANSPORTS = .*$', 'TRANSPORTS: tuple[str, ...] = ("auto", "shared", *MAKERS)', m[0], flags=re.M)
    fn = re.search(r"^def chunks_in_flight\((?:.|\n)*?(?=\n\n\n)", t, re.M)
    if not fn: fail(f"{p}: no chunks_in_flight")
    else: t = t.replace(fn[0], fn[0] + makers.rstrip("\n"), 1)
    t, n = re.subn(r"        window, chunk_bytes = chunks_in_flight\((sum\([^\n]*\))\)\n        transport = IallreduceTransport\(communicator, chunk_bytes=chunk_bytes, window=window\)\n",
        r"        make = MAKERS.get(name, _make_iallreduce)\n        transport = make(communicator, \1)\n", t)
    if n != 1: fail(f"{p}: send_only is another")
    t, n = re.subn(r'    if name == "mpi" or \(name == "auto"', '    if name in MAKERS or (name == "auto"', t)
    if n != 1: fail(f"{p}: the choice of mpi is another")
    t = t.replace("if TYPE_CHECKING:\n    from collections.abc import Sequence\n", "if TYPE_CHECKING:\n    from collections.abc import Callable, Sequence\n", 1)
    t = re.sub(r"^from typing import ([^\n]*)$", r"from typing import \1, Protocol", t, count=1, flags=re.M)
    t = t.replace("\n\ndef requested_transport(", '''

class HostTransport(Protocol):
    """What the engine needs of a transport for buckets in the host's memory."""

    @property
    def address(self) -> int:
        """Where the engine finds the C ``Transport``, see engine/interface.pxd."""

    def allocate(self, sizes: Sequence[int]) -> list[BucketMemory]:
        """Return memory for buckets of these sizes in bytes. Collective."""

    def free(self) -> None:
        """Free what was made of the communicator. Collective."""


def requested_transport(''', 1)
    t = re.sub(r"^from mpiddp\.engine\.memory import GpuMemory$", "from mpiddp.engine.memory import BucketMemory, GpuMemory", t, flags=re.M)
    write(p, t)
p = "mpiddp/process_group/gpu_tensors.py"
sub(p, r"^    return _USES\[function\]$", "    return _USES.get(function) or (_BOTH,) * len(arguments)", 1)
sub(p, r"^# By argument, the group left out\. Those of a root are in `_uses`\.$", "# By argument, the group left out. Those of a root are in `_uses`; of others all are copied both ways.", 1)
p = "mpiddp/doctor.py"
sub(p, r'''^    vendor, version = compiled_against\(\)
    world = MPI\.COMM_WORLD
    lines = \[
((?:.|\n)*?)        _ranks\(world\),
    \]
    lines \+= _shared_memory\(world\)
    lines \+= _gpu\(world\)
    return lines
''', r'''    world = MPI.COMM_WORLD
    return [line for part in REPORTS for line in part(world)]


def _software(world: MPI.Comm) -> list[str]:
    vendor, version = compiled_against()
    return [
\1    ]
''', 1)
sub(p, r"^def _ranks\(world: MPI\.Comm\) -> str:", "def _ranks(world: MPI.Comm) -> list[str]:", 1)
sub(p, r'''^    return \(
        f"ranks: ((?:.|\n)*?)
    \)
''', r'''    return [
        f"ranks: \1
    ]
''', 1)
sub(p, r'^if __name__ == "__main__":', '''# The parts of the report, in order: each says something on every rank, and rank 0 prints it. A new
# diagnosis has its line here.
REPORTS: list[Callable[[MPI.Comm], list[str]]] = [
    _software,
    _ranks,
    _shared_memory,
    _gpu,
]

if __name__ == "__main__":''', 1)
sub(p, r"^from collections\.abc import Sequence$", "from collections.abc import Callable, Sequence", 1)
p = "CONTRIBUTING.md"
t = read(p)
if "## Where things are" not in t:
    t = t.replace("## Tests\n", read(HERE / "contributing.md") + "## Tests\n", 1)
t = re.sub(r"- `mpiddp/` is what users import, `cython/` the compiled part\. Each compiled module has a `\.pyx`,\n  a `\.pxd` and a `\.pyi`\. `cython/` never gets an `__init__\.py`: it would hide the package cython\.",
  "- Each compiled module has a `.pyx`, a `.pxd` and a `.pyi`. `cython/` and its rooms never get an\n  `__init__.py`: it would hide the package cython.\n- No file of `mpiddp/` and `cython/` has more than 500 lines.", t)
t = t.replace("- The tests run with `tests/` as the working directory:", "- The tests run with `tests/support/` as the working directory:")
write(p, t)
p = "MANIFEST.in"
if "docs" not in read(p): write(p, read(p).replace("graft cython\n", "graft cython\ngraft docs\n"))

# the package is built and installed by rooms
p = "tests/project/test_packaging.py"
sub(p, r'^MODULES = .*$', 'MODULES = sorted(f"{path.parent.name}.{path.stem}" for path in ROOT.glob("cython/*/*.pyx"))')
sub(p, r'^    return \{path\.name for pattern in patterns for path in folder\.glob\(pattern\)\}', '    return {str(path.relative_to(folder)) for pattern in patterns for path in folder.glob(pattern)}')
sub(p, r'\{"bucket", "engine", "reducer"\} <= set\(MODULES\)', '{"engine.engine", "reducer.bucket", "reducer.reducer"} <= set(MODULES)')
sub(p, r'^        # \w+\.pxd only declares(?:.|\n)*?^        without_code = .*\n', '''        # posix.pxd only declares what the C library has, interface.pxd what modules share, and
        # waiting.pxd is all inline.
        without_code = ["engine.interface", "system.posix", "system.waiting"]
        paths = {name: name.replace(".", "/") for name in [*MODULES, *without_code]}
''')
sub(p, r'names\(folder, "\*\.pxd"\) == \{f"\{name\}\.pxd" for name in \[\*MODULES, \*without_code\]\}', 'names(folder, "*/*.pxd") == {f"{path}.pxd" for path in paths.values()}')
sub(p, r'names\(folder, "\*\.pyi"\) == \{f"\{name\}\.pyi" for name in MODULES\}', 'names(folder, "*/*.pyi") == {f"{paths[name]}.pyi" for name in MODULES}')
sub(p, r'names\(ROOT / "mpiddp", "\*\.py", "py\.typed"\)', 'names(ROOT / "mpiddp", "*.py", "*/*.py", "py.typed")')
sub(p, r'names\(ROOT / "cython", "\*\.pxd", "\*\.pyi"\)', 'names(ROOT / "cython", "*/*.pxd", "*/*.pyi")')
sub(p, r'names\(package, "\*\.so"\)', 'names(package, "*.so", "*/*.so")')
sub(p, r'names\(package, "\*\.py", "py\.typed"\)', 'names(package, "*.py", "*/*.py", "py.typed")')
sub(p, r'names\(package, "\*\.pxd", "\*\.pyi"\)', 'names(package, "*/*.pxd", "*/*.pyi")')
sub(p, r'sorted\(name\.partition\("\."\)\[0\] for name in compiled\)', 'sorted(name.partition(".")[0].replace("/", ".") for name in compiled)')
sub(p, r'others = names\(package, "\*"\) - python - interfaces - compiled - \{"__pycache__"\}\n    assert others == set\(\)', '''others = names(package, "*", "*/*") - python - interfaces - compiled
    assert {name for name in others if "__pycache__" not in name and "." in name} == set()''')
sub(p, r'"cython": \("\*\.pyx", "\*\.pxd", "\*\.pyi", "\*\.h"\)', '"cython": ("*/*.pyx", "*/*.pxd", "*/*.pyi", "*/*.h")')
sub(p, r'"mpiddp": \("\*\.py", "py\.typed"\)', '"mpiddp": ("*.py", "*/*.py", "py.typed")')
sub(p, r'"tests": \("\*\.py",\)', '"tests": ("*.py", "*/*.py")')
sub(p, r'name = module\.__name__\.rpartition\("\."\)\[2\]\n', '_, room, name = module.__name__.split(".")\n')
sub(p, r'ROOT / "cython" / f"\{name\}\.pyi"', 'ROOT / "cython" / room / f"{name}.pyi"')

p = "CHANGELOG.md"
t = read(p)
line = """- The source lies in rooms, sub-packages that import downwards only (docs/explanation/rooms.md).
"""
if line not in t: write(p, t.replace("### Added\n\n", "### Added\n\n" + line, 1))
for p in under("tests", suffixes={".py"}):
    t = read(p)
    name = "mpi_nodes" if "nodes" in stored_names(t) else "nodes"
    t2 = re.sub(r'(setattr\(\s*)\w+(, "ranks_of_node")', rf"\1{name}\2", t)
    imported = "nodes" if name == "nodes" else "nodes as mpi_nodes"
    if t2 != t or (name == "mpi_nodes" and "mpi_nodes" in t2): write(p, re.sub(r"^(?=from mpiddp)", f"from mpiddp.mpi import {imported}\n", t2, count=1, flags=re.M))
