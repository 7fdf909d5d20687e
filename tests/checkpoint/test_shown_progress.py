"""Rank 0 shows how far it is: a bar on a terminal, lines elsewhere, nothing of what is quick."""

import importlib.util
import re
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(150)

SCRIPT = """
import fcntl, os, pty, resource, struct, sys, termios, threading, time
from pathlib import Path

import torch
import torch.distributed as dist
import mpiddp
from mpiddp import checkpoint
import mpiddp.horovod as hvd

where, root, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
BYTES = 96 << 20


class Slow:
    "Takes a second to pickle."

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        time.sleep(1)
        return int, ()


def large():
    return {"large": torch.ones(BYTES // 4)}


def fill(size):
    layer = torch.nn.Linear(size, 1000, bias=False)
    with torch.no_grad():
        layer.weight.fill_(dist.get_rank())
    return layer


def do():
    if what == "broadcast":
        layer = fill(BYTES // 4000)
        mpiddp.DistributedDataParallel(layer)
        assert not layer.weight.any()
    elif what == "horovod":
        hvd.init()
        layer = fill(BYTES // 4000)
        hvd.broadcast_parameters(layer.state_dict(), root_rank=hvd.size() - 1)
        assert (layer.weight == hvd.size() - 1).all()
    elif what == "save":
        checkpoint.save(large(), root, step=1)
    elif what == "load":
        checkpoint.save(large(), root, step=1)
        print("LOADS", file=sys.stderr, flush=True)
        assert checkpoint.load(root).state["large"].all()
    elif what == "small":
        mpiddp.DistributedDataParallel(torch.nn.Linear(3, 3))
        checkpoint.save({"small": torch.ones(3)}, root, step=1)
        checkpoint.load(root)
    elif what == "failing":
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES // 2, BYTES // 2))
        try:
            checkpoint.save(large(), root, step=1)
        except (OSError, RuntimeError) as error:
            print(f"AFTER {error}", file=sys.stderr, flush=True)
        else:
            raise AssertionError("saved")
    elif what == "async":
        checkpoint.async_save(large(), root, step=1).result()
    elif what == "waiting":
        checkpoint.async_save({"slow": Slow(), **large()}, root, step=1)
        checkpoint.save({"small": torch.ones(3)}, root, step=2)


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"large": distribute_tensor(torch.ones(BYTES // 4), mesh, [Shard(0)])}


def do_sharded():
    state = sharded()
    checkpoint.save(state, root, step=1)
    print("LOADS", file=sys.stderr, flush=True)
    state["large"].zero_()
    checkpoint.load(root, into=state)
    assert state["large"].to_local().all()


if what != "horovod":
    mpiddp.init_process_group()
drawn = []
if where == "terminal":
    ours, terminal = pty.openpty()
    if what in ("broadcast", "load"):  # others say no size
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    os.dup2(terminal, 2)
    os.close(terminal)

    def collect():
        try:
            while data := os.read(ours, 65536):
                drawn.append(data)
        except OSError:  # the terminal is closed
            pass

    reader = threading.Thread(target=collect)
    reader.start()
    assert sys.stderr.isatty()
(do_sharded if what == "sharded" else do)()
rank = hvd.rank() if what == "horovod" else dist.get_rank()
if where == "terminal":
    os.close(2)
    reader.join()
    (root.parent / f"terminal-{rank}").write_bytes(b"".join(drawn))
print("done", flush=True)
if what == "horovod":
    hvd.shutdown()
else:
    mpiddp.destroy_process_group()
"""


