"""hvd.elastic.ElasticSampler: its states on all ranks, and those of other versions."""

import itertools

import pytest
from replicas import RANK, SIZE, gather, together

import mpiddp.horovod as hvd
from mpiddp.horovod import elastic

pytestmark = pytest.mark.mpi


def all_of(values):
    return sorted(itertools.chain(*gather(list(values))))


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batches", [1, 2])
def test_rank_0_saves_and_all_load(shuffle, batches):
    """Nothing is dealt twice, and nothing is left out."""
    data = range(8 * SIZE)
    before = hvd.elastic.ElasticSampler(data, shuffle)
    done = list(before)[: 2 * batches]
    for number in range(batches):
        before.record_batch(number, 2)
    saved = gather(before.state_dict())[0]
    after = hvd.elastic.ElasticSampler(data, shuffle)
    after.load_state_dict(saved)
    with together():
        assert before.state_dict() == saved
        assert len(after) == 8 - 2 * batches
        assert all_of(done + list(after)) == list(data)


def test_an_epoch_that_has_begun_is_dealt_as_before():
    """A loader that is asked for batches again, without a reset, deals the whole epoch."""
    sampler = hvd.elastic.ElasticSampler(range(4 * SIZE))
    first = list(sampler)
    sampler.record_batch(0, 2)
    again = list(sampler)
    sampler.set_epoch(0)
    with together():
        assert first == again == list(sampler)
        assert sampler.processed_num == 0


# What Horovod 0.28.1 deals of 11 elements with seed 3 in epoch 2: to two ranks, and to three that
# go on when each of the two has processed a batch of two.
OF_TWO = [[10, 8, 1, 6, 5, 9], [2, 7, 3, 0, 4, 10]]
THEN_OF_THREE = [[1, 0, 9], [3, 5, 1], [6, 4, 3]]


@pytest.mark.skipif(SIZE > 3, reason="one table has two ranks, one has three")
def test_goes_on_from_a_state_of_0_28(monkeypatch):
    state = {"epoch": 2, "processed_num": 4}
    with together():
        for ranks, dealt in ((2, OF_TWO), (3, THEN_OF_THREE)):
            for rank, expected in enumerate(dealt):
                monkeypatch.setattr(elastic, "_place", lambda place=(rank, ranks): place)
                sampler = hvd.elastic.ElasticSampler(range(11), seed=3)
                if ranks == 2:
                    sampler.set_epoch(2)
                else:
                    sampler.load_state_dict(state)
                assert list(sampler) == expected
                if ranks == 2:
                    sampler.record_batch(0, 2)
                assert sampler.state_dict() == state


def test_a_state_that_names_elements():
    """Of Horovod before 0.28: what it names is not dealt, until the next epoch."""
    data = range(4 * SIZE)
    named = set(range(0, 4 * SIZE, 2))
    sampler = hvd.elastic.ElasticSampler(data)
    sampler.load_state_dict({"epoch": 1, "processed_indices": named})
    rest = all_of(sampler)
    mine = list(sampler)[:1]
    sampler.record_batch(0, 1)
    again = hvd.elastic.ElasticSampler(data)
    again.load_state_dict(sampler.state_dict())
    with together():
        assert rest == list(range(1, 4 * SIZE, 2))
        assert all_of(mine + list(again)) == rest
        again.set_epoch(2)
        assert all_of(again) == list(data)


def test_a_state_that_says_nothing():
    sampler = hvd.elastic.ElasticSampler(range(4))
    with together(), pytest.raises(KeyError, match="this one has epoch"):
        sampler.load_state_dict({"epoch": 1})
    with together():
        assert (sampler.rank, sampler.num_replicas) == (RANK, SIZE)
