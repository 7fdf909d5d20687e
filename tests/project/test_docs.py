"""What the documentation says is there: messages, tests, commands, arguments, operations."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
from pages import DOCS, ROOT, blocks, literals, pages, plain, sources
from torch.distributed import distributed_c10d

pytestmark = pytest.mark.once

GENERATE = DOCS / "generate"


def everything() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages())


def generated(script: str) -> str:
    """Return what a script of docs/generate prints: its part of a page."""
    done = subprocess.run(
        [sys.executable, GENERATE / script], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def first_column(page: Path, section: str = "") -> list[str]:
    """Return the first cells of the tables of a page, or of one of its sections."""
    text = page.read_text(encoding="utf-8")
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|]*?) \|", text, re.M)


class TestMessages:
    def test_each_is_in_the_source(self) -> None:
        known = [text for path in sources() for text in literals(path.read_text(encoding="utf-8"))]
        messages = [
            block for block in blocks(DOCS / "how-to" / "messages.md") if block.mark == "message"
        ]
        assert len(messages) >= 20
        lost = [
            f"{block}: {block.text.strip()}"
            for block in messages
            if not any(plain(block.text) in text for text in known)
        ]
        assert not lost, "\n".join(lost)

    def test_strings_of_a_source(self) -> None:
        source = '''
            """A docstring's "words"."""
            raise RuntimeError(
                f"rank {rank()}: the {', '.join(names)}{rest} "  # why
                f'waited {"long" if late else "short"}'
            )
            raise ValueError("another: {}", "one")
        '''
        assert plain("rank …: the … ") in literals(source)
        assert "another: …" in literals(source)


def test_tests_that_pages_name_exist() -> None:
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)`", everything())) - {"test_x"}
    assert len(named) > 50
    assert named - files == set()


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for page in pages():
        for block in blocks(page):
            if block.language != "console":
                continue
            for target in re.findall(r"^make ([\w-]+)", block.text, re.M):
                assert target in targets, f"{block}: make {target}"
    for name in re.findall(r"\b(?:examples|slurm|benchmarks)/[\w./-]+\w", everything()):
        assert (ROOT / name).exists(), name


def test_environment_variables() -> None:
    table = generated("settings_table.py")
    declared = set(re.findall(r"`(MPIDDP_\w+)`", table))
    assert set(re.findall(r"\bMPIDDP_\w+", everything())) <= declared
    for line in table.splitlines()[2:]:
        assert len(re.findall(r"(?<!\\)\|", line)) == 6, line


@pytest.mark.essential
def test_every_argument_of_the_wrapper() -> None:
    named = " ".join(first_column(DOCS / "reference" / "ddp.md", "Arguments"))
    constructors = [
        function
        for path in (ROOT / "mpiddp" / "ddp").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == "DistributedDataParallel"
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
    ]
    (constructor,) = constructors
    arguments = [*constructor.args.args[1:], *constructor.args.kwonlyargs]
    assert len(arguments) > 20
    for argument in arguments:
        assert f"`{argument.arg}`" in named


@pytest.mark.smoke
def test_every_operation_of_torch_distributed() -> None:
    page = DOCS / "reference" / "operations.md"
    named = " ".join(first_column(page, "Each operation"))
    functions = [
        name
        for name in distributed_c10d.__all__
        # isinstance() would make torch's deprecated names warn.
        if type(function := getattr(distributed_c10d, name)) is FunctionType
        and "group" in inspect.signature(function).parameters
        and not name.startswith(("get_", "destroy_"))
    ]
    assert len(functions) > 20
    for name in functions:
        assert f"`{name}`" in named


def test_options_of_the_runner() -> None:
    (source,) = (
        text
        for path in sources()
        if 'NAME = "python -m mpiddp"' in (text := path.read_text(encoding="utf-8"))
    )
    options = set(re.findall(r'add_argument\(\s*(?:"-\w", )?"(--[\w-]+)"', source))
    shown = first_column(DOCS / "reference" / "runner.md")
    assert {option for cell in shown for option in re.findall(r"--\w[\w-]+", cell)} == options


def test_notes() -> None:
    spec = importlib.util.spec_from_file_location("docs_notes", GENERATE / "notes.py")
    assert spec
    assert spec.loader
    notes = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = notes
    spec.loader.exec_module(notes)
    found = notes.find()
    titles = [note.title for note in found]
    assert len(titles) > 30
    assert len(set(titles)) == len(titles)
    assert all(note.text.strip() for note in found)
    assert set(notes.references()) - set(titles) == set()


def test_generated_parts() -> None:
    """What pages ask for is what docs/generate/site.py makes."""
    tree = ast.parse((GENERATE / "site.py").read_text(encoding="utf-8"))
    (parts,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "PARTS"
    )
    assert isinstance(parts, ast.Dict)
    known = {key.value for key in parts.keys if isinstance(key, ast.Constant)}
    asked = re.findall(r"<!-- generated: ([\w-]+) -->", everything())
    assert sorted(asked) == sorted(known)


def test_the_search_needs_no_network() -> None:
    """The theme's plugin `offline` fetches a script, unless the site has one so named."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\n  - offline\n" in config
    (script,) = re.findall(r"^  polyfills:\n    - (\S*iframe-worker\S*)\n", config, re.M)
    assert (DOCS / script).exists()


def test_first_pages_show_what_it_gains() -> None:
    plot = "exposed-2-ranks.svg"
    for page, place in (
        (ROOT / "README.md", "benchmarks/results"),
        (DOCS / "index.md", "performance"),
    ):
        text = page.read_text(encoding="utf-8")
        assert f"]({place}/{plot})" in text
        for name in ("NodeOptimizer", "hangs.md", "preemption.md", "elastic.md"):
            assert name in text, f"{page}: {name}"
    drawn = (ROOT / "benchmarks" / "results" / plot).read_text(encoding="utf-8")
    assert "mpiddp, NodeOptimizer" in drawn


class TestReadme:
    TEXT = (ROOT / "README.md").read_text(encoding="utf-8")

    def test_one_page(self) -> None:
        assert len(self.TEXT.splitlines()) <= 150

    def test_its_table_is_made_of_results(self) -> None:
        table = generated("step_tables.py").strip()
        assert len(table.splitlines()) == 10
        assert table in self.TEXT

    def test_links(self) -> None:
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", self.TEXT)
        assert len(links) > 10
        for link in links:
            assert (ROOT / link).exists(), link