def shown(
    folder: Path, ranks: int, where: str, what: str, seconds: str | None = "0.02"
) -> tuple[str, list[str]]:
    """Return what rank 0 shows, and the others."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = [script, where, folder / "checkpoints", what]
    done = mpirun.run(ranks, arguments, 120, {"MPIDDP_PROGRESS": seconds})
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    assert (done.returncode, done.stdout.count("done")) == (0, ranks)
    if where == "pipe":
        return done.stderr, []
    assert "mpiddp" not in done.stderr
    screens = [(folder / f"terminal-{rank}").read_bytes().decode() for rank in range(ranks)]
    return screens[0], screens[1:]


NO_TQDM = importlib.util.find_spec("tqdm") is None
needs_tqdm = pytest.mark.skipif(NO_TQDM, reason="needs tqdm: pip install mpiddp[progress]")
WHAT = [
    ("broadcast", 3, ["broadcast of the model's state"]),
    ("horovod", 2, ["broadcast of parameters"]),
    ("load", 1, ["000001-step-1: writing", "000001-step-1: reading"]),
    ("load", 2, ["000001-step-1: its sha256", "of rank 0: to the other ranks"]),
    ("sharded", 2, ["000001-step-1: writing", "000001-step-1: reading"]),
]


@pytest.mark.thorough(keep=2)
@needs_tqdm
@pytest.mark.parametrize(("what", "ranks", "titles"), WHAT)
def test_a_bar_on_a_terminal(tmp_path: Path, what: str, ranks: int, titles: list[str]) -> None:
    screen, others = shown(tmp_path, ranks, "terminal", what, "0.002")
    for title in titles:
        assert re.search(re.escape(title) + r": +\d+%\|", screen), screen
    if what in ("broadcast", "load"):  # wide enough
        assert re.search(r"[\d.]+M/[\d.]+M \[", screen), screen
    assert "mpiddp:" not in screen  # bars and no lines
    assert screen.endswith("\r")  # nothing stays
    assert others == [""] * (ranks - 1) or what in ("load", "sharded")
    assert not any("%|" in other for other in others)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("what", "ranks", "titles"), WHAT)
def test_lines_in_a_pipe(tmp_path: Path, what: str, ranks: int, titles: list[str]) -> None:
    told, _ = shown(tmp_path, ranks, "pipe", what, "0.001")
    for title in titles:
        line = (
            r"mpiddp: rank 0: .*" + re.escape(title) + r": [\d.]+ .B of [\d.]+ MB in [\d.e-]+ s, "
            r"[\d.e+]+ .B/s \(MPIDDP_PROGRESS=0: say nothing\)"
        )
        assert re.search(line, told), told
    assert "%|" not in told
    assert not re.search(r"mpiddp: rank [1-9]", told)


def test_lines_come_at_doubling_intervals(tmp_path: Path) -> None:
    told, _ = shown(tmp_path, 1, "pipe", "save", "0.002")
    times = [float(each) for each in re.findall(r"writing: .* in ([\d.e-]+) s", told)]
    for number, seconds in enumerate(times):
        assert seconds >= 0.00199 * 2**number


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("where", ["pipe", "terminal"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_of_what_is_small(tmp_path: Path, where: str, ranks: int) -> None:
    """With the times that hold by default."""
    told, others = shown(tmp_path, ranks, where, "small", None)
    assert "mpiddp" not in told
    assert where == "pipe" or [told, *others] == [""] * ranks


def test_nothing_where_it_is_off(tmp_path: Path) -> None:
    assert shown(tmp_path, 2, "terminal", "save", "0") == ("", [""])


@pytest.mark.thorough(keep=1)
@needs_tqdm
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_fails_closes_its_bar(tmp_path: Path, ranks: int) -> None:
    screen, others = shown(tmp_path, ranks, "terminal", "failing", "0.002")
    before, after = screen.split("AFTER ")
    assert "writing: " in before
    assert before.endswith("\r")  # what comes next begins a line
    assert "File too large" in after
    assert "%|" not in after
    assert len(others) == ranks - 1


def test_an_asynchronous_save_shows_nothing(tmp_path: Path) -> None:
    assert shown(tmp_path, 2, "terminal", "async", "0.002") == ("", [""])


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("where", ["pipe", pytest.param("terminal", marks=needs_tqdm)])
def test_who_waits_for_one_shows_it(tmp_path: Path, where: str) -> None:
    told, _ = shown(tmp_path, 2, where, "waiting", "0.1")
    assert "000001-step-1: writing" in told


@pytest.mark.thorough
def test_the_runner_tags_the_lines(tmp_path: Path) -> None:
    """Its ranks write to pipes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = ["-m", "mpiddp", "--tag-output", script, "pipe", tmp_path / "checkpoints", "save"]
    done = mpirun.run(2, arguments, 120, {"MPIDDP_PROGRESS": "0.002"})
    print(done.stdout, done.stderr)
    assert re.search(r"^\[0\] mpiddp: rank 0: checkpoint .*: writing: ", done.stderr, re.M)
