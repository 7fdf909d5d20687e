"""Programs that know nothing of mpiddp, with --shared-parameters and without: the same numbers."""

from pathlib import Path
from typing import Any

import mpirun
import pytest
from script_runs import by_rank, launch, objects_in

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"

pytestmark = [pytest.mark.once, pytest.mark.timeout(240)]

PLAIN = '''
"""A schedule, clipping, an average, and resuming, with torch alone; two kinds of layers."""
import json, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(50, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
model = DistributedDataParallel(model)
average = torch.optim.swa_utils.AveragedModel(model.module)
losses = []
for step in range(8):
    torch.manual_seed(2 * step + rank)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 50)).square().mean()
    loss.backward()
    losses.append([loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()])
    optimizer.step()
    schedule.step()
    average.update_parameters(model.module)
    if step == 4 and rank == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[1] + "/saved")
    dist.barrier()
    if step == 6:
        of_model, of_optimizer = torch.load(sys.argv[1] + "/saved", weights_only=True)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
parameters = [*model.parameters(), *average.parameters()]
ends = [p.detach().double().abs().sum().item() for p in parameters]
print(json.dumps({"rank": rank, "losses": losses, "ends": ends}), flush=True)
held = 0
with open("/proc/self/smaps") as lines:
    counted = False
    for line in lines:
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            start, end = (int(text, 16) for text in words[0].split("-"))
            counted = any(start <= p.data_ptr() < end for p in model.parameters())
        elif counted and words[0] == "Anonymous:":
            held += int(words[1])
shares = model._shared_parameters is not None
print("shares" if shares else "alone", "own KiB", held, flush=True)
dist.destroy_process_group()
'''


def said(script: Path, folder: Path, *options: str) -> tuple[dict[int, Any], str]:
    folder.mkdir()
    done = launch(*options, script, folder)
    assert done.returncode == 0, done.stderr
    return by_rank(done.stdout), done.stdout


@pytest.mark.essential
def test_plain_script(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    expected, _ = said(script, tmp_path / "without")
    found, printed = said(script, tmp_path / "with", "--shared-parameters")
    assert found == expected
    # What was loaded is the node's again.
    assert printed.count("shares own KiB 0") == 2


def cases_of(printed: str) -> dict[tuple[Any, Any], Any]:
    """Return what each rank says of each case, without times."""
    found = {(one.pop("case", None), one.pop("rank")): one for one in objects_in(printed)}
    for one in found.values():
        one.pop("times", None)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("accelerate_trainer.py", ""),
        ("lightning_trainer.py", ""),
        ("trainers/lightning_averages.py", ""),
        ("libraries/fabric_loop.py", ""),
        ("libraries/image_classifier.py", ""),
        ("libraries/character_gpt.py", "plain autocast"),
        (
            "libraries/transformers_trainer.py",
            "bert gpt2 accumulation unused bf16 checkpointing resume",
        ),
    ],
)
def test_libraries(name: str, cases: str, tmp_path: Path) -> None:
    """Trainers and scripts like public ones, unmodified."""
    said_by = []
    for options in ([], ["--shared-parameters"]):
        folder = tmp_path / f"{len(options)}"
        folder.mkdir()
        command = ["-m", "mpiddp", *options, SCRIPTS / name, folder, *cases.split()]
        env = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
        done = mpirun.run(2, command, timeout=250, env=env)
        if "No module named" in done.stderr:
            pytest.skip("a library is missing: `make test-all` installs it")
        assert done.returncode == 0, done.stderr
        said_by.append(cases_of(done.stdout))
    without, with_option = said_by
    assert with_option.keys() == without.keys()
    for place, own in with_option.items():
        theirs = without[place]
        # Fused optimizers round otherwise where parts end.
        total = pytest.approx(theirs.pop("sum", 0), rel=1e-9)
        assert own.pop("sum", 0) == total
        assert own == theirs, place
