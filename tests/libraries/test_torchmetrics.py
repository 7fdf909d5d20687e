"""Metrics of torchmetrics gather their states over our groups."""

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, gather, together

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.once]


def test_metrics_of_all_ranks(gloo):
    """Sums, lists of uneven length and maxima, over the world, a part of it and Gloo."""
    import torchmetrics  # it takes seconds

    # Each rank has another number of values.
    own = torch.arange(RANK + 1.0) + 10 * RANK
    everyone = torch.cat(gather(own))
    for group in (None, dist.group.WORLD, gloo):
        computed = {}
        for name, kind in {
            "sum": torchmetrics.SumMetric,
            "mean": torchmetrics.MeanMetric,
            "max": torchmetrics.MaxMetric,
            "all": torchmetrics.CatMetric,
            "square": torchmetrics.MeanSquaredError,
        }.items():
            metric = kind(process_group=group)
            metric.update(*((own, own.neg()) if name == "square" else (own,)))
            computed[name] = metric.compute()
            assert metric.update_count == 1
        with together():
            assert computed["all"].tolist() == everyone.tolist()
            assert computed["sum"] == everyone.sum()
            assert computed["mean"] == pytest.approx(everyone.mean().item())
            assert computed["max"] == everyone.max()
            assert computed["square"] == pytest.approx((4 * everyone.square().mean()).item())


def test_metric_of_a_group():
    import torchmetrics

    pair = dist.new_group([0, SIZE - 1])
    if RANK in (0, SIZE - 1):
        metric = torchmetrics.SumMetric(process_group=pair)
        metric.update(float(RANK + 1))
        assert metric.compute() == SIZE + 1
        dist.destroy_process_group(pair)
    dist.barrier()
