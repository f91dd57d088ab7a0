"""BatchNorm over the global batch, on CPU and GPU.

torch.nn.SyncBatchNorm rejects CPU tensors, and DistributedDataParallel rejects its subclasses on CPU, so this class has
the same base class as nn.BatchNorm2d. On GPU it is correct but not optimized: reading the global count synchronizes
with the device once per layer, which torch's fused kernels avoid.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """Normalize [N, C, ...] inputs with the statistics of all ranks' samples.

    Ranks may have different numbers of samples, including zero. All ranks of `process_group` (default: all ranks) must
    take part in each training forward and backward. In evaluation, or with a single rank, it equals BatchNorm.
    Gradients of weight and bias are this rank's share; the parallel method sums or averages them.

    Further arguments are those of nn.BatchNorm2d. Raises ValueError on all ranks in training if all ranks together
    have fewer than 2 values per channel.
    """

    def __init__(self, *arguments: Any, process_group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.process_group = process_group

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {x.dim()}")

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, C, ...]. Returns the same shape, dtype and memory format."""
        self._check_input_dim(x)
        has_peers = dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        if not (self.training and has_peers):
            return super().forward(x)
        with torch.no_grad():
            mean, var, count = global_statistics(x, self.process_group)
            if count < 2:
                raise ValueError(f"expected 2 or more values per channel over all ranks, got {count}")
            self._track(mean, var, count)
        arguments = (x, self.weight, self.bias, mean, var, count, self.eps, self.process_group)
        y: Tensor = _Normalize.apply(*arguments)  # torch does not type apply()
        return y

    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Update the running statistics like nn.BatchNorm2d, with equal numbers on every rank."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # momentum=None: cumulative average over all batches.
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        self.running_mean.mul_(1 - share).add_(mean.to(self.running_mean.dtype), alpha=share)
        self.running_var.mul_(1 - share).add_(unbiased.to(self.running_var.dtype), alpha=share)


def global_statistics(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, int]:
    """Gather every rank's statistics and merge them; a collective.

    x: [N, C, ...], N may be 0. Returns the global mean [C], biased variance [C] (float32, or float64 for a float64 x)
    and number of values per channel. Each rank merges the same numbers in the same order, so the results are bitwise
    equal on all ranks.

    Sums of squared deviations M2 are merged as in Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise
    algorithm for computing sample variances", generalized to any number of parts: M2 = sum over ranks r of M2_r + n_r
    (mean_r - mean)^2.
    """
    # As in torch, statistics of float16 and bfloat16 are float32.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels = x.size(1)
    count = x.numel() // channels
    if count > 0:
        var, mean = torch.var_mean(x.to(dtype), dim=_all_but_channels(x), correction=0)
    else:
        var = mean = torch.zeros(channels, dtype=dtype, device=x.device)
    # float64 keeps counts exact, and gives all ranks the same dtype regardless of autocast.
    mine = torch.cat([mean.double(), var.double() * count, mean.new_tensor([count], dtype=torch.float64)])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    gathered = torch.stack(parts)  # [ranks, 2 C + 1]
    means, squares, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
    total = counts.sum()
    merged_mean = (counts * means).sum(0) / total
    merged_squares = (squares + counts * (means - merged_mean).square()).sum(0)
    return merged_mean.to(dtype), (merged_squares / total).to(dtype), int(total)


class _Normalize(torch.autograd.Function):
    """Normalization whose backward accounts for statistics computed from all ranks' inputs.

    Ioffe and Szegedy (2015), https://arxiv.org/abs/1502.03167, section 3, with sums over the global batch. With
    xhat = (x - mean) / sqrt(var + eps) and n values per channel:

        dx = weight / sqrt(var + eps) * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: int,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.count, ctx.group = count, group
        if x.numel() == 0:
            return x.clone()
        # training=False makes torch's kernel use the given statistics.
        scale, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return F.batch_norm(x, mean, var, scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std = ctx.saved_tensors
        by_channel = (1, -1) + (1,) * (x.dim() - 2)
        wide_dy = dy.to(mean.dtype)
        x_hat = (x.to(mean.dtype) - mean.view(by_channel)) * inverse_std.view(by_channel)
        dims = _all_but_channels(x)
        sum_dy, sum_dy_x_hat = wide_dy.sum(dims), (wide_dy * x_hat).sum(dims)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_dy, sum_dy_x_hat]).double()
            dist.all_reduce(sums, group=ctx.group)
            mean_dy, mean_dy_x_hat = (sums / ctx.count).to(mean.dtype)
            slope = inverse_std
            if weight is not None:
                slope = inverse_std * weight.to(mean.dtype)
            centred = wide_dy - mean_dy.view(by_channel) - x_hat * mean_dy_x_hat.view(by_channel)
            dx = (centred * slope.view(by_channel)).to(x.dtype)
        # Use this rank's sums, from before the all-reduce: the parallel method averages them like any gradient.
        d_weight = d_bias = None
        if ctx.needs_input_grad[1]:
            d_weight = sum_dy_x_hat.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = sum_dy.to(weight.dtype)  # a layer has both or none
        return dx, d_weight, d_bias, None, None, None, None, None


def convert_sync_batchnorm(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace every BatchNorm in `module`, including `module` itself, and return the result.

    Parameters and buffers remain the same objects, so existing optimizers stay valid. A layer used in two places stays
    one layer. Call it before the parallel wrapper registers the modules.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(layer, _BatchNorm) or isinstance(layer, SyncBatchNorm):
            continue
        new = replaced.setdefault(layer, _twin(layer, process_group))
        if not name:
            return new
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, new)
    return module


def _twin(layer: _BatchNorm, group: dist.ProcessGroup | None) -> SyncBatchNorm:
    """Build a SyncBatchNorm with the parameters and buffers of `layer`."""
    tracked = layer.track_running_stats
    new = SyncBatchNorm(layer.num_features, layer.eps, layer.momentum, False, tracked, process_group=group)
    new.affine, new.weight, new.bias = layer.affine, layer.weight, layer.bias
    for name, buffer in layer.named_buffers(recurse=False):
        setattr(new, name, buffer)
    return new.train(layer.training)


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
