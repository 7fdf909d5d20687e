"""A commit of what ranks share: one copy for all of them, whole whenever a rank is lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import learned, needs_ulfm, said, train
from models import loss_of, mlp
from replicas import RANK, assert_same_bits, batch_of, gather, share, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp import elastic
from mpiddp.checkpoint.trees import leaves
from mpiddp.elastic.shared_copies import Held
from mpiddp.optim import adopted


def file_of(address: int) -> str:
    """Return the number of the file that is mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[4]
    raise AssertionError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(6, 200, 200, 3, dtype=torch.float32)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes
class TestWithoutALoss:
    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def installed() -> None:
        adopted.install()

    @pytest.fixture
    def states(self) -> Iterator[list[tuple[Any, DDP]]]:
        """A plain state and one whose parameters are shared, three steps after the start."""
        made = []
        for shares in (False, True):
            model = net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            state = elastic.State(model=model, optimizer=optimizer, step=0)
            wrapped = DDP(model, shared_parameters=shares)
            made.append((state, wrapped))
            self.steps(made[-1], 3)
        yield made
        for state, _ in made:
            state._copies.let_go()

    def steps(self, made: tuple[Any, DDP], count: int, commit: bool = True) -> None:
        state, wrapped = made
        for _ in range(count):
            state.optimizer.zero_grad()
            torch.manual_seed(state.step)
            loss_of(wrapped, share(batch_of(3, 6))).backward()
            state.optimizer.step()
            state.step += 1
            if commit:
                state.commit()

    def assert_alike(self, states: list[tuple[Any, DDP]]) -> None:
        (plain, _), (shared, _) = states
        for kind in ("model", "optimizer"):
            found = [list(leaves(getattr(state, kind).state_dict())) for state in (plain, shared)]
            for one, other in zip(*found, strict=True):
                with together():
                    if isinstance(one, torch.Tensor):
                        assert torch.equal(one, other)
                    else:
                        assert one == other
        assert_same_bits(shared.model.named_parameters())

    @pytest.mark.essential
    def test_is_kept_once(self, states: list[tuple[Any, DDP]]) -> None:
        state, _ = states[1]
        kept = [leaf for each in state._keepers.values() for leaf in leaves(each._kept)]
        large = [leaf for leaf in kept if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]
        held = [leaf for leaf in kept if isinstance(leaf, Held)]
        files = {file_of(leaf.handed_out().data_ptr()) for leaf in held}
        live = {file_of(parameter.data_ptr()) for parameter in state.model.parameters()}
        of_ranks = gather(files)
        with together():
            assert large == []
            assert len(held) == 4 * 6  # parameters, two moments, and the step
            assert not files & live
            assert all(of_rank == files for of_rank in of_ranks)

    @pytest.mark.essential
    def test_going_back(self, states: list[tuple[Any, DDP]]) -> None:
        """Twice, and with other steps after each; as with replicas."""
        for _ in range(2):
            for each in states:
                self.steps(each, 2, commit=False)
                each[0].restore()
            self.assert_alike(states)
            with together():
                assert {each.step for each, _ in states} == {states[0][0].step}
            for each in states:
                self.steps(each, 2)
            self.assert_alike(states)

    def test_what_is_handed_out_is_not_the_copy(self, states: list[tuple[Any, DDP]]) -> None:
        for state, _ in states:
            state.restore()
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.zero_()
            state.restore()
        self.assert_alike(states)
        with together():
            assert all(bool(parameter.any()) for parameter in states[1][0].model.parameters())

    def test_changes_since_the_step(self, states: list[tuple[Any, DDP]]) -> None:
        """A program clamps, and commits."""
        for state, wrapped in states:
            self.steps((state, wrapped), 1, commit=False)
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.clamp_(-0.05, 0.05)
                for found in state.optimizer.state.values():
                    found["exp_avg"].mul_(0.5)
            state.commit()
            self.steps((state, wrapped), 1, commit=False)
            state.restore()
        self.assert_alike(states)
        with together():
            assert max(p.abs().max().item() for p in states[1][0].model.parameters()) <= 0.0501

    def test_what_one_rank_sees_otherwise(self, states: list[tuple[Any, DDP]]) -> None:
        """It commits within an evaluation with other weights: each rank keeps its own."""
        for state, _ in states:
            parameter = next(state.model.parameters())
            before = parameter.detach().clone()
            if RANK == 0:
                parameter.data.mul_(2)
            state.commit()
            parameter.data.copy_(before)
            state.restore()
            with together():
                assert torch.equal(parameter, before * (2 if RANK == 0 else 1))
            parameter.data.copy_(before)
        self.assert_alike(states)
        for each in states:
            self.steps(each, 1)
        self.assert_alike(states)

    def test_all_take_it(self, states: list[tuple[Any, DDP]]) -> None:
        """Where all ranks have the commit nobody sends it, and it takes no pages."""
        for state, wrapped in states:
            self.steps((state, wrapped), 1, commit=False)
            state.sync()
        self.assert_alike(states)
        state = states[1][0]
        with together():
            [copy] = state._copies._handing_out
            assert not any(m.has_own_pages() for m, _ in copy._handed_out.values())
        for each in states:
            self.steps(each, 2)
        self.assert_alike(states)

    @pytest.mark.parametrize("left", [True, False])
    def test_a_model_that_is_wrapped_again(self, states: list[tuple[Any, DDP]], left: bool) -> None:
        """The optimizer follows its parameters, with its state."""
        again: list[tuple[Any, DDP]] = []
        for (state, wrapped), shares in zip(states, (False, True), strict=True):
            if wrapped._shared_parameters is not None and left:
                wrapped._shared_parameters.leave()
            again.append((state, DDP(state.model, shared_parameters=shares)))
            self.steps(again[-1], 2)
        self.assert_alike(again)


