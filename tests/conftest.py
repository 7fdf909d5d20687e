"""Fixtures that tests share: the world of ranks, torch's own group over it, settings to try.

Only tests marked `mpi` initialise MPI here; the others must not, they may start mpirun.
"""

import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# What tests import besides mpiddp; launch.py starts pytest there.
if (support := str(Path(__file__).parent / "support")) not in sys.path:
    sys.path.insert(0, support)

# How long a collective waits in a test: less than the time limit of a test, so that a rank
# that waits in vain says so itself.
TIMEOUT = timedelta(seconds=30)


# Time-outs on purpose write what the ranks did: not into the user's folders.
os.environ.setdefault(
    "TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/mpiddp-tests-flight-recorder/rank_"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --slow, which `make test-all` gives, and --simulated-gpu."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--simulated-gpu",
        action="store_true",
        help="let CPU tensors go the way of GPU tensors, on a simulated GPU",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests, and those for a GPU, unless they were asked for."""
    left_out = set() if config.getoption("slow") else {"slow"}
    # Not by a `-m` of pyproject.toml: one that is given replaces it.
    if not re.search(r"\bgpu\b", config.getoption("markexpr")):
        left_out.add("gpu")
    unwanted = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]
    import tiers

    tiers.settle(items)  # before `-m` looks at the marks


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give tests more time on a busy machine, before pytest-timeout sets its timer."""
    import patience

    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark is not None else item.config.getoption("timeout")
    if seconds and patience.factor() > 1:
        item.add_marker(pytest.mark.timeout(patience.enough(seconds)), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(path: Path) -> Generator[None, pytest.Collector, pytest.Collector]:
    """Let no test be taken for marked because its folder is called mpi: pytest-mpi looks there."""
    directory = yield
    if path.name == "mpi":
        directory.keywords = {}
    return directory


@pytest.fixture(autouse=True)
def _world_for_marked_tests(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mpi") is not None:
        request.getfixturevalue("world")


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Initialise mpiddp once for all tests of this process."""
    import mpiddp

    # One core a rank at best.
    torch.set_num_threads(1)
    mpiddp.init_process_group(timeout=TIMEOUT)
    if request.config.getoption("simulated_gpu"):
        from simulated_gpu import runtime

        from mpiddp.gpu.runtime import register

        register("cpu", runtime())
    yield
    # Collective: after a failure the other ranks may be anywhere.
    if not request.session.testsfailed:
        mpiddp.destroy_process_group()


@pytest.fixture(scope="session")
def gloo(world: None) -> dist.ProcessGroup:
    """Return a group of torch's Gloo over the same ranks, for torch's own DDP."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


@pytest.fixture(params=[False, True], ids=["copies", "views"])
def views(request: pytest.FixtureRequest) -> bool:
    """Try gradient_as_bucket_view off and on."""
    return bool(request.param)


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    """Let all ranks draw the same numbers, whatever ran before."""
    torch.manual_seed(20)
