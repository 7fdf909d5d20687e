"""Horovod's world for the tests of a file, on the world of mpiddp."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def horovod(request: pytest.FixtureRequest, world: None) -> Iterator[None]:
    """Initialise Horovod for one file: no thread of it is left for other tests."""
    import mpiddp.horovod as hvd

    hvd.init()
    yield
    # Collective: after a failure the other ranks may be anywhere.
    if not request.session.testsfailed:
        hvd.shutdown()


@pytest.fixture(autouse=True)
def _horovod_for_marked_tests(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mpi") is not None:
        request.getfixturevalue("horovod")
