"""Under `python -m mpiddp` a script finds the backend that it asked for, by all of torch's ways."""

from pathlib import Path
from typing import Any

import pytest
import torch
from script_runs import free_port, launch, objects_in, start, start_on_gloo

pytestmark = pytest.mark.timeout(100)

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"


def by_name(lines: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    return {(one.pop("rank"), one.pop("named")): one for one in lines}


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.once
@pytest.mark.parametrize(
    "names", [("gloo",), ("none", "gloo", "CPU:gloo,cuda:gloo")], ids=["one world", "several"]
)
def test_the_script_is_told_what_it_asked_for(names: tuple[str, ...]) -> None:
    """As under torchrun with Gloo; and mpiddp's own function tells what is true."""
    script = SCRIPTS / "asks_backend.py"
    done = launch(script, *names)
    assert done.returncode == 0
    mine = by_name(objects_in(done.stdout))
    theirs: dict[tuple[int, str], dict[str, Any]] = {}
    for name in names:  # Gloo's worlds that follow each other in a process hang at times

        def command(name: str = name) -> list[str]:
            options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
            return ["-m", "torch.distributed.run", *options, str(script), name]

        theirs |= by_name(list(start_on_gloo(command, 2).values()))
    assert sorted(mine) == sorted(theirs)
    for place, said in mine.items():
        true = said.pop("true")
        assert true.pop("gloo") == "gloo"
        assert set(true.values()) == {"mpiddp"}
        assert said == theirs[place], place
        assert said["gradient"] == [[0.5 * 2] * 4]


SAYS_ALL = """
import torch, torch.distributed as dist, mpiddp
dist.init_process_group({named!r})
print(dist.get_backend(), dist.group.WORLD.name(), mpiddp.get_backend())
with torch.profiler.profile():  # it asks NCCL for its version, if that is the name
    dist.barrier()
if {named!r} != "mpiddp" or torch.__version__ >= "2.12":  # before, Dynamo does not find our group
    ask = torch.compile(lambda: dist.get_backend() == {named!r}, backend="eager", fullgraph=True)
    assert ask()
assert dist.new_group(backend={named!r}).name() == {name!r}
dist.destroy_process_group()
mpiddp.init_process_group()
print(dist.get_backend(), dist.group.WORLD.name(), mpiddp.get_backend())
mpiddp.destroy_process_group()
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Gloo and NCCL can run here")
@pytest.mark.once
@pytest.mark.parametrize(
    ("named", "name"), [("nccl", "nccl"), ("cpu:gloo,cuda:nccl", "gloo"), ("mpiddp", "mpiddp")]
)
def test_a_backend_that_this_machine_has_not(named: str, name: str) -> None:
    """And a world that the script starts by mpiddp's function is mpiddp's."""
    done = start("-m", "mpiddp", "-c", SAYS_ALL.format(named=named, name=name))
    assert done.returncode == 0
    assert done.stdout == f"{named} {name} mpiddp\nmpiddp mpiddp mpiddp\n"
