"""The wrapped modules of a group, which the roll call's thread reads while others are wrapped."""

import sys
import threading
import time

import pytest

from mpiddp.flight_recorder import sources
from mpiddp.watch.wrapped_modules import WrappedModules

pytestmark = pytest.mark.once


class Module:
    """Only numbered."""


@pytest.mark.essential
def test_read_while_one_is_added() -> None:
    group = sources.add(sources.Source("", range(2)))
    modules = WrappedModules(group)
    added: list[Module] = []
    ended = threading.Event()

    def add() -> None:
        while not ended.is_set():
            if len(added) >= 500:
                added.clear()
            added.append(Module())
            modules.add(added[-1], "Module")  # type: ignore[arg-type]

    thread = threading.Thread(target=add)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            modules.all()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
        sources.begin()
    assert modules.all() == added
