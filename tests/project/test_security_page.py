"""The page on security names whatever can be reached, read or run: a new place needs a row there.

Each table below says in which files such calls stand, and which words of the page tell of it.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import DOCS, ROOT

from mpiddp.settings import SETTINGS

pytestmark = pytest.mark.once

PAGE = " ".join((DOCS / "reference" / "security.md").read_text(encoding="utf-8").split())

# What is called, as it stands in the source.
KINDS = {
    "sockets": r"socket\.socket|socketpair|create_server|create_connection|fromfd|listen",
    "memory": r"memfd_create|memory_files\.create|shm_open|SharedMemory|mmap\.mmap|mmap",
    "processes": r"read_process|write_process",
    "files": (
        r"mkdir|makedirs|mkdtemp|mkstemp|mkfifo|\w*Temporary\w*|touch|write_text|write_bytes|"
        r"symlink_to|os\.symlink|os\.link|os\.replace|torch\.save|open\(to write\)"
    ),
    "programs": r"subprocess\.\w+|os\.(exec|spawn|posix_spawn|fork)\w*|os\.(system|popen)|Spawn\w*",
    "code": (
        r"(?<!\.)(exec|eval|compile)|import_module|__import__|exec_module|CDLL|dlopen|runpy\.\w+"
    ),
    "pickles": r"pickle\.loads?|marshal\.loads?|torch\.load|cloudpickle\.loads?|\w*Unpickler",
}

NO_PORT = "have no name"
SIGN = "a rank's sign"
SHARED = "memory that ranks share"
CHECKPOINTS = "checkpoints, where you say"
SNAPSHOTS = "[snapshots](../how-to/checkpoint.md)"
LIBRARIES = "| libraries |"
MODULES = "| modules |"

PLACES = {
    "sockets": {
        "mpiddp/mpi/addresses.py": "a node listens at one address",  # it asks, and opens nothing
        "mpiddp/rendezvous/meeting.py": "the port of [`elastic.admit`]",
        "mpiddp/rendezvous/store.py": "the store of `torch.distributed`",
        "mpiddp/rendezvous/store_client.py": "the store of `torch.distributed`",
        "mpiddp/runner/agent_store.py": "the store of torchrun's agent",
        "mpiddp/runner/output.py": NO_PORT,
        "mpiddp/runner/torchrun.py": "`MASTER_ADDR` and `MASTER_PORT`",
        "mpiddp/system/listening.py": "a node listens at one address",
        "mpiddp/watch/ring_connections.py": "the [heartbeat's]",
        "cython/engine/progress.pyx": "",  # it sleeps until a message comes
        "cython/system/sockets.pyx": "",
    },
    "memory": {
        "mpiddp/rendezvous/launched_here.py": SIGN,
        "mpiddp/system/memory_files.py": SHARED,
        "mpiddp/system/rank_signs.py": SIGN,
        "mpiddp/top/finding.py": "with the page that [`mpiddp.top`]",
        "mpiddp/watch/dead_peers.py": "the bell of a node",
        "mpiddp/watch/node_states.py": SHARED,
        "cython/engine/memory.pyx": SHARED,
        "cython/flight_recorder/page.pyx": SHARED,
        "cython/system/helpers.pyx": SHARED,
        "cython/transports/shared_memory.pyx": SHARED,
    },
    "processes": {
        "cython/collectives/direct_jobs.pyx": "a rank's tensors, during a large collective",
    },
    "files": {
        "mpiddp/checkpoint/claims.py": SNAPSHOTS,
        "mpiddp/checkpoint/folders.py": CHECKPOINTS,
        "mpiddp/checkpoint/node_copies.py": SNAPSHOTS,
        "mpiddp/checkpoint/saving.py": CHECKPOINTS,
        "mpiddp/checkpoint/shard_files.py": CHECKPOINTS,
        "mpiddp/checkpoint/shard_snapshots.py": SNAPSHOTS,
        "mpiddp/checkpoint/shared_folders.py": CHECKPOINTS,
        "mpiddp/checkpoint/writer_lock.py": "the `.lock` of who writes there",
        "mpiddp/flight_recorder/files.py": "records of the flight recorder",
        "mpiddp/horovod/timeline.py": "`HOROVOD_TIMELINE`, where you say",
        "mpiddp/mpi/abort.py": "",  # /dev/null
        "mpiddp/mpi/first_words.py": "the bell of a node",
        "mpiddp/private_folder.py": "must be the user's own",
        "mpiddp/rendezvous/meeting.py": "`mpiddp-job.json` of `elastic.admit`",
        "mpiddp/runner/command.py": "the runner's `--log-dir`",
        "mpiddp/runner/output.py": "the runner's `--log-dir`",
        "mpiddp/runner/output_relay.py": "the runner's `--log-dir`",
        "mpiddp/top/__main__.py": "",  # /dev/null
        "mpiddp/tracing/rank_file.py": "in the folder that you name",
        "mpiddp/transports/gpu_trial.py": "what the trial of a GPU prints",
        "mpiddp/watch/node_ends.py": "the bell of a node",
    },
    "programs": {
        "mpiddp/diagnosis/launching.py": "| the doctor |",
        "mpiddp/diagnosis/starting.py": "| the doctor |",
        "mpiddp/preemption/slurm.py": "`scontrol`",
        "mpiddp/rendezvous/joining.py": "ranks that come by `elastic.grow`",
        "mpiddp/runner/output.py": "the relay of `--tag-output`",
        "mpiddp/transports/gpu_trial.py": "the trial of GPU memory",
        "mpiddp_command.py": "`mpiddp launch`",
    },
    "code": {
        "mpiddp/__init__.py": MODULES,
        "mpiddp/data_parallel/by_value.py": MODULES,
        "mpiddp/data_parallel/module_state.py": LIBRARIES,
        "mpiddp/diagnosis/launching.py": LIBRARIES,
        "mpiddp/mpi/compatibility.py": LIBRARIES,
        "mpiddp/mpi/losses.py": LIBRARIES,
        "mpiddp/runner/output.py": LIBRARIES,
        "mpiddp/runner/program.py": "| your script |",
        "mpiddp/runner/stand_ins.py": MODULES,
        "mpiddp/source_folder.py": MODULES,
        "mpiddp/system/cores.py": LIBRARIES,
        "mpiddp/system/freed_memory.py": LIBRARIES,
        "mpiddp/torch_internals/compiler_loading.py": MODULES,
        "mpiddp/torch_internals/patching.py": MODULES,
        "mpiddp/torch_internals/private_names.py": MODULES,
        "mpiddp/transports/gpu_support.py": LIBRARIES,
        "cython/gpu/blas.pyx": LIBRARIES,
        "cython/gpu/runtime.pyx": LIBRARIES,
        "cython/mpi/calls.pyx": LIBRARIES,
        "cython/torch_internals/tensors.pyx": LIBRARIES,
    },
    "pickles": {
        "mpiddp/checkpoint/ranks.py": "| checkpoints and snapshots |",
        "mpiddp/checkpoint/shard_files.py": "the list of a sharded one's parts",
        "mpiddp/data_parallel/by_value.py": "functions by value (`marshal`, too)",
        "mpiddp/data_parallel/channel.py": "`mpiddp.DataParallel`",
        "mpiddp/data_parallel/pickling.py": "`mpiddp.DataParallel`",
        "mpiddp/elastic/random_states.py": "random states of `elastic`",
        "mpiddp/flight_recorder/analysis.py": "takes numbers, texts, lists and dictionaries only",
        "mpiddp/horovod/broadcast_state.py": "Horovod's objects and optimizer states",
        "mpiddp/horovod/objects.py": "Horovod's objects and optimizer states",
        "mpiddp/process_group/group.py": "`all_gather_object`",
        "mpiddp/runner/started_ranks.py": "arguments and results of launched functions",
    },
}

# A source whose variables are only compared, counted or shown. All others stand on the page.
NUMBERS_AND_WORDS = re.compile(
    r"(FI_PROVIDER|HOROVOD_FUSION_THRESHOLD|LOCAL_RANK|OMPI_APP_CTX_NUM_PROCS|OMPI_MCA_\w+|"
    r"OMP_NUM_THREADS|PMIX?_\w+|RANK|WORLD_SIZE|SLURM_\w+|TORCHELASTIC_USE_AGENT_STORE|TORCH_DIST_\w+|TORCH_FR_BUFFER_SIZE)"
)


def sources() -> Iterator[Path]:
    yield ROOT / "mpiddp_command.py"
    yield from sorted((ROOT / "mpiddp").rglob("*.py"))
    yield from sorted((ROOT / "cython").rglob("*.pyx"))


@functools.cache
def calls(path: Path) -> frozenset[str]:
    """Return what a source calls or derives from."""
    return frozenset(_calls(path))


def _calls(path: Path) -> Iterator[str]:
    if path.suffix == ".pyx":  # which is not Python
        text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
        yield from re.findall(r"(?<!def )\b([A-Za-z_][\w.]*)(?=\()", text)
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield from map(ast.unparse, node.bases)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            writes = r"O_(CREAT|WRONLY|RDWR)|_FILE_FLAGS|, '[rb]?[wax+][b+]*'"
            if name.rpartition(".")[2] == "open" and re.search(writes, ast.unparse(node)):
                name = "open(to write)"
            yield name


def found(kind: str) -> set[str]:
    pattern = re.compile(rf"(.*\.)?({KINDS[kind]})")
    return {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(pattern.fullmatch(name) for name in calls(path))
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_place_has_a_row(kind: str) -> None:
    told = "say on docs/reference/security.md what it opens or runs, and name the place here"
    assert found(kind) - PLACES[kind].keys() == set(), told
    assert PLACES[kind].keys() - found(kind) == set(), "there is no such call any more"
    for file, words in PLACES[kind].items():
        assert words in PAGE, f"{file}: the page has no {words!r}"


def variables(path: Path) -> Iterator[str]:
    """Return the variables that a source reads by their names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Call):
            if re.search(r"environ\.\w+$|getenv$", ast.unparse(node.func)) and node.args:
                key = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            key = node.slice
        name = named.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", None)
        if isinstance(name, str):
            yield name


