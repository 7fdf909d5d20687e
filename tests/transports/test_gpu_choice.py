"""Choosing how gradients on a GPU travel: requests, agreement of the ranks, trials that fail."""

import logging
from collections.abc import Iterator
from typing import Any

import gpus
import pytest
import simulated_gpu
import torch
from mpi4py import MPI
from replicas import RANK, SIZE, together

from mpiddp.engine.engine import Engine
from mpiddp.mpi import nodes
from mpiddp.transports import choice as transport_choice
from mpiddp.transports import gpu_choice
from mpiddp.transports.gpu_choice import Choice, choose, requested_gpu_transport
from mpiddp.transports.gpu_support import ask_library

pytestmark = pytest.mark.mpi(min_size=2)

CPU = torch.device("cpu")
KNOWN = (("device", "ring"), "this MPI can")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let CPU tensors be on a GPU, and forget what was tried."""
    monkeypatch.setattr(gpu_choice, "_tried", {})
    monkeypatch.setattr(gpu_choice, "_logged", set())
    monkeypatch.delenv("MPIDDP_DEVICE_TRANSPORT", raising=False)
    with simulated_gpu.on_cpu_tensors():
        yield


class Trials:
    """Stands in for trials: what each way gives, and how often it was asked for here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **outcomes: str) -> None:
        self.outcomes = outcomes
        self.calls: list[str] = []
        monkeypatch.setattr("mpiddp.transports.gpu_trial.trial", self.trial)

    def trial(
        self, way: str, device: torch.device, runtime: tuple[str, str] | None = None
    ) -> tuple[int, str]:
        assert device == CPU
        assert runtime == (simulated_gpu.library(), "cuda")
        self.calls.append(way)
        problem = self.outcomes[way]
        return (0 if problem else 2), problem


def believe(monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...], why: str) -> None:
    """Let this rank's table say this of its MPI."""
    monkeypatch.setattr("mpiddp.transports.gpu_support.worth_trying", lambda *_, **__: (ways, why))


