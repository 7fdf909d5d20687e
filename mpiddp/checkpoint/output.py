"""A file that torch.save writes to, whose errors are those of the file system.

With the name of a file, or one of Python's, torch raises "unexpected pos" where the disk is full:
it goes on to the end of its archive. With a name it also keeps the file open until the collector
comes, so that a full disk stays full.
"""

from __future__ import annotations

from typing import IO, Any

from mpiddp import shown_progress

__all__ = ["Output"]

# Written at a time.
_BLOCK = 1 << 24


class Output:
    """Takes what is written to `file`; after an error it takes all, until `flush` raises that.

    Not collective.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write, and return how many bytes there were."""
        whole = memoryview(data).cast("B")
        for first in range(0, len(whole), _BLOCK):
            if self._error is not None:
                break
            block = whole[first : first + _BLOCK]
            try:
                self._file.write(block)
            except OSError as error:
                self._error = error
            else:
                shown_progress.advance(len(block))
        return len(whole)

    def flush(self) -> None:
        """Flush the file; torch.save does at its end.

        Raises:
            OSError: something could not be written.
        """
        if self._error is not None:
            raise self._error
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        """Flush and close the file.

        Raises:
            OSError: something could not be written.
        """
        self.flush()
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
