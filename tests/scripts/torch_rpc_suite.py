"""Run one of torch's own tests of DDP with distributed autograd, in ranks that are there already.

    torchrun --nproc-per-node 6 torch_rpc_suite.py test_backward_ddp_inside

The tests are those of the wheel, in torch.testing._internal.distributed. Six ranks run those of
the first class (four trainers, a master, and a worker with parameters of its own), four those of
the second. torch's own runner would start the processes itself. One test a process: torch's RPC
does not start twice in one.
"""

import os
import sys
import tempfile

from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as suite
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CLASSES = {6: suite.DdpUnderDistAutogradTest, 4: suite.DdpComparisonTest}


class OneRank(TensorPipeRpcAgentTestFixture, CLASSES[WORLD_SIZE], TestCase):
    """The suite in a process that is a rank."""

    rank = RANK
    # The same file on all ranks, which have one parent.
    file_name = f"{tempfile.gettempdir()}/torch-rpc-suite-{os.getppid()}"

    def runTest(self) -> None:
        """Unused: the methods are called."""


getattr(OneRank(), sys.argv[1])()
print(f"rank {RANK}: {sys.argv[1]} passed", flush=True)
