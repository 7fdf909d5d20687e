"""A script that connects to the store of torchrun's agent finds one, and none is served before."""

from pathlib import Path

import mpirun
import pytest
from script_runs import launch, objects_in

pytestmark = [pytest.mark.timeout(100), pytest.mark.once]

ASKS_AGENT = """
import json, os, socket
from datetime import timedelta
import torch.distributed as dist

address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["RANK"]
dist.init_process_group("gloo")
store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
assert isinstance(store, dist.TCPStore)
store.set(f"from {rank}", f"hello of {rank}")
other = store.get(f"from {1 - int(rank)}").decode()
again = dist.TCPStore(host_name=address, port=port, timeout=timedelta(seconds=30))
print(json.dumps({"rank": int(rank), "other": other, "count": again.add("both", 1) > 0}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.essential
def test_clients_of_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ASKS_AGENT)
    theirs = mpirun.run_torchrun(2, [script], timeout=80)
    mine = launch(script)
    assert mine.returncode == 0
    found = sorted(objects_in(mine.stdout), key=str)
    assert found == sorted(objects_in(theirs.stdout), key=str)
    assert [one["other"] for one in found] == ["hello of 1", "hello of 0"]


SERVES = """
import os, socket
from datetime import timedelta
import torch.distributed as dist

address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["RANK"]
dist.init_process_group("gloo")
with socket.socket() as probe:
    assert probe.connect_ex((address, port)), "somebody listens"
dist.barrier()
limit = timedelta(seconds=30)
store = dist.TCPStore(address, port, 2, rank == "0", timeout=limit)
store.set(rank, "here")
assert store.get(str(1 - int(rank))) == b"here"
dist.barrier()
dist.destroy_process_group()
"""


def test_the_port_is_the_script_s(tmp_path: Path) -> None:
    """As torch's RPC does: rank 0 serves a store of its own there."""
    script = tmp_path / "script.py"
    script.write_text(SERVES)
    assert launch(script).returncode == 0