@pytest.mark.essential
def test_this_mpi_means_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheels are built without CUDA: nothing is tried. Another build is, here in vain."""
    trials = Trials(monkeypatch, device="it cannot", ring="it cannot")
    choice = choose(MPI.COMM_WORLD, CPU)
    with together():
        assert choice.name == "staging"
        if any(ask_library("cuda").values()):
            assert "it cannot" in choice.reason
            assert RANK != 0 or trials.calls
        else:
            assert "without CUDA" in choice.reason
            assert not trials.calls


def test_order_of_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, *KNOWN)
    trials = Trials(monkeypatch, device="", ring="")
    with together():
        assert choose(MPI.COMM_WORLD, CPU) == Choice(
            "device", "this MPI can; a trial on 2 ranks of each node worked"
        )
        # On the first rank of each node, and once.
        assert trials.calls == (["device"] if RANK == 0 else [])
    assert choose(MPI.COMM_WORLD, CPU).name == "device"
    with together():
        assert trials.calls == (["device"] if RANK == 0 else [])


def test_failed_trials_mean_the_next_and_in_the_end_staging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    believe(monkeypatch, *KNOWN)
    trials = Trials(monkeypatch, device="it ended with signal 11", ring="")
    choice = choose(MPI.COMM_WORLD, CPU)
    with together():
        assert choice.name == "ring"
    trials.outcomes["ring"] = "a sum is wrong"
    monkeypatch.setattr(gpu_choice, "_tried", {})
    choice = choose(MPI.COMM_WORLD, CPU)
    with together():
        assert choice.name == "staging"
        assert "'device' failed: it ended with signal 11" in choice.reason
        assert "'ring' failed: a sum is wrong" in choice.reason


def test_a_trial_that_fails_on_one_node_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch, *KNOWN)
    monkeypatch.setattr(nodes, "ranks_of_node", lambda comm: comm.Split(RANK, RANK))
    last = RANK == SIZE - 1
    trials = Trials(monkeypatch, device="it hung" if last else "", ring="")
    choice = choose(MPI.COMM_WORLD, CPU)
    with together():
        assert choice.name == "ring"
        assert trials.calls == ["device", "ring"]


def test_what_one_rank_lacks_no_rank_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: tuple[str, ...] = ("ring",) if RANK == 1 else ("device", "ring")
    believe(monkeypatch, ways, f"rank {RANK} says so")
    Trials(monkeypatch, device="", ring="")
    choice = choose(MPI.COMM_WORLD, CPU)
    with together():
        assert choice.name == "ring"
    believe(monkeypatch, () if RANK == 1 else ways, f"rank {RANK} says so")
    choice = choose(MPI.COMM_WORLD, CPU)
    with together():
        assert choice == Choice("staging", "rank 1 says so")


def test_a_name_skips_the_table_but_not_the_trial(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MPIDDP_DEVICE_TRANSPORT", "ring")
    trials = Trials(monkeypatch, ring="")
    with caplog.at_level(logging.INFO, "mpiddp"), together():
        for _ in range(2):
            assert choose(MPI.COMM_WORLD, CPU).name == "ring"
        # Said once, by rank 0.
        assert len(caplog.records) == (1 if RANK == 0 else 0)
        if RANK == 0:
            assert "travel by 'ring': asked for" in caplog.text
    trials.outcomes["ring"] = "it ended with signal 11"
    monkeypatch.setattr(gpu_choice, "_tried", {})
    with together():
        if RANK == 0:
            with pytest.warns(UserWarning, match=r"'ring' was asked for, .*'staging'.*signal 11"):
                assert choose(MPI.COMM_WORLD, CPU).name == "staging"
        else:
            assert choose(MPI.COMM_WORLD, CPU).name == "staging"
    assert choose(MPI.COMM_WORLD, CPU, "staging") == Choice("staging", "asked for")


def test_without_a_blas_library_there_is_nothing_to_add_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    believe(monkeypatch, *KNOWN)
    Trials(monkeypatch)
    with simulated_gpu.runtime().failing("cublasCreate_v2", 1):
        choice = choose(MPI.COMM_WORLD, CPU)
    with together():
        assert choice.name == "staging"
        assert "nothing adds on the GPU: cublasCreate_v2 failed" in choice.reason


def test_ranks_that_ask_for_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_DEVICE_TRANSPORT", "ring" if RANK == 1 else "staging")
    expected = "MPIDDP_DEVICE_TRANSPORT is staging on rank 0 and ring on rank 1"
    with together(), pytest.raises(RuntimeError, match=expected):
        choose(MPI.COMM_WORLD, CPU)


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="transport must be one of auto, staging, device, ring"):
        requested_gpu_transport("nccl")
    monkeypatch.setenv("MPIDDP_DEVICE_TRANSPORT", "gpu")
    with pytest.raises(ValueError, match=r"^MPIDDP_DEVICE_TRANSPORT must be .* not 'gpu'"):
        requested_gpu_transport()


@pytest.mark.parametrize("name", ["staging", "device", "ring"])
def test_channels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MPIDDP_DEVICE_TRANSPORT", name)
    Trials(monkeypatch, device="", ring="")
    communicator = MPI.COMM_WORLD.Dup()
    engine = Engine(threaded=False)
    channel = transport_choice.open_channel(engine, communicator, "auto", CPU)
    kinds = {
        "staging": "StagingTransport",
        "device": "GpuIallreduceTransport",
        "ring": "GpuRingTransport",
    }
    with together():
        assert type(channel.transport).__name__ == kinds[name]
        assert channel.device == CPU
        assert transport_choice.sends_messages(channel) == (name != "staging")
    engine.close_channel(channel)
    channel.transport.free()
    communicator.Free()


def require_skips(match: str) -> Any:
    """Expect that `gpus.require` skips, and says this."""
    return pytest.raises(pytest.skip.Exception, match=match)  # the skip is what is tested


def test_what_is_skipped_on_a_real_gpu_and_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpus.require` hides nothing: an MPI that says that it can must be able to."""
    Trials(monkeypatch, device="", ring="it ended with signal 11")
    said = {"MPIX_Query_cuda_support": False}
    monkeypatch.setattr("mpiddp.transports.gpu_support.ask_library", lambda prefix: said)
    with together(), require_skips(match=r"not tried: .*without CUDA"):
        gpus.require("ring", CPU)
    believe(monkeypatch, ("ring",), "no reductions")
    with together(), require_skips(match="'device' is not tried: no reduc"):
        gpus.require("device", CPU)
    believe(monkeypatch, *KNOWN)
    gpus.require("device", CPU)
    with together(), require_skips(match=r"'ring' failed: .*signal 11"):
        gpus.require("ring", CPU)
    said["MPIX_Query_cuda_support"] = True
    with together(), pytest.raises(pytest.fail.Exception, match=r"says that .*signal 11"):
        gpus.require("ring", CPU)
    refused = pytest.raises(RuntimeError, match="cublasCreate_v2")
    with simulated_gpu.runtime().failing("cublasCreate_v2", 1), together(), refused:
        gpus.require("device", CPU)
