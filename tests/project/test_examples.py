"""The example programs, started as a user would, on 1 to 16 ranks."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import mpirun
import pytest
import torch
from script_runs import SCRIPTS

from mpiddp import checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGEST = re.compile(r"^all (\d+) replicas hold the same bits: sha256 ([0-9a-f]{64})$", re.M)
ACCURACY = re.compile(r"^test accuracy ([0-9.]+)% after (\d+) epochs", re.M)
BITS = re.compile(r"([0-9.]+) bits per character before \d+ steps, ([0-9.]+) after")

# Without importing them, which takes seconds wherever tests are collected.
if not all(map(importlib.util.find_spec, ("sklearn", "tqdm"))):
    pytest.skip("needs scikit-learn and tqdm", allow_module_level=True)


def run_example(name: str, n: int, *args: object) -> tuple[str, str]:
    """Run an example on `n` ranks; return what it printed and the digest all ranks agree on."""
    timeout = 90 if n < 16 else 160  # importing torch takes each rank some seconds of a core
    done = mpirun.run(n, [str(EXAMPLES / name), *map(str, args)], timeout)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    same_bits = DIGEST.search(done.stdout)
    assert same_bits, done.stdout
    assert int(same_bits[1]) == n
    return done.stdout, same_bits[2]


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def held_out_bits(stdout: str) -> tuple[float, float]:
    """Return lm.py's loss before and after its training."""
    bits = BITS.search(stdout)
    assert bits, stdout
    return float(bits[1]), float(bits[2])


@pytest.mark.thorough
@pytest.mark.essential
@pytest.mark.once
@pytest.mark.timeout(120)
def test_train_reaches_98_percent() -> None:
    stdout, _ = run_example("train.py", 2)
    accuracy = ACCURACY.search(stdout)
    assert accuracy, stdout
    assert float(accuracy[1]) >= 98


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_resumes_with_the_same_bits(tmp_path: Path) -> None:
    # On three ranks: the sum of two numbers is the same in any order, that of three is not.
    folder = tmp_path / "digits"
    short = ("--epochs", 2, "--batch-size", 96)
    _, uninterrupted = run_example("train.py", 3, *short)

    keep = ("--checkpoint", folder, "--resume")
    stdout, interrupted = run_example("train.py", 3, *short, *keep, "--stop-after-epoch", 1)
    assert "not there" in stdout
    assert interrupted != uninterrupted
    found = checkpoint.load(folder)
    assert found is not None

    stdout, resumed = run_example("train.py", 3, *short, *keep)
    assert "1 epochs and 0 batches are done" in stdout
    assert "epoch 1:" not in stdout
    assert "epoch 2:" in stdout
    assert resumed == uninterrupted
    last = checkpoint.load(folder)
    assert last is not None
    assert last.step == 2 * found.step
    assert len(list(folder.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_ends_when_asked_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """A signal to one rank in the middle of an epoch, and the next run goes on from that step."""
    short = ("--epochs", 12, "--batch-size", 96)
    _, uninterrupted = run_example("train.py", 3, *short)
    script = [SCRIPTS / "signal_one_rank.py", "2", "5", EXAMPLES / "train.py"]
    command = [*script, *map(str, short), "--checkpoint", tmp_path, "--resume"]
    asked = []
    same_bits = None
    while same_bits is None:
        done = mpirun.run(3, command, timeout=100)
        assert done.returncode == 0, done.stderr
        said = re.search(r"asked to end: saved after step (\d+)", done.stdout)
        same_bits = DIGEST.search(done.stdout)
        assert (said is None) != (same_bits is None)
        if said:
            asked.append(int(said[1]))
    assert asked
    assert asked == sorted(set(asked))
    assert same_bits[2] == uninterrupted


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_train_stopped_at_any_batch_says_what_one_left_alone_says(tmp_path: Path) -> None:
    """Each batch of two epochs, the last ones included: the same losses, rates and bits."""
    done = mpirun.run(
        2, [SCRIPTS / "stop_at_each_batch.py", EXAMPLES / "train.py", tmp_path], timeout=150
    )
    assert done.returncode == 0, done.stderr
    told = dict(line.split("|", 1) for line in done.stdout.splitlines())
    whole = told.pop("whole")
    assert DIGEST.search(whole.replace("|", "\n")), whole
    assert len(told) == 6
    assert told == dict.fromkeys(told, whole)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("n", [1, 16])
def test_train_on_other_numbers_of_ranks(n: int) -> None:
    stdout, _ = run_example("train.py", n, "--epochs", 1, "--batch-size", 128)
    assert f"world: {n} ranks on 1 nodes" in stdout


PARTS_OF_TRAIN = """
import torch, train, mpiddp
from torch.utils.data import TensorDataset

mpiddp.init_process_group()
rank = mpiddp.get_topology().rank
torch.manual_seed(0)
model = train.make_model()

# 100 images are not the same number on each of three ranks
images, labels = train.load_data()[1][:100]
right = (model.eval()(images).argmax(1) == labels).sum().item()
assert train.evaluate(model, TensorDataset(images, labels)) == right / 100

model[1].running_mean += rank
train.synchronise_buffers(model)
assert (model[1].running_mean == 0).all()

train.check_replicas(model)
with torch.no_grad():
    model[0].weight[0, 0, 0, 0] += rank == 1
print("so far, so good", flush=True)
train.check_replicas(model)
"""


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.timeout(120)
def test_train_evaluates_synchronises_and_notices_a_replica_that_differs() -> None:
    env = {"PYTHONPATH": str(EXAMPLES)}
    done = mpirun.run(3, ["-c", PARTS_OF_TRAIN], timeout=100, env=env)
    assert done.stdout.count("so far, so good") == 3, done.stderr
    assert done.returncode != 0
    # the ranks come to it at the same time: the first that does ends the job
    assert re.search("rank (0 differs from ranks .1.|1 differs from ranks .0, 2.|2 d)", done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("n", "steps"), [(3, 30), pytest.param(16, 10, marks=pytest.mark.slow)])
def test_lm_learns(n: int, steps: int) -> None:
    stdout, _ = run_example("lm.py", n, "--steps", steps)
    before, after = held_out_bits(stdout)
    assert after < before - 1


@pytest.mark.timeout(120)
def test_large_model_learns_in_one_copy() -> None:
    """Also where ranks have made nothing of the model themselves."""
    sizes = ["--layers", "4", "--width", "384", "--heads", "6", "--steps", "12", "--lr", "1e-3"]
    done = mpirun.run(3, [str(EXAMPLES / "large_model.py"), *sizes], 100)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_lm_saves_what_a_plain_model_loads(tmp_path: Path) -> None:
    saved, prefixed = tmp_path / "lm.pt", tmp_path / "prefixed.pt"
    text = tmp_path / "text.txt"
    text.write_text("Grüße, the quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")

    stdout, digest = run_example("lm.py", 1, text, "--steps", 20, "--save", saved, "--generate", 40)
    before, after = held_out_bits(stdout)
    assert after < before - 1

    lm = load_example("lm")
    state = torch.load(saved, weights_only=True)
    lm.CharLM().load_state_dict(state)  # strict: raises where a name is missing or unknown
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, prefixed)
    for path in (saved, prefixed):
        loaded = lm.load_model(path).state_dict()
        assert list(loaded) == list(state)
        assert all(torch.equal(loaded[name], state[name]) for name in state)

    # and the program itself goes on from there, on another number of ranks
    stdout, reloaded = run_example("lm.py", 2, text, "--steps", 0, "--load", prefixed)
    assert reloaded == digest
    assert held_out_bits(stdout) == pytest.approx((after, after), abs=2e-3)
