"""What the tests of the node's optimizer share."""

import pytest

from mpiddp.ddp import partial_means


@pytest.fixture(autouse=True)
def partial_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let means be partial at once: few tests take as many steps as others wait for readers."""
    monkeypatch.setattr(partial_means, "WHOLE_STEPS", 0)