def test_each_variable_is_harmless_or_named() -> None:
    read = {name for path in sources() if path.suffix == ".py" for name in variables(path)}
    assert len(read) > 20
    strange = {name for name in read if not NUMBERS_AND_WORDS.fullmatch(name)}
    assert {"PATH", "XDG_CACHE_HOME", "HOROVOD_TIMELINE"} <= strange
    assert {name for name in strange if f"`{name}`" not in PAGE} == set()


def test_no_variable_of_its_own_names_a_file() -> None:
    """But for the folders of a job that lets others in, and of traces, which the page names."""
    ours = {setting.name for setting in SETTINGS if re.search("file|folder|path", setting.type)}
    assert ours == {"MPIDDP_JOIN", "MPIDDP_TRACE"}
    assert all(f"`{name}`" in PAGE for name in ours)


def test_each_exception_of_the_linter_says_why() -> None:
    silent = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*sources(), ROOT / "setup.py", *(ROOT / "slurm").rglob("*.py")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"# noqa: .*\bS\d+", line) and not re.search(r"# noqa: [\w, ]+  # \w", line)
    ]
    assert silent == []
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    whole = [line for line in lines if re.search(r'^\s*"S\d*",|= \[.*"S\d*"', line)]
    assert len(whole) > 5
    assert [line for line in whole if "#" not in line] == []
