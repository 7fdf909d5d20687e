"""The code on the pages of the documentation runs, on two ranks of each MPI."""

from pathlib import Path

import mpirun
import pytest
from pages import Block, blocks, pages

HERE = Path(__file__).parent
# How often a block runs that is marked so.
TOGETHER = {"runs: 2 ranks": 1, "runs: 2 ranks, twice": 2}
BY_RUNNER = {
    "runs: 2 ranks, python -m mpiddp": ["-m", "mpiddp"],
    "runs: 2 ranks, python -m mpiddp --data-parallel": ["-m", "mpiddp", "--data-parallel"],
}

# Blocks whose mark goes on like this with the name of a module run where that is installed.
WITH = ", with "

BLOCKS = [block for page in pages() for block in blocks(page)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks write there what they write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def write(block: Block, folder: Path) -> Path:
    path = folder / f"{block.page.stem}-line-{block.line}.py"
    path.write_text(block.after(), encoding="utf-8")
    return path


def run(*command: str | Path) -> None:
    done = mpirun.run(2, command, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.thorough
def test_code_runs(tmp_path: Path) -> None:
    """In one job, one after another: most of each would be the import of torch."""
    paths = [
        write(block, tmp_path)
        for block in BLOCKS
        if block.mark in TOGETHER
        for _ in range(TOGETHER[block.mark])
    ]
    assert len(paths) > 10
    run(HERE / "run_blocks.py", *paths)


@pytest.mark.slow
def test_code_runs_under_the_runner(tmp_path: Path) -> None:
    marked = [block for block in BLOCKS if block.mark in BY_RUNNER]
    assert {block.mark for block in marked} == set(BY_RUNNER)
    for block in marked:
        run(*BY_RUNNER[block.mark], write(block, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if WITH in block.mark], ids=str)
def test_code_runs_with_what_users_log_with(tmp_path: Path, block: Block) -> None:
    mark, module = block.mark.split(WITH)
    pytest.importorskip(module, reason="only `make test-all` installs it")
    run(*BY_RUNNER.get(mark, []), write(block, tmp_path))


@pytest.mark.once
def test_every_block_says_how_it_runs() -> None:
    for block in BLOCKS:
        # A diff of commands has nothing to run.
        if block.language == "python" or (block.language == "diff" and "import " in block.text):
            mark = block.mark.split(WITH)[0]
            assert mark in {*TOGETHER, *BY_RUNNER}, f"{block}: marked {block.mark!r}"
        else:
            assert not block.mark.startswith("runs:"), str(block)


@pytest.mark.once
def test_what_a_diff_begins_with_is_a_program() -> None:
    diffs = [b for b in BLOCKS if b.language == "diff" and b.mark in TOGETHER]
    assert diffs
    for block in diffs:
        compile(block.before(), str(block), "exec")
        assert block.before() != block.after()
