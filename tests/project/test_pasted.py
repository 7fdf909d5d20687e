"""Each block of README.md and of docs/start does what it says when it is pasted.

By a user who is not root, in a fresh clone and an empty home, on a machine that has Debian's Open
MPI and MPICH as modules and a real SLURM (tests/lab/site). A line before a block says in which
story it is: `<!-- pasted: laptop -->`, `<!-- pasted: cluster -->`, or the same and `, in a batch
script`.

The whole takes ten minutes: most of it is compiling mpiddp for each of four MPIs. What pip takes is
constrained by $PIP_CONSTRAINT, by default constraints.txt; with /dev/null it is the newest.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import DOCS, ROOT, Block, blocks
from reader_site import HOME, Site, start_site

# In the order in which a newcomer takes them: the first ones make the environment.
FIRST = [ROOT / "README.md", DOCS / "index.md", DOCS / "start/laptop.md", DOCS / "start/cluster.md"]
PAGES = [*FIRST, *sorted({*(DOCS / "start").glob("*.md")} - {*FIRST})]
LAPTOP, CLUSTER, BATCH = "laptop", "cluster", "cluster, in a batch script"
MARKS = {f"pasted: {story}": story for story in (LAPTOP, CLUSTER, BATCH)}
TOGETHER = "runs: 2 ranks"

# What the pages call by names that a reader replaces, and what is there in this test.
SCRIPTS = Path("/where/your/script/lies")
CLONE = Path("/path/to/the/clone/of/mpiddp")

# This machine is a laptop with four cores, whatever it has.
FOUR_CORES = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# What a command prints if it works.
SAME_BITS = r"all \d+ replicas hold the same bits: sha256"
FALLS = r"(?s)step 0: loss.*step 4: loss"
PRINTED = {
    "make train": SAME_BITS,
    "make test": r"(?m)^[1-9]\d* passed, 0 failed, \d+ skipped$",
    "make help": "make train",
    "srun --mpi=pmix -N 2 --ntasks-per-node=2 python -m mpiddp.doctor": r"ranks: 4 on 2 nodes",
    "mpirun -n 2 python -m mpiddp.doctor": r"ranks: 2 on 1 node ",
    "sbatch": "Submitted batch job",
    "-n 2 python -m mpiddp train.py --epochs 5": r"(?s)rank \d of 2 on gloo.*epoch 1: loss",
}
# The script that a page is about, if that is not its own first one, and what it prints.
OUTPUTS = {
    "torchrun.md": r"(?s)rank \d of 4 on gloo.*epoch 1: loss",
    "spawn.md": r"rank 1 of 2: loss",
    "torch-mpi.md": r"3 \[6.0, 6.0, 6.0\]",
    "ccl.md": r"rank 3 of 4 on ccl: loss",
    "data-parallel.md": r"(?m)^2 \d+\.\d+$",
    "horovod.md": r"loss \d+\.\d+ on 4 ranks",
    "laptop.md": FALLS,
}

pytestmark = [pytest.mark.timeout(2400), pytest.mark.once]


def marked(story: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if MARKS.get(block.mark) == story]


def commands(block: Block) -> str:
    """Return what the reader pastes; of a diff, its new version."""
    return block.after()


def for_mpich(text: str) -> str:
    """Return commands with what their comments say for MPICH, and MPICH's module."""
    lines = []
    for line in text.splitlines():
        before, _, comment = line.partition("#")
        if said := re.search(r"MPICH: (\S+)", comment):
            new = said[1]
            old = new.replace("mpich", "openmpi").replace("pmi2", "pmix")
            assert old in before, line
            line = before.replace(old, new)
        elif said := re.search(r"or: (pip install mpich .*)", comment):
            line = said[1]
        elif "the names of your site" in comment:
            line = before.replace("openmpi", "mpich")
        lines.append(line)
    return "\n".join(lines) + "\n"


