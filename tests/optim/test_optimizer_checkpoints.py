"""Checkpoints of a NodeOptimizer: those of torch's plain classes, whichever ranks load them."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optimizer_pairs import assert_same_parameters, pair, train, wide
from pretended_nodes import NODES, group_on
from replicas import RANK, SIZE, all_bits, gather, together
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("name", ["momentum", "AdamW", "the user's"])
def test_checkpoints(name: str) -> None:
    """From the plain optimizer to the node's and back, in the middle of training."""
    models = pair(wide, name)
    train(models, 3)
    (plain, plain_optimizer), (model, own) = models
    torch.manual_seed(9)
    again = pair(wide, name)
    again[0][0].module.load_state_dict(model.module.state_dict())
    # Copies: torch's plain optimizer would go on with the same tensors.
    again[0][1].load_state_dict(copy.deepcopy(own.state_dict()))
    again[1][0].load_state_dict(plain.state_dict())
    again[1][1].load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    train([*models, *again], 3)
    for other, _ in (again[0], again[1], models[1]):
        assert_same_parameters(other, plain)
    with together(), pytest.raises(ValueError, match="parameter group"):
        own.load_state_dict({"state": {}, "param_groups": []})


def test_state_of_one_rank(tmp_path: Any) -> None:
    """Rank 0 alone may save, as scripts do."""
    models = pair(wide, "AdamW")
    train(models, 2)
    (plain, plain_optimizer), (model, own) = models
    if RANK == 0:
        torch.save([model.module.state_dict(), own.state_dict()], tmp_path / "saved")
        size = (tmp_path / "saved").stat().st_size
        state, of_optimizer = torch.load(tmp_path / "saved")
    train(models, 1)
    with together():
        if RANK == 0:
            # No more than what there is: parameters and two moments.
            assert size < 3.2 * sum(p.nbytes for p in model.parameters())
            assert state.keys() == plain.module.state_dict().keys()
            assert of_optimizer["state"].keys() == plain_optimizer.state_dict()["state"].keys()


@pytest.mark.essential
def test_sharded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch.distributed.checkpoint: every rank writes a part, and plain DDP reads it."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = gather(str(tmp_path_factory.mktemp("sharded")))[0]
    models = pair(wide, "AdamW")
    train(models, 2)
    model, own = models[1]
    state, of_optimizer = get_state_dict(model, own)
    checkpoint.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    torch.manual_seed(8)
    again = pair(wide, "AdamW")
    for other, optimizer in again:
        state, of_optimizer = get_state_dict(other, optimizer)
        loaded = {"model": state, "optimizer": of_optimizer}
        checkpoint.load(loaded, checkpoint_id=folder)
        set_state_dict(
            other,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
    train([*models, *again], 2)
    assert_same_parameters(again[0][0], models[0][0])
    assert_same_parameters(again[1][0], models[0][0])


class Training:
    """A model whose parameters the ranks of a group share. Collective over these."""

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = DDP(wide(), process_group=group, shared_parameters=True)
        self.optimizer = NodeOptimizer(self.model, torch.optim.AdamW, lr=0.01)
        self.group = group

    def train(self, steps: int) -> None:
        train([(self.model, self.optimizer)], steps)

    def bits(self) -> list[Any]:
        """All that a checkpoint holds."""
        moments = [
            (f"{index} {key}", value)
            for index, state in self.optimizer.state_dict()["state"].items()
            for key, value in state.items()
        ]
        return [all_bits(self.model.module.state_dict().items()), all_bits(moments)]

    def save(self, folder: str, how: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        if how == "sharded":
            state = {"model": model, "optimizer": optimizer}
            dcp.save(state, checkpoint_id=folder, process_group=self.group)
        elif RANK == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, f"{folder}/saved")

    def load(self, folder: str, how: str) -> None:
        if how == "sharded":
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=folder, process_group=self.group)
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        else:
            state = torch.load(f"{folder}/saved")
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.thorough(keep=4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["sharded", "whole"])
@pytest.mark.parametrize("place", [[0, 0, 0, 0], *NODES.values()], ids=["one node", *NODES])
def test_another_number_of_ranks(
    place: list[int], how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fewer ranks have saved, all load; what these save, fewer load. Nodes differ, too."""
    folders = gather(str(tmp_path))[0], gather(str(tmp_path / "more"))[0]
    (tmp_path / "more").mkdir(exist_ok=True)
    fewer = dist.new_group(list(range(SIZE - 1)))
    among = RANK < SIZE - 1
    if among:
        first = Training(fewer, 1)
        first.train(3)
        first.save(folders[0], how)
    before = gather(first.bits() if among else None)[0]
    with group_on(place, monkeypatch) as group:
        second = Training(group, 2)
        second.load(folders[0], how)
        loaded = second.bits()
        second.train(2)
        second.save(folders[1], how)
        after = second.bits()
        dist.barrier()
    with together():
        assert loaded == before
    if among:
        first.load(folders[1], how)
        again = first.bits()
    with together():
        assert not among or again == after
