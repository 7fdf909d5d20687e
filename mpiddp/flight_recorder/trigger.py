"""Write the records when a signal comes from outside, even if all threads wait inside of MPI.

A handler in C wakes a thread by a pipe; see signals.pyx. Only a call that keeps the GIL can hold
this thread up: MPI's calls do not.
"""

from __future__ import annotations

import contextlib
import os
import threading

from mpiddp import settings
from mpiddp.flight_recorder import files, page, signals
from mpiddp.system import rank_signs

__all__ = ["Trigger"]

_DUMP, _END = b"\1", b"\0"


class Trigger:
    """Waits for the signal MPIDDP_DUMP_SIGNAL. Not collective."""

    def __init__(self) -> None:
        self._number = settings.DUMP_SIGNAL.read()
        self._thread: threading.Thread | None = None
        self._listen()
        listens_to = 0 if self._thread is None else self._number
        world = {**files.world(), "page": page.descriptor(), "layout": page.layout()}
        self._sign = rank_signs.put_up(listens_to, files.rank(), files.where(), world)

    def _listen(self) -> None:
        if not self._number or not files.size_wanted():
            return
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        if not signals.install(self._number, self._write_end):
            self._close()
            return
        self._thread = threading.Thread(
            target=self._wait, name="mpiddp flight recorder", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Leave the signal to others. Harmless when called twice."""
        rank_signs.take_down(self._sign)
        self._sign = -1
        thread, self._thread = self._thread, None
        if thread is None:
            return
        signals.remove()
        os.write(self._write_end, _END)
        thread.join()
        self._close()

    def _wait(self) -> None:
        while os.read(self._read_end, 1) == _DUMP:
            with contextlib.suppress(Exception):
                files.say("a signal asked for it")

    def _close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)
