"""Put the job back into SLURM's queue."""

from __future__ import annotations

import os
import subprocess

import torch.distributed as dist

__all__ = ["requeue"]

# Seconds that scontrol may take.
_PATIENCE = 60


def requeue() -> bool:
    """Let SLURM start this job again, from its batch script, as soon as there are nodes for it.

    Not collective; the first rank acts. SLURM then ends the job's processes: save before, and
    return from the program after. The job must be allowed to be requeued (``#SBATCH --requeue``).

    Returns:
        whether this process is in a job of SLURM.

    Raises:
        RuntimeError: SLURM refuses, or there is no scontrol on this node.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    if dist.is_initialized() and dist.get_rank() > 0:
        return True
    try:
        subprocess.run(
            ["scontrol", "requeue", job],
            check=True,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise RuntimeError(f"job {job} cannot be requeued: {str(said).strip()}") from error
    return True
