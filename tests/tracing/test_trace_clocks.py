"""Clocks of ranks, compared by messages: on one host all ranks have the same one."""

import pytest
from mpi4py import MPI

from mpiddp.mpi.nodes import Topology, find_topology
from mpiddp.tracing import clocks

pytestmark = [pytest.mark.mpi, pytest.mark.smoke]

COMM = MPI.COMM_WORLD


@pytest.mark.mpi(min_size=2)
def test_one_hosts_offset_is_zero_within_what_is_said():
    communicator = COMM.Dup()
    meeting = clocks.Meeting(communicator, find_topology(communicator))
    least = 1.0
    for _ in range(20):
        own = meeting.measure()
        # What is said holds always; that it is small, where two ranks get a core each at a time.
        assert abs(own.seconds) <= own.error + 1e-9
        assert (own.error == 0) == (COMM.rank == 0)
        least = min(COMM.allgather(own.error if COMM.rank else 1.0))
        if least < 20e-6:
            break
    communicator.Free()
    assert least < 20e-6


@pytest.mark.mpi(min_size=3)
def test_ranks_of_other_nodes_ask_the_first_of_theirs():
    # As if each rank but the first two were a node of its own.
    node = max(COMM.rank - 1, 0)
    topology = Topology(
        COMM.rank, COMM.size, int(COMM.rank == 1), 2 if node == 0 else 1, node, COMM.size - 1
    )
    communicator = COMM.Dup()
    own = clocks.Meeting(communicator, topology).measure()
    communicator.Free()
    assert abs(own.seconds) <= own.error + 1e-9


def test_clocks_that_run_apart_are_corrected_between_beginning_and_end():
    clock = clocks.Clock(100.0, clocks.Offset(50.0, 51.0, 1e-6), clocks.Offset(60.0, 51.1, 3e-6))
    assert clock.microseconds(50.0) == pytest.approx(1e6)
    assert clock.microseconds(55.0) == pytest.approx(6.05e6)
    assert clock.microseconds(60.0) == pytest.approx(11.1e6)
    assert clock.error() == 3e-6
    assert clocks.Clock(0.0, clocks.Offset(1.0), None).drift() == 0
