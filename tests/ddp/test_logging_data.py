"""`_get_ddp_logging_data`: the keys of torch's class, and its values where both can have them."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import GivenGradients, loss_of, mlp
from replicas import RANK, together
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true"),
]

# What torch tells of Gloo itself.
OF_GLOO = {"gloo_device_transport", "gloo_socket_ifname", "gloo_num_threads"}

# Of these only the key is the same: the transports differ, and the first buckets' limit.
OWN_VALUES = {"backend_name", "bucket_sizes"}

OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "both": {"static_graph": True, "find_unused_parameters": True},
}


class _Model(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.layers = mlp(3, 4, 2)
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)
        if unused:
            self.idle = mlp(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layers(x))
        return y


@pytest.mark.essential(keep=2)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("name", OPTIONS)
def test_keys_and_values(name, gloo):
    options = OPTIONS[name]
    module = _Model(name in ("unused", "static", "both"))
    ours = DDP(copy.deepcopy(module), **options)
    theirs = TorchDDP(copy.deepcopy(module), process_group=gloo, **options)
    for step in range(5):
        with together():
            data, truth = (model._get_ddp_logging_data() for model in (ours, theirs))
            # torch learns a static graph's order a step later, and rebuilds no bucket if
            # parameters may be unused.
            if step in (0, 4) and name != "unused":
                assert data.keys() == truth.keys() - OF_GLOO
            missing = {key for key in truth.keys() - data.keys() if "rebuilt" not in key}
            assert missing <= OF_GLOO
            for key in data.keys() & truth.keys() - OWN_VALUES:
                same = not any(word in key for word in ("time", "rebuilt", "order"))
                if same and step in (0, 4):
                    assert data[key] == truth[key], f"{key} in step {step}"
                if "time" in key and "start" not in key and "end" not in key:
                    assert data[key] >= 0
        for model in (ours, theirs):
            loss_of(model, torch.randn(4, 3, dtype=torch.float64)).backward()


@pytest.mark.essential
def test_times_of_a_step():
    """They are in order, and those of a slow forward are as long as it took."""
    wrapped = DDP(_Model(False))
    for _ in range(3):
        loss_of(wrapped, torch.randn(4, 3, dtype=torch.float64)).backward()
    data = wrapped._get_ddp_logging_data()
    with together():
        moments = [
            data[f"{name}_time_{end}"]
            for name, end in (
                ("forward_compute", "start"),
                ("backward_compute", "start"),
                ("backward_comm", "start"),
                ("backward_compute", "end"),
                ("backward_comm", "end"),
            )
        ]
        assert moments == sorted(moments)
        assert data["forward_compute_time"] == moments[1] - moments[0] > 0


def test_sample_rate(gloo):
    pair = (DDP(mlp(3, 2)), TorchDDP(mlp(3, 2), process_group=gloo))
    seen: list[list[int]] = [[], []]
    for model, iterations in zip(pair, seen, strict=True):
        with pytest.raises(ValueError, match="equal or greater than 1"):
            model._set_ddp_runtime_logging_sample_rate(0)
        model._set_ddp_runtime_logging_sample_rate(4)
        for _ in range(22):
            loss_of(model, torch.randn(4, 3, dtype=torch.float64)).backward()
            iterations.append(model._get_ddp_logging_data()["iteration"])
    with together():
        assert seen[0] == seen[1]
        assert 15 not in seen[0]


def test_error_and_hook_and_join(gloo):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    for model in (DDP(mlp(3, 2)), TorchDDP(mlp(3, 2), process_group=gloo)):
        model.register_comm_hook(None, allreduce_hook)
        with pytest.raises(KeyError):
            model._log_and_throw(KeyError, "a reason")
        model.join_hook()
        with together():
            data = model._get_ddp_logging_data()
            assert data["comm_hook"] == "allreduce_hook"
            assert data["has_error"] == 1
            assert data["error"] == "<class 'KeyError'>: a reason"
            assert data["join_uneven_inputs"] == 1


@pytest.mark.mpi(min_size=2)
class TestErrors:
    """What is raised is in the logging data, whoever raises it."""

    def check(self, model: DDP, text: str) -> None:
        data = model._get_ddp_logging_data()
        assert data["has_error"] == 1
        assert "iteration" in data
        assert text in data["error"]

    def test_of_the_wrapper(self) -> None:
        model = DDP(mlp(3, 2))
        with together(), pytest.raises(TypeError, match="must be callable"):
            model.register_comm_hook({}, {})
        with together():
            self.check(model, "must be callable")

    @pytest.mark.essential
    def test_of_the_reducer(self) -> None:
        model = DDP(mlp(3, 2))
        loss_of(model, torch.ones(2, 3, dtype=torch.float64)).backward()
        with together(), pytest.raises(RuntimeError, match="before training loop starts"):
            model._set_static_graph()
        with together():
            self.check(model, "before training loop starts")

    def test_of_a_hook_in_backward(self) -> None:
        model = DDP(GivenGradients(a=torch.zeros(3), b=torch.zeros(3)), static_graph=True)
        model({"a": torch.ones(3)}).backward()
        with together(), pytest.raises(RuntimeError, match="graph has changed"):
            model({"a": torch.ones(3), "b": torch.ones(3)}).backward()
        with together():
            self.check(model, "graph has changed")
        # This rank has not reduced, others may have.
        expected = r"finished reduction.*\nParameter indices which did not receive grad for rank"
        with together(), pytest.raises(RuntimeError, match=expected):
            model({"a": torch.ones(3)})
        with together():
            self.check(model, "finished reduction")

    def test_of_missing_gradients(self) -> None:
        model = DDP(GivenGradients(a=torch.zeros(3), b=torch.zeros(3)))
        model({"a": torch.ones(3)}).backward()
        with together(), pytest.raises(RuntimeError) as caught:
            model({"a": torch.ones(3)})
        with together():
            text = str(caught.value)
            self.check(model, text)
            assert f"indices which did not receive grad for rank {RANK}: 1\n" in text
            assert f"Parameters which did not receive grad for rank {RANK}: b\n" in text

    def test_of_functions_that_take_the_logger(self) -> None:
        model = DDP(mlp(3, 2))
        sparse = [torch.ones(3).to_sparse()]
        with together(), pytest.raises(RuntimeError, match="No support for sparse"):
            dist._compute_bucket_assignment_by_size(sparse, [400], logger=model.logger)
        with together():
            self.check(model, "No support for sparse")
