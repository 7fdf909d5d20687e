"""Training that a real SLURM's `srun` starts, on whichever MPI runs here (lab/README.md).

docs/reference/mpis.md has what each MPI needs for it.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import mpirun
import pytest
from slurm_lab import ROOT, Hosts, start_hosts

# Another plugin than an MPI needs, and what its processes say then: mpiddp, or that MPI itself.
REFUSED = {
    "Open MPI": ("pmi2", "this process is rank 0 of 1|OMPI was not built with SLURM's PMI support"),
    "MPICH": ("pmix", "this process is rank 0 of 1|uses unsupported PMI version PMIx"),
    "Intel MPI": ("none", "this process is rank 0 of 1"),
}
EPOCH = re.compile(r"^epoch 1: loss ([\d.]+), accuracy [\d.]+%$", re.M)
DIGEST = re.compile(r"^all (\d) replicas hold the same bits: sha256 \w{64}$", re.M)

pytestmark = [
    pytest.mark.essential,
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="the lab is made of Linux namespaces"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts(2) as made:
        yield made


def of_debian() -> bool:
    """Whether the MPI that runs here is a package of Debian: make links its programs to them."""
    return "exec /usr/bin/" in Path(mpirun.find()).read_bytes()[:200].decode("latin-1")


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_as_on_one_machine(hosts: Hosts, ranks: int) -> None:
    """With 3 ranks one node has two of them."""
    example = [str(ROOT / "examples" / "train.py"), "--epochs", "1"]
    done = hosts.srun(*example, ranks=ranks, variables={} if of_debian() else None)
    assert done.returncode == 0, done.stderr
    assert f"world: {ranks} ranks on 2 nodes\n" in done.stdout
    digests = DIGEST.findall(done.stdout)
    assert digests == [str(ranks)]

    alone = mpirun.run(ranks, example, timeout=60)
    assert alone.returncode == 0, alone.stderr
    assert f"world: {ranks} ranks on 1 nodes\n" in alone.stdout
    # Sums are made in another order between nodes.
    losses = [float(found) for out in (done, alone) for found in EPOCH.findall(out.stdout)]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_another_plugin_is_refused(hosts: Hosts) -> None:
    """No process trains a model of its own."""
    plugin, said = REFUSED[hosts.mpi]
    example = str(ROOT / "examples" / "train.py")
    done = hosts.srun(example, "--epochs", "1", ranks=2, plugin=plugin)
    assert done.returncode != 0
    assert re.search(said, done.stderr)
    assert "epoch 1" not in done.stdout
