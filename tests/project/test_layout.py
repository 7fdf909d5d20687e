"""The rooms of the source: who may import whom. The table is docs/explanation/rooms.md."""

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path("docs", "explanation", "rooms.md")
MOST_LINES = 500

LEAVES, FACE = "leaves", "face"
# Rooms without a folder: their files lie in mpiddp/ itself.
AT_THE_TOP = (LEAVES, FACE)

# from X import a, b / from X cimport (a, b) / import X / cimport X, at any indentation
CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from\s+(?P<module>[\w.]+)\s+c?import\s+(?:\((?P<many>[^)]*)\)|(?P<names>[^\n(]+))"
    r"|c?import\s+(?P<plain>[\w.]+(?:[ \t]*,[ \t]*[\w.]+)*))",
    re.MULTILINE,
)
PROSE = re.compile(r'"""(?:.|\n)*?"""|#[^\n]*')

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Room:
    """A row of the table."""

    floor: int
    files: frozenset[str]
    may_import: frozenset[str]
    for_types: frozenset[str]


@dataclass(frozen=True)
class Import:
    """One module that a file imports, as a dotted name that begins with mpiddp."""

    module: str
    line: int
    for_types: bool = False


def read_table(root: Path) -> dict[str, Room]:
    """Return the rooms by name, in the order of the table."""
    rooms: dict[str, Room] = {}
    for line in (root / TABLE).read_text().splitlines():
        row = re.fullmatch(r"\| (\d+) (\w+) \|[^|]*\|([^|]*)\|([^|]*)\|", line)
        if row is None:
            continue
        floor, name, files, may = row.groups()
        allowed = {cell.strip() for cell in may.split(",")} - {"nothing"}
        if allowed == {"all"}:
            allowed = set(rooms)
        types = {cell.removesuffix(" (types)") for cell in allowed if cell.endswith(" (types)")}
        rooms[name] = Room(
            int(floor),
            frozenset(file.strip().strip("*") for file in files.split(",")),
            frozenset(cell for cell in allowed if not cell.endswith(" (types)")),
            frozenset(types),
        )
    return rooms


def sources(root: Path) -> Iterator[Path]:
    """Yield all files of mpiddp/ and cython/ that can import, relative to `root`."""
    for folder, suffixes in {"mpiddp": (".py",), "cython": (".pyx", ".pxd", ".pyi")}.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path.relative_to(root)


def module_of(path: Path) -> str:
    """Return the dotted name of a source file; a package's is that of its folder."""
    parts = ["mpiddp", *path.with_suffix("").parts[1:]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str, rooms: dict[str, Room]) -> str | None:
    """Return the room that a module is in; None for one that there is not."""
    parts = module.split(".")
    if len(parts) == 1:
        return FACE
    if parts[1] in rooms and parts[1] not in AT_THE_TOP:
        return parts[1]
    return next((name for name in AT_THE_TOP if parts[1] in rooms[name].files), None)


def imports_of(path: Path, modules: set[str]) -> Iterator[Import]:
    """Yield what a file imports of mpiddp."""
    text = path.read_text()
    found = _in_cython(text) if path.suffix in (".pyx", ".pxd") else _in_python(text)
    for module, names, line, for_types in found:
        if module.split(".")[0] != "mpiddp":
            continue
        for name in names or [""]:
            whole = f"{module}.{name}" if name else module
            yield Import(whole if whole in modules else module, line, for_types)


def _in_python(text: str) -> Iterator[tuple[str, list[str], int, bool]]:
    tree = ast.parse(text)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        types = id(node) in for_types
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [], node.lineno, types
        elif isinstance(node, ast.ImportFrom):
            # Names of modules are whole here; a relative one fits no row.
            module = node.module or "" if node.level == 0 else f"mpiddp.relative.{node.module}"
            yield module, [alias.name for alias in node.names], node.lineno, types


def _in_cython(text: str) -> Iterator[tuple[str, list[str], int, bool]]:
    # What is blanked keeps its lines, for the numbers.
    code = PROSE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in CYTHON_IMPORT.finditer(code):
        line = code.count("\n", 0, found.start()) + 1
        if found["plain"]:
            for module in found["plain"].split(","):
                yield module.strip(), [], line, False
        else:
            listed = (found["many"] or found["names"]).replace("\n", " ").split(",")
            names = [name.split(" as ")[0].strip() for name in listed if name.strip()]
            yield found["module"], names, line, False


