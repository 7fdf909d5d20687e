"""What this process did last: its operations and buckets, for when a job hangs or ends.

The recorder is always on. `dump` writes what it knows to a file that torch's `torchfrtrace` reads;
`python -m mpiddp.flight_recorder FOLDER` says in words what the files of all ranks tell.

May import: the leaves, system, mpi, engine. Must never wait for another rank.
"""

from mpiddp.flight_recorder.files import dump
from mpiddp.flight_recorder.torch_format import as_dict, as_json

__all__ = ["as_dict", "as_json", "dump"]
