"""Put the job back into SLURM's queue, unless SLURM has cancelled it or has put it there itself.

SLURM's word decides what becomes of a job, not the signal that came: it sends SIGTERM to the
processes of a job that is cancelled, preempted, requeued or out of time.

Note [Who requeues a job of several steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
SLURM ends all steps of a job that is requeued, and another training in it may still be saving. So a
step that has saved says so in the job's comment, which all steps see, and waits until each other
step has said so too, or has ended. The one that sees it first requeues.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import NamedTuple

import torch.distributed as dist

from mpiddp import launchers

__all__ = ["requeue"]

# Seconds that scontrol may take.
_PATIENCE = 60
# Seconds to wait for other steps, and between two looks at them.
_MOST_FOR_OTHERS, _NAP = 60.0, 1.0
# Seconds before the job's end at which nobody is waited for any more.
_BEFORE_THE_END = 15.0

# In a job's comment: the steps that have saved in this start of the job.
_SAVED = re.compile(r" ?mpiddp-saved-(\d+):([\d,]*)")


def requeue() -> bool:
    """Let SLURM start this job again, from its batch script, as soon as there are nodes for it.

    Not collective; the first rank acts. SLURM then ends the job's processes: save before, and
    return from the program after. The job must be allowed to be requeued (``#SBATCH --requeue``).
    A job that somebody has cancelled stays so. Of an array only this task is started again. Where
    other steps of the job still work, it waits up to a minute until they have called this too, or
    have ended.

    Returns:
        whether SLURM starts the job again; on other ranks than the first, which do not know,
        whether this process is in a job of SLURM.

    Raises:
        RuntimeError: SLURM refuses, or there is no scontrol on this node.
    """
    job = _own_job()
    if job is None:
        return False
    if dist.is_initialized() and dist.get_rank() > 0:
        return True
    try:
        told = _look(job)
        deadline = time.monotonic() + min(_MOST_FOR_OTHERS, told.left - _BEFORE_THE_END)
        while told.goes_on and time.monotonic() < deadline and _others_work(job, told):
            time.sleep(_NAP)
            told = _look(job)
        if told.goes_on or told.may_come_back:
            _scontrol("requeue", job)
        elif not told.comes_back:
            print(
                f"mpiddp: job {job} has been cancelled: it is not put back into the queue",
                file=sys.stderr,
                flush=True,
            )
            return False
    except (OSError, subprocess.SubprocessError) as error:
        if _comes_back(job):  # meanwhile, by another step or by SLURM itself
            return True
        said = getattr(error, "stderr", None) or error
        raise RuntimeError(f"job {job} cannot be requeued: {str(said).strip()}") from error
    return True


class _Job(NamedTuple):
    """What SLURM says of a job.

    Attributes:
        goes_on: whether it runs, with nothing decided about its end.
        comes_back: whether SLURM has put it back into the queue already.
        may_come_back: whether it is at its end, but not because somebody has cancelled it.
        left: seconds to its time limit, infinite where that is not known.
        comment: the user's, and what steps have added.
    """

    goes_on: bool
    comes_back: bool
    may_come_back: bool
    left: float
    comment: str


def _own_job() -> str | None:
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    # The number that a task has for itself is the array's for one of them, and that means all.
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def _scontrol(*arguments: str) -> str:
    done = subprocess.run(
        ["scontrol", *arguments], check=True, capture_output=True, text=True, timeout=_PATIENCE
    )
    return done.stdout


def _look(job: str) -> _Job:
    said = _scontrol("--oneliner", "show", "job", job)
    told = dict(re.findall(r"(\w+)=(\S*)", said))
    state = told.get("JobState", "")
    comment = re.search(r" Comment=(.*?) (?=\w+=)", said)
    restarts, before = told.get("Restarts", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    again = restarts.isdigit() and before.isdigit() and int(restarts) > int(before)
    return _Job(
        # A state that is not known here may be of another SLURM: that job goes on.
        goes_on=not again and not state.startswith(("COMPLETING", "CANCELLED", "PENDING", *_ENDS)),
        comes_back=again or state == "PENDING",
        may_come_back=not again
        and (
            state.startswith(_ENDS)
            or told.get("Reason") == "TimeLimit"
            or told.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")
        )
        and not state.startswith("CANCELLED"),
        left=_seconds_until(told.get("EndTime", "")),
        comment=comment[1] if comment else "",
    )


# How a job ends that nobody has cancelled.
_ENDS = ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE")


def _comes_back(job: str) -> bool:
    try:
        return _look(job).comes_back
    except (OSError, subprocess.SubprocessError):
        return False


def _seconds_until(end: str) -> float:
    try:
        return time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S")) - time.time()
    except ValueError:
        return float("inf")


def _others_work(job: str, told: _Job) -> bool:
    """Return whether a step of the job has not saved yet; say that this one has. Not collective."""
    own = os.environ.get("SLURM_STEP_ID", "")
    others = set()
    for step, state, name in re.findall(
        r"StepId=\S*?\.(\d+)\S* .*? State=(\S+) .*? Name=(\S*)",
        _scontrol("--oneliner", "show", "step", job),
    ):
        # The helpers that mpirun starts have a step, too, which is not always this process's.
        if step != own and state == "RUNNING" and not name.startswith(launchers.PROGRAMS):
            others.add(step)
    if not others:
        return False
    found = _SAVED.search(told.comment)
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    saved = set(found[2].split(",")) if found and found[1] == start else set()
    if others <= saved:
        return False
    if own.isdigit() and own not in saved:
        words = f"mpiddp-saved-{start}:{','.join(sorted({*saved, own} - {''}))}"
        comment = f"{_SAVED.sub('', told.comment)} {words}".strip().replace("(null)", "").strip()
        _scontrol("update", f"JobId={job}", f"Comment={comment}")
    return True