def offences(root: Path) -> list[str]:
    """Return what in a source tree breaks the rules, in words."""
    rooms = read_table(root)
    files = list(sources(root))
    modules = {module_of(path) for path in files}
    graph: dict[str, set[str]] = {}
    found = [*_offences_of_the_table(rooms), *_missing_or_unlisted(root, rooms)]
    for path in files:
        module = module_of(path)
        room = room_of(module, rooms)
        if room is None:
            found.append(f"{path}: in no room of {TABLE}")
            continue
        graph.setdefault(module, set())
        for one in imports_of(root / path, modules):
            at = f"{path}:{one.line}"
            target = room_of(one.module, rooms)
            if target is None or one.module not in modules:
                found.append(f"{at}: there is no module {one.module}")
                continue
            if one.module != module:  # a .pyx may name its own .pxd
                graph[module].add(one.module)
            allowed = rooms[room].may_import | {room}
            if one.for_types:
                allowed |= rooms[room].for_types
            if target not in allowed:
                found.append(f"{at}: {room} may not import {one.module}, which is in {target}")
            elif target not in AT_THE_TOP and one.module == f"mpiddp.{target}":
                found.append(f"{at}: imports a room instead of a module in it")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"circle of imports: {' -> '.join(error.args[1])}")
    return found + _signs(root, rooms) + _too_long(root)


def _offences_of_the_table(rooms: dict[str, Room]) -> Iterator[str]:
    for name, room in rooms.items():
        for other in room.may_import | room.for_types:
            if other not in rooms:
                yield f"{TABLE}: {name} may import {other}, which is no room"
            elif rooms[other].floor >= room.floor:
                yield f"{TABLE}: {other} is not below {name}"


def _missing_or_unlisted(root: Path, rooms: dict[str, Room]) -> Iterator[str]:
    listed = set().union(*(rooms[name].files for name in AT_THE_TOP if name in rooms))
    at_the_top = {path.stem for path in (root / "mpiddp").glob("*.py")}
    if at_the_top != listed:
        yield f"{TABLE}: not as in mpiddp/: {', '.join(sorted(at_the_top ^ listed))}"
    stray = [path.name for path in (root / "cython").iterdir() if path.is_file()]
    if stray:
        yield f"cython/: files in no room: {', '.join(stray)}"
    for name, room in rooms.items():
        if name in AT_THE_TOP:
            continue
        python = {path.stem for path in (root / "mpiddp" / name).glob("*.py")} - {"__init__"}
        compiled = {
            path.name if path.suffix in (".c", ".h") else path.stem
            for path in (root / "cython" / name).glob("*.*")
            if path.suffix in (".pyx", ".pxd", ".pyi", ".c", ".h")
        }
        if python | compiled != room.files:
            different = ", ".join(sorted((python | compiled) ^ room.files))
            yield f"{TABLE}: the files of {name} are not those in its folders: {different}"
        if python & compiled:
            yield f"{name}: in both halves: {', '.join(sorted(python & compiled))}"


def _signs(root: Path, rooms: dict[str, Room]) -> list[str]:
    found = []
    folders = {
        path.name
        for half in ("mpiddp", "cython")
        for path in (root / half).iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    if strangers := folders - rooms.keys():
        found.append(f"folders that are no rooms of {TABLE}: {', '.join(sorted(strangers))}")
    for name in rooms.keys() - set(AT_THE_TOP):
        sign = root / "mpiddp" / name / "__init__.py"
        if not sign.exists():
            found.append(f"{name} has no sign: mpiddp/{name}/__init__.py")
            continue
        tree = ast.parse(sign.read_text())
        text = ast.get_docstring(tree) or ""
        rest = [statement for statement in tree.body[1:] if not _is_public_name(statement, name)]
        if rest or "May import:" not in text or "Must never" not in text:
            found.append(
                f"mpiddp/{name}/__init__.py must be a docstring with 'May import:' and "
                f"'Must never', and nothing else but the room's public names"
            )
    if list((root / "cython").rglob("__init__.*")):
        found.append(
            "cython/ and its rooms must have no __init__: it would hide the package cython"
        )
    return found


def _is_public_name(statement: ast.stmt, room: str) -> bool:
    """Whether a statement of a room's sign takes names from the room, or lists them."""
    if isinstance(statement, ast.ImportFrom):
        return f"{statement.module}.".startswith(f"mpiddp.{room}.")
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id == "__all__"
    )


def _too_long(root: Path) -> list[str]:
    found = []
    for half in ("mpiddp", "cython"):
        for path in sorted((root / half).rglob("*")):
            if path.suffix not in (".py", ".pyx", ".pxd", ".pyi", ".c", ".h"):
                continue
            lines = len(path.read_text().splitlines())
            if lines > MOST_LINES:
                found.append(
                    f"{path.relative_to(root)} has {lines} lines, more than {MOST_LINES}: split it "
                    f"by purpose"
                )
    return found


