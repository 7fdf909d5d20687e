"""The random numbers of a real GPU after a loss or a restart, see elastic/random_states.py."""

import pytest
import torch
from replicas import RANK, gather, together

from mpiddp.elastic import random_states

pytestmark = [pytest.mark.gpu, pytest.mark.mpi(min_size=2)]


@pytest.fixture(autouse=True)
def as_before():
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    torch.cuda.init()
    states = random_states.current()
    yield
    random_states.put_back(states)


def drawn():
    return torch.rand(5, device="cuda").tolist()


def test_goes_on_where_it_was():
    torch.cuda.manual_seed(RANK)
    drawn()
    packed = random_states.packed(random_states.current())
    expected = drawn()
    random_states.put_back(random_states.unpacked(packed))
    with together():
        assert drawn() == expected


def test_who_comes_has_a_stream_of_its_own():
    torch.cuda.manual_seed(0)
    source = random_states.packed(random_states.current())
    random_states.derive(source, RANK)
    own = drawn()
    random_states.derive(source, RANK)
    again = drawn()
    of_ranks = gather(own)
    with together():
        assert again == own
        assert len(set(map(tuple, of_ranks))) == len(of_ranks)
