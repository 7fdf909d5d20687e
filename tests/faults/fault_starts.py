"""The ways to start the ranks of a job: three on this machine, or two on a host and one on another.

mpirun: on this machine.
mpirun-hosts: two ranks on a host, the last one on another.
srun: the same, by SLURM, which leaves the other ranks alone when one ends (its default).
srun-node: all on one host, else as srun.
srun-kill: as srun with --kill-on-bad-exit.
torchrun, torchrun-hosts: torch's own launcher, for Gloo.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import mpirun
from fault_hosts import NODES, Lab
from script_runs import SCRIPTS

import mpiddp

__all__ = ["ON_HOSTS", "RANKS", "launch"]

RANKS = 3
ON_HOSTS = ("mpirun-hosts", "srun", "srun-node", "srun-kill", "torchrun-hosts")

_MPI = mpiddp.compiled_against()[0]
_SPREAD = (f"{NODES[0]}:2", f"{NODES[1]}:1")
_SRUN = {
    "srun": ("--nodes=2", "--kill-on-bad-exit=0"),
    "srun-node": ("--nodes=1", "--kill-on-bad-exit=0"),
    "srun-kill": ("--nodes=2", "--kill-on-bad-exit=1"),
}
# What srun needs to start ranks of the PyPI wheels.
_PLUGIN = {
    "Open MPI": ("pmix", {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native"}),
    "MPICH": ("pmi2", {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
}
_PORT = 29500
# As it is at the start: pytest changes it while threads start jobs.
_INHERITED = dict(os.environ)


def launch(
    start: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    said: IO[bytes],
    lab: Lab | None,
) -> subprocess.Popen[bytes]:
    """Start fault.py in one of the ways above; what it prints goes to `said`."""
    script = [str(SCRIPTS / "fault.py"), *arguments]
    on_hosts = start in ON_HOSTS
    variables = {**_INHERITED, **mpirun.ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
    if on_hosts:
        assert lab is not None
        variables = {**lab.environment, **mpirun.ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"}
        command = _on_hosts(start, script, lab)
    elif start == "torchrun":
        command = [*_torchrun("--standalone", f"--nproc-per-node={RANKS}"), *script, "gloo"]
    else:
        command = [mpirun.find(), "-n", str(RANKS), sys.executable, *script]
    if start in _SRUN:
        variables |= _PLUGIN[_MPI][1]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        env={**variables, **environment},
        start_new_session=True,
    )


def _on_hosts(start: str, script: Sequence[str], lab: Lab) -> list[str]:
    if start == "torchrun-hosts":
        agents = []
        for number, node in enumerate(NODES):
            ranks = 2 if number == 0 else 1
            options = [f"--nnodes={len(NODES)}", f"--node-rank={number}", f"--master-port={_PORT}"]
            options += [f"--master-addr={NODES[0]}", f"--nproc-per-node={ranks}"]
            agents.append(lab.words("run", node, *_torchrun(*options), *script, "gloo"))
        # The status of the first, as of the node where a batch script runs.
        second, first = shlex.join(agents[1]), shlex.join(agents[0])
        return ["bash", "-c", f"{second} & {first}; status=$?; wait; exit $status"]
    if start in _SRUN:
        name = f"--job-name={Path(script[-1]).name}"
        options = [f"--ntasks={RANKS}", f"--mpi={_PLUGIN[_MPI][0]}", name, *_SRUN[start]]
        return lab.words("run", "head", "srun", *options, sys.executable, *script)
    agent = str(lab.folder / "agent")
    if _MPI == "Open MPI":
        options = ["--prtemca", "plm_ssh_agent", agent, "--host", ",".join(_SPREAD)]
        options += ["--map-by", "slot"]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", ",".join(_SPREAD)]
    program = [mpirun.find(), *options, "-n", str(RANKS), sys.executable, *script]
    return lab.words("run", "head", *program)


def _torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]
