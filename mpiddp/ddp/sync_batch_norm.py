"""Batch normalisation with the mean and variance of all ranks' batches, on CPU and GPU.

Note [Statistics of all ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Forward gathers each rank's count, means and sums of squared deviations, in double precision and
one collective. Every rank combines them in rank order, so all get the same bits. A plain all-reduce
would leave a difference of sums, which loses precision where the mean is large beside the
deviation. Backward all-reduces two sums per channel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp.torch_internals.compiler_loading import disable_compilation

_TOO_FEW = "Expected more than 1 value per channel when training, got one over all ranks"


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Normalise by the statistics of all ranks' batches, as BatchNorm would if they were one.

    Collective in training mode, forward and, where the input needs a gradient, backward.
    `torch.nn.SyncBatchNorm` with the same arguments, buffers and state, for CPU tensors too. The
    ranks' batches may differ in every size but the number of channels, and be empty.

    Shapes are (N, C, ...), with any number of further dimensions. Floating-point inputs; 16-bit
    ones are normalised in float32. The gradients of weight and bias are the rank's own sums,
    which DistributedDataParallel averages.

    Args:
        num_features: the number of channels, C.
        eps: added to the variance.
        momentum: the fraction of the running statistics that a batch replaces; None averages over
            all batches.
        affine: whether there is a weight and a bias.
        track_running_stats: whether there are running statistics.
        process_group: whose batches count; None is the world.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: whether there is a bias beside the weight; from torch 2.12 on.

    Raises:
        ValueError: the input has fewer than 2 dimensions or no channel, or all ranks together
            have one value a channel.
        RuntimeError: a rank did not come within the group's timeout.
    """

    # Where users import it from: pickles hold this name, and survive when the file moves.
    __module__ = "mpiddp"

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised `input`. Collective in training mode."""
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = self._group()
        if not self.training or group is None or dist.get_world_size(group) == 1:
            # BatchNorm's own: torch's SyncBatchNorm refuses CPU tensors here, too.
            return torch.nn.modules.batchnorm._BatchNorm.forward(self, input)
        return self._normalise_together(input)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: Any | None = None
    ) -> torch.nn.Module:
        """Replace every BatchNorm layer of `module` by one of this class.

        Not collective. Parameters and buffers stay the same objects.

        Args:
            module: changed in place, unless it is such a layer itself.
            process_group: whose batches count; None is the world.

        Returns:
            `module`, or what replaces it.
        """
        converted = module
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
            converted.training = module.training
            if hasattr(module, "qconfig"):
                converted.qconfig = module.qconfig
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return converted

    def _group(self) -> dist.ProcessGroup | None:
        return self.process_group or (dist.group.WORLD if dist.is_initialized() else None)

    # Collectives are not part of a compiled graph: it is split around them. Not
    # torch.compiler.disable: importing mpiddp would import the compiler, which takes a second.
    # The group is no argument: Dynamo of torch 2.12 cannot hand one over there.
    @disable_compilation
    def _normalise_together(self, input: Tensor) -> Tensor:
        group = self._group()
        assert group is not None
        count, mean, variance = _statistics_of_all(input.detach(), group)
        if count == 1:
            raise ValueError(_TOO_FEW)
        factor = self._count_batch()
        if self.track_running_stats and self.running_mean is not None and count:
            if self.running_var is None:
                raise RuntimeError("running_var is None, but running_mean is not")
            _update(self.running_mean, mean, factor)
            _update(self.running_var, variance * (count / (count - 1)), factor)
        normalised = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, count, self.eps, group
        )
        return cast(Tensor, normalised)

    def _count_batch(self) -> float:
        """Count this batch if batches are tracked; return its weight in the running statistics."""
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked.item())
        return 0.0 if self.momentum is None else self.momentum


class _Normalise(torch.autograd.Function):
    """Normalise by given statistics that themselves depend on the inputs of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.count, ctx.eps, ctx.group = count, eps, group
        if not input.numel():
            return torch.empty_like(input)
        dtype = _computed_in(input)
        return torch.native_batch_norm(
            input,
            None if weight is None else weight.to(dtype),
            None if bias is None else bias.to(dtype),
            mean.to(dtype),
            variance.to(dtype),
            False,
            0.0,
            eps,
        )[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        dtype = _computed_in(input)
        invstd = (variance + ctx.eps).rsqrt()
        if input.numel():
            _, scaled, total = torch.ops.aten.native_batch_norm_backward(
                grad_output,
                input,
                None,
                None,
                None,
                mean.to(dtype),
                invstd.to(dtype),
                True,
                ctx.eps,
                [False, True, True],
            )
        else:
            scaled = total = mean.new_zeros(mean.shape)
        needs = ctx.needs_input_grad
        grad_weight = scaled.to(weight.dtype) if needs[1] else None
        grad_bias = total.to(ctx.bias_dtype) if needs[2] else None
        grad_input = None
        if needs[0]:
            sums = torch.cat([total.double(), scaled.double()])
            dist.all_reduce(sums, group=ctx.group)
            if input.numel():
                gain = invstd if weight is None else invstd * weight.double()
                total, scaled = (sums / ctx.count).chunk(2)
                slope = -gain * invstd * scaled
                offset = -gain * total - slope * mean
                shape = (1, -1) + (1,) * (input.dim() - 2)
                gain, slope, offset = (t.to(dtype).view(shape) for t in (gain, slope, offset))
                grad_input = torch.addcmul(offset, grad_output, gain).addcmul_(input, slope)
                grad_input = grad_input.to(input.dtype)
            else:
                grad_input = torch.zeros_like(input)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _statistics_of_all(input: Tensor, group: dist.ProcessGroup) -> tuple[int, Tensor, Tensor]:
    """Return the number of values per channel over all ranks, their means and variances.

    Collective. In float64, see Note [Statistics of all ranks].
    """
    channels = input.size(1)
    own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if input.numel():
        # The running statistics are not used, but their dtype is that of the result.
        unused = torch.zeros(channels, dtype=_computed_in(input), device=input.device)
        mean, variance = torch.batch_norm_update_stats(input, unused, unused.clone(), 0.0)
        count = input.numel() // channels
        own[0] = count
        own[1 : channels + 1] = mean
        own[channels + 1 :] = variance.double() * count
    everyone = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(everyone), own, group=group)
    counts, means, squares = torch.split(everyone, [1, channels, channels], dim=1)
    total = counts.sum()
    if not total:
        return 0, torch.zeros_like(means[0]), torch.ones_like(means[0])
    mean = (counts * means).sum(0) / total
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return int(total), mean, variance


def _computed_in(input: Tensor) -> torch.dtype:
    """Return the dtype that values of the input's dtype are computed in."""
    return torch.promote_types(input.dtype, torch.float32)


def _update(running: Tensor, new: Tensor, factor: float) -> None:
    """Replace the fraction `factor` of a running statistic."""
    running.copy_((1 - factor) * running.double() + factor * new)


def _check_layers(
    self: TorchDDP, module: torch.nn.Module, torchs: Any = TorchDDP._passing_sync_batchnorm_handle
) -> None:
    """Replace torch's method of this name, which refuses every SyncBatchNorm on the CPU."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm):
            torchs(self, layer)


# torch's own wrapper also trains on our process group, and has to accept our subclass of its
# SyncBatchNorm there. Everything else stays refused.
TorchDDP._passing_sync_batchnorm_handle = _check_layers  # type: ignore[method-assign]