class Story:
    """What a reader pastes into one shell, block after block, and what must come of it."""

    def __init__(self, site: Site, name: str, env: dict[str, str]) -> None:
        self.site, self.name, self.folder = site, name, site.folder / name
        self.folder.mkdir()
        self.folder.chmod(0o777)
        self.env = {
            "PIP_RETRIES": "0",  # not each index that a page names is reached from here
            "PIP_CONSTRAINT": os.environ.get("PIP_CONSTRAINT", str(ROOT / "constraints.txt")),
            "OMP_NUM_THREADS": "1",
            **env,
        }
        self.steps: list[tuple[str, str, list[str]]] = []

    def paste(self, what: object, text: str, *expected: str) -> None:
        """Add lines of the shell, and patterns of which each must be in their output."""
        path = self.folder / f"{len(self.steps):02}.sh"
        path.write_text(text, encoding="utf-8")
        self.steps.append((str(what), text, list(expected)))

    def tell(self, timeout: float) -> None:
        """Paste it all. A command that fails ends the story."""
        lines = [
            "trap 'echo failed: $BASH_COMMAND >&2; exit 1' ERR",
            # The tests of `make test` are run elsewhere: here a part of them shows that it runs.
            'make() { [ "$*" != test ] || set -- test ARGS="-n 2 tests/mpi/test_datatypes.py"',
            '    command make "$@"; }',
        ]
        for number, (what, _, _) in enumerate(self.steps):
            step = self.folder / f"{number:02}"
            lines += [
                f"echo {shlex.quote(f'== {what}')}",
                "SECONDS=0",
                f". {step}.sh >{step}.out 2>&1",
            ]
            lines += ["echo $SECONDS s"]
        script = self.folder / "story.sh"
        script.write_text("\n".join([*lines, ""]), encoding="utf-8")
        status = self.site.log_in(script, self.env, timeout)
        print(script.with_suffix(".log").read_text(encoding="utf-8"))
        for number, (what, text, expected) in enumerate(self.steps):
            path = self.folder / f"{number:02}.out"
            out = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            last = not (self.folder / f"{number + 1:02}.out").exists()
            told = f"{what}\n{text}\n--- printed:\n{out[-3000:]}"
            assert not last or status == 0, told
            for pattern in expected:
                assert re.search(pattern, out), f"no {pattern!r} from {told}"


def expected_of(block: Block) -> list[str]:
    """Return patterns of what a block prints."""
    text = commands(block)
    found = [pattern for start, pattern in PRINTED.items() if start in text]
    if not found and "train.py" in text:
        found = [OUTPUTS[block.page.name]]
    return found


def write_script(story: Story, page: Path, folder: Path = Path()) -> None:
    """Let `train.py` be the script that a page is about."""
    name = {"README.md": DOCS / "start" / "torchrun.md"}.get(page.name, page)
    if page.name == "laptop.md":
        name = ROOT / "README.md"
    script = next(b for b in blocks(name) if b.mark.startswith("runs: "))
    path = story.folder / f"{page.stem}.py"
    path.write_text(script.after(), encoding="utf-8")
    story.paste(f"train.py of {page.name}", f"cp {path} {folder}/train.py\n")


def run_python_blocks(story: Story) -> None:
    """Run what the pages mark so, in one job."""
    paths = []
    for page in PAGES:
        for block in blocks(page):
            if block.mark == TOGETHER:
                path = story.folder / f"{page.stem}-{block.line}.py"
                path.write_text(block.after(), encoding="utf-8")
                paths.append(str(path))
    run = ROOT / "tests" / "project" / "run_blocks.py"
    (story.folder / "run_blocks.py").write_text(run.read_text("utf-8"), encoding="utf-8")
    story.paste(
        "the pages' Python blocks",
        f"mpirun -n 2 python {story.folder}/run_blocks.py {' '.join(paths)}\n",
        FALLS,
        r"mpiddp \[2.0, 2.0, 2.0\]",
    )


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with start_site() as made:
        made.start_slurm(4)
        yield made


def test_every_block_of_commands_is_pasted() -> None:
    for page in PAGES:
        for block in blocks(page):
            commands_of_a_diff = re.search(r"^\+(mpirun|srun|sbatch) ", block.text, re.M)
            if block.language == "console" or commands_of_a_diff:
                assert block.mark in MARKS, f"{block}: marked {block.mark!r}"
            else:
                assert block.mark not in MARKS, str(block)


def test_every_example_prints_something() -> None:
    """Else its reader does not see that it has worked."""
    for page in PAGES:
        for block in blocks(page):
            if block.mark.startswith("runs: "):
                assert "print(" in block.after(), str(block)