def test_source_keeps_to_the_table() -> None:
    assert offences(ROOT) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the source, to plant offences in."""
    for half in ("mpiddp", "cython"):
        shutil.copytree(
            ROOT / half,
            tmp_path / half,
            ignore=shutil.ignore_patterns("__pycache__", "*.so"),
        )
    (tmp_path / TABLE).parent.mkdir(parents=True)
    shutil.copy(ROOT / TABLE, tmp_path / TABLE)
    return tmp_path


def append(file: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with (root / file).open("a") as opened:
            opened.write(text)

    return change


def remove(file: str) -> Callable[[Path], None]:
    return lambda root: (root / file).unlink()


def make_folder(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).mkdir()


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        pytest.param(
            append("mpiddp/mpi/abort.py", "\nimport mpiddp.ddp.hooks\n"),
            r"abort\.py:\d+: mpi may not import mpiddp\.ddp\.hooks, which is in ddp",
            id="upwards-py",
        ),
        pytest.param(
            append("cython/system/kernels.pyx", "\nfrom mpiddp.engine.engine cimport Engine\n"),
            r"kernels\.pyx:\d+: system may not import mpiddp\.engine\.engine",
            id="upwards-pyx",
        ),
        pytest.param(
            append(
                "cython/gpu/runtime.pxd", "\nfrom mpiddp.engine.interface cimport (\n    Job,\n)\n"
            ),
            r"runtime\.pxd:\d+: gpu may not import mpiddp\.engine\.interface",
            id="upwards-pxd",
        ),
        pytest.param(
            append(
                "mpiddp/transports/choice.py",
                "\n\ndef late():\n    from mpiddp.process_group import group\n    return group\n",
            ),
            r"choice\.py:\d+: transports may not import mpiddp\.process_group\.group",
            id="upwards-in-a-function",
        ),
        pytest.param(
            append(
                "cython/engine/chunks.pyx",
                "\n\ndef late():\n    from mpiddp.reducer import joined\n    return joined\n",
            ),
            r"chunks\.pyx:\d+: engine may not import mpiddp\.reducer\.joined",
            id="upwards-in-a-function-pyx",
        ),
        pytest.param(
            append(
                "mpiddp/mpi/nodes.py",
                "\nif TYPE_CHECKING:\n    from mpiddp.rendezvous.world import init_process_group\n",
            ),
            r"nodes\.py:\d+: mpi may not import mpiddp\.rendezvous\.world",
            id="upwards-for-types",
        ),
        pytest.param(
            append(
                "mpiddp/reducer/sparse.py",
                "\nfrom mpiddp.process_group.group import ProcessGroup as _Group\n",
            ),
            r"sparse\.py:\d+: reducer may not import mpiddp\.process_group\.group",
            id="types-only",
        ),
        pytest.param(
            append("mpiddp/ddp/grad_bucket.py", "\nfrom . import hooks\n"),
            r"grad_bucket\.py:\d+: there is no module mpiddp\.relative",
            id="relative",
        ),
        pytest.param(
            append("mpiddp/ddp/grad_bucket.py", "\nimport mpiddp.reducer\n"),
            r"grad_bucket\.py:\d+: imports a room instead of a module in it",
            id="room-itself",
        ),
        pytest.param(
            append("mpiddp/ddp/grad_bucket.py", "\nfrom mpiddp.ddp import python_hook\n"),
            r"circle of imports: .*mpiddp\.ddp\.grad_bucket",
            id="circle-py",
        ),
        pytest.param(
            append("cython/engine/memory.pxd", "\nfrom mpiddp.engine.engine cimport Engine\n"),
            r"circle of imports: .*mpiddp\.engine\.memory",
            id="circle-pxd",
        ),
        pytest.param(
            remove("mpiddp/gpu/__init__.py"),
            r"gpu has no sign: mpiddp/gpu/__init__\.py",
            id="no-sign",
        ),
        pytest.param(
            append("mpiddp/gpu/__init__.py", "\nimport os\n"),
            r"mpiddp/gpu/__init__\.py must be a docstring .* nothing else",
            id="more-than-a-sign",
        ),
        pytest.param(
            append("mpiddp/mpi/new.py", '"""A file that the table does not know."""\n'),
            r"rooms\.md: the files of mpi are not those in its folders: new",
            id="unlisted-file",
        ),
        pytest.param(make_folder("cython/attic"), r"no rooms of .*: attic", id="unlisted-folder"),
        pytest.param(
            append("cython/mpi/errors.pyx", "# a line\n" * MOST_LINES),
            r"cython/mpi/errors\.pyx has \d+ lines, more than 500",
            id="too-long",
        ),
    ],
)
def test_each_offence_is_found(tree: Path, plant: Callable[[Path], None], complaint: str) -> None:
    plant(tree)
    # An import upwards may close a circle as well.
    assert any(re.search(complaint, found) for found in offences(tree))
