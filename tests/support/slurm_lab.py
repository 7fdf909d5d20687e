"""A cluster of some nodes for tests, with a real SLURM or without (tests/lab/README.md)."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import mpirun
import pytest

__all__ = ["ROOT", "Hosts", "reason_to_skip", "start_hosts"]

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "tests" / "lab" / "cluster"
# What srun needs to start ranks. The variables are for the PyPI wheels; Debian's MPIs go without.
SRUN = {
    "Open MPI": ("pmix", {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native"}),
    "MPICH": ("pmi2", {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
    "Intel MPI": ("pmi2", {}),
}
# Programs are to need none of what a Makefile or an mpirun before them may have set.
LEFT_OUT = (
    *("OMPI_", "PRTE_", "PMIX_", "PMI_", "MPIR_", "MPICH_", "I_MPI_", "FI_", "SLURM_", "OMP_"),
)


class Hosts:
    """A head and some nodes.

    Args:
        folder: for the files of jobs, which all hosts have in common.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mpi = _running_mpi()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
        self.env["LAB_DIR"] = str(folder / "lab")

    def cluster(self, *args: str, timeout: float = 30) -> str:
        """Run the lab's command and return what it printed."""
        done = self.try_cluster(*args, timeout=timeout)
        assert done.returncode == 0, f"cluster {args}: {done.returncode}\n{done.stderr}"
        return done.stdout

    def try_cluster(self, *args: str, timeout: float = 30) -> "subprocess.CompletedProcess[str]":
        """Run the lab's command, whatever its exit status."""
        # the command goes on in namespaces: only timeout(1) can end it whole
        return subprocess.run(
            ["timeout", "-k", "5", str(timeout), str(CLUSTER), *args],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout + 20,
            check=False,
        )

    def on_head(self, *command: str) -> str:
        return self.cluster("run", "head", *command).strip()

    def srun(
        self,
        *command: str,
        ranks: int = 4,
        nodes: int = 2,
        options: Sequence[str] = (),
        timeout: float = 60,
        plugin: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python COMMAND` on so many ranks, as many on each node.

        Args:
            command: a script and its arguments.
            ranks: how many.
            nodes: on how many nodes.
            options: more of srun.
            timeout: seconds.
            plugin: another one than that of the running MPI.
            variables: others than this MPI's wheel needs.
        """
        fitting, needed = SRUN[self.mpi]
        plugin = plugin or fitting
        variables = needed if variables is None else variables
        settings = [
            f"{name}={value}" for name, value in {**variables, "OMP_NUM_THREADS": "1"}.items()
        ]
        # Elsewhere than in the root, where the uncompiled mpiddp lies.
        done = self.try_cluster(
            *("run", "head", "env", *settings, "srun", f"--chdir={self.folder}"),
            *(f"--nodes={nodes}", f"--ntasks={ranks}", f"--mpi={plugin}", *options),
            *(sys.executable, *command),
            timeout=timeout,
        )
        print(done.stdout, done.stderr)  # pytest shows it when the test fails
        return done

    def mpirun(
        self,
        where: str,
        *command: str,
        options: Sequence[str] = (),
        turns: bool = False,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python COMMAND` from the head with mpirun.

        Args:
            where: nodes and how many ranks each, as "node1:3,node2:1".
            command: a script and its arguments.
            options: more of mpirun.
            turns: whether ranks are placed by turns, each on the next node that has room.
            timeout: seconds.
            env: is added to the environment of the ranks.
            before: a command that starts mpirun.
        """
        agent = self.env["LAB_DIR"] + "/agent"
        rooms = {
            node: int(room) for node, _, room in (each.partition(":") for each in where.split(","))
        }
        if self.mpi == "Open MPI":
            words = ["--prtemca", "plm_ssh_agent", agent, "--host", where]
            words += ["--map-by", "node" if turns else "slot"]
        else:
            placed = ",".join(_by_turns(rooms)) if turns else where
            words = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", placed]
        settings = [
            f"{name}={value}"
            for name, value in ({"OMP_NUM_THREADS": "1"} | dict(env or {})).items()
        ]
        done = self.try_cluster(
            *("run", "head", "env", *settings, *before, mpirun.find(), *words, *options),
            *("-n", str(sum(rooms.values())), sys.executable, *command),
            timeout=timeout,
        )
        print(done.stdout, done.stderr)  # pytest shows it when the test fails
        return done


@contextlib.contextmanager
def start_hosts(nodes: int, slurm: bool = True) -> Iterator[Hosts]:
    """Start a cluster that ends with this process at the latest; skip the test where none can be.

    Args:
        nodes: how many, besides the head.
        slurm: whether SLURM runs there.
    """
    if reason := reason_to_skip(slurm):
        pytest.skip(reason)
    # In /tmp, whatever TMPDIR is: the hosts have it in common, and not /var/tmp.
    with tempfile.TemporaryDirectory(prefix="mpiddp-slurm-", dir="/tmp") as name:
        hosts = Hosts(Path(name))
        if slurm and hosts.mpi not in SRUN:
            pytest.skip(f"how srun starts {hosts.mpi} is not known")
        # The cluster goes down when this process closes the pipe, even by being killed.
        guard = subprocess.Popen(
            ["bash", "-c", 'cat; "$0" clear; "$0" down', str(CLUSTER)],
            env=hosts.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _bring_up(hosts, nodes, slurm)
            yield hosts
        finally:
            guard.communicate(timeout=30)


def _bring_up(hosts: Hosts, nodes: int, slurm: bool) -> None:
    try:
        hosts.cluster("up", str(nodes), *(["--slurm"] if slurm else []), timeout=150)
    except AssertionError as error:
        log = hosts.folder / "lab" / "log" / "apt.log"
        if slurm and log.exists() and not shutil.which("slurmctld"):
            lines = log.read_text(encoding="utf-8").splitlines()[-3:]
            pytest.skip(f"SLURM's packages cannot be installed: {' / '.join(lines) or error}")
        raise


def _by_turns(rooms: Mapping[str, int]) -> Iterator[str]:
    """Yield a node with one rank again and again, those with room in turn."""
    for turn in range(max(rooms.values())):
        yield from (f"{node}:1" for node, room in rooms.items() if room > turn)


def _running_mpi() -> str:
    """Return the name of the MPI that mpi4py loads, without initialising it in this process."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI; print(MPI.get_vendor()[0])"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def reason_to_skip(slurm: bool = True) -> str | None:
    """Return why no hosts can be made here, None if they can."""
    if os.geteuid() != 0:
        return "making hosts needs root"
    if not shutil.which("apt-get") and (slurm or not shutil.which("ip")):
        return "what hosts need comes from Debian's packages, and there is no apt-get"
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*probe, "true"], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces cannot be made here: {error}"
    return None