def test_what_comments_say_for_mpich() -> None:
    (text,) = {for_mpich(b.text) for b in marked(CLUSTER) if "module load" in b.text}
    assert text.startswith("module load python mpich")
    assert "srun --mpi=pmi2 -N 2" in text
    assert "openmpi" not in text
    for text in (for_mpich(b.text) for b in marked(CLUSTER) if "sbatch" in b.text):
        assert " slurm/train_mpich.sbatch" in text
    assert "pip install mpich mpi4py" in for_mpich(
        "".join(b.text for b in marked(LAPTOP) if "venv ~/venv" in b.text)
    )


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_cluster(site: Site, mpi: str) -> None:
    """The second environment finds pip's cache with what the first one has built."""
    story = Story(site, f"cluster-{mpi}", {})
    clone = site.clone(f"cluster-{mpi}")
    adapt = for_mpich if mpi == "mpich" else str
    story.paste("a fresh clone", f"cd {clone}\n")
    pasted, jobs = set(), 0
    for block in marked(CLUSTER):
        text = adapt(commands(block))
        if text in pasted:
            continue  # README.md's, once more on a page
        pasted.add(text)
        story.paste(block, text, *expected_of(block))
        if "sbatch" in text:
            until = "while squeue --noheader | grep -q .; do sleep 1; done"
            wait = f"timeout 300 bash -c '{until}' || squeue\ncat mpiddp-train-*.out\n"
            jobs += 1
            story.paste("the batch job", wait, rf"(?s)({SAME_BITS}.*){{{jobs}}}")
    for block in marked(BATCH):
        write_script(story, block.page)
        batch = "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=4\n" + adapt(commands(block))
        (story.folder / "batch.sh").write_text(batch, encoding="utf-8")
        text = f"sbatch --wait --output=batch.out {story.folder}/batch.sh\ncat batch.out\n"
        story.paste(block, text, r"(?s)rank \d of 8 on gloo.*epoch 1: loss")
    story.tell(1400)


@pytest.mark.slow
def test_laptop(site: Site) -> None:
    story = Story(site, "laptop-openmpi", {})
    clone = make_places(site, story)
    story.paste("a fresh clone", f"cd {clone}\n")
    paste_laptop(story, marked(LAPTOP), str)
    story.tell(1800)


@pytest.mark.slow
def test_laptop_with_mpich(site: Site) -> None:
    """From where readers make an environment of their own."""
    story = Story(site, "laptop-mpich", {})
    make_places(site, story)
    story.paste("where the scripts are", f"cd {SCRIPTS}\n")
    every = marked(LAPTOP)
    first = next(at for at, block in enumerate(every) if "-m venv ~/venv" in block.text)
    paste_laptop(story, [b for b in every[first:] if "OMPI_" not in b.text], for_mpich)
    story.tell(1200)


def make_places(site: Site, story: Story) -> Path:
    """Make a home for the story, and what pages call by names that readers replace."""
    home = HOME / story.name
    clone = site.clone(f"{story.name}/mpiddp")
    scripts = home / "scripts"
    site.as_root("install", "-d", "-o", "reader", home, scripts)
    for link, target in ((CLONE, clone), (SCRIPTS, scripts)):
        site.as_root("mkdir", "-p", link.parent)
        site.as_root("ln", "-sfn", target, link)
    story.env["HOME"] = str(home)
    return clone


def paste_laptop(story: Story, pasted: list[Block], adapt: Callable[[str], str]) -> None:
    seen = set()
    for block in pasted:
        text = adapt(commands(block))
        bare = re.sub(r" +#.*", "", text)
        if bare in seen:
            continue  # README.md's, once more on a page
        seen.add(bare)
        if block.page.name == "README.md" and "train.py --epochs" in text:
            assert "in this environment (`. .venv/bin/activate`)" in block.page.read_text("utf-8")
            story.paste("README.md's sentence", ". .venv/bin/activate\n")
        if " train.py" in text:
            write_script(story, block.page, SCRIPTS if f"cd {SCRIPTS}" in text else Path())
        if block.page.name not in ("README.md", "laptop.md"):
            lines = [f"export {name}={value}\n" for name, value in FOUR_CORES.items()]
            story.paste("a laptop with four cores", "".join(lines))
        story.paste(block, text, *expected_of(block))
    run_python_blocks(story)