MEETINGS = {
    "the optimizer's step": 0,
    "the end of the optimizer's step": 0,
    "a commit": 0,
    "writing": 1,
    "the end of a commit": 1,
}


@pytest.mark.thorough
@needs_ulfm
@pytest.mark.timeout(150)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_rank_is_killed(meeting: str) -> None:
    """Others go on from the commit, or from what was being committed; never from half a step."""
    # The step is counted before the commit.
    step = 20 if "step" in meeting else 21
    arguments = f"--kill-in=1:{step}:{meeting}"
    done = train(3, 60, arguments, MPIDDP_SHARED_PARAMETERS="1")
    assert done.returncode == 0
    ended = said(done)
    assert [each["rank"] for each in ended] == [0, 2]
    worlds = [[3, 0], [2, 20 + MEETINGS[meeting]]]
    for each in ended:
        assert each["steps"] == 60
        assert each["worlds"] == worlds
        assert each["loss"] == pytest.approx(learned(worlds, 60), rel=1e-6)


@pytest.mark.essential
@needs_ulfm
@pytest.mark.timeout(150)
@pytest.mark.parametrize("domains", ["1", "2"])
def test_others_go_on(domains: str) -> None:
    """Also where a rank is left alone in its domain."""
    done = train(4, 60, "--kill-at=1:20", MPIDDP_SHARED_PARAMETERS=domains)
    assert done.returncode == 0
    ended = said(done)
    assert [each["rank"] for each in ended] == [0, 2, 3]
    for each in ended:
        assert each["worlds"] == [[4, 0], [3, 20]]
        assert each["steps"] == 60
        assert each["loss"] == pytest.approx(learned(each["worlds"], 60), rel=1e-6)


@pytest.mark.thorough
@needs_ulfm
@pytest.mark.timeout(150)
def test_another_comes() -> None:
    done = train(
        3, 60, "--kill-at=1:20", '--options={"replace": true}', MPIDDP_SHARED_PARAMETERS="1"
    )
    assert done.returncode == 0
    ended = said(done)
    assert [each["rank"] for each in ended] == [-1, 0, 2]
    for each in ended:
        assert each["steps"] == 60
        worlds = next(each["worlds"] for each in ended if each["rank"] == 0)
        assert each["loss"] == pytest.approx(learned(worlds, 60), rel=1e-6)
