"""Run the doctor with a fault in the ranks of some hosts.

    doctor_with_fault.py FAULT HOST,HOST... [argument of the doctor ...]

The fault is made after the imports: a slow host would need minutes for them.
"""

import os
import resource
import socket
import sys
from pathlib import Path

from mpiddp import doctor

FAULT, HOSTS, *ARGUMENTS = sys.argv[1:]


def one_core() -> None:
    """As a launcher does that binds the ranks of each job from the first core on."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def few_addresses() -> None:
    """As `ulimit -v`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = used + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def slow_processor() -> None:
    """As heat does, or neighbours on a shared machine: the test has made the group."""
    Path(os.environ["SLOW_GROUP"], "cgroup.procs").write_text(str(os.getpid()))


if socket.gethostname() in HOSTS.split(","):
    {each.__name__: each for each in (one_core, few_addresses, slow_processor)}[FAULT]()
sys.exit(doctor.main(ARGUMENTS))
