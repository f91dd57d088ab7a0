"""Gradients that are not averaged over all ranks, or change after averaging."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from train.faults.base import Fault, find_classifier
from train.methods.pp import Pp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer

    from train.methods.single import Method
    from train.settings import Settings

# Much smaller than typical norms: over four epochs on digits, gradient norms of resnet8 and convnet were 0.13 to 2.2.
CLIP = 0.01


def choose_norm(settings: Settings) -> float:
    """Return a norm far below typical gradients, and below --grad-clip."""
    return CLIP * min(1.0, settings.grad_clip or 1.0)


class UnequalGradients(Fault):
    """Base class of faults with different gradients on each rank or node."""

    refuses: ClassVar[Mapping[str, str]] = {
        "--amp fp16": "with --amp fp16 ranks would detect different overflows and skip other steps; use --amp bf16",
    }


class ForwardThroughModule(UnequalGradients):
    """Train through the inner module instead of the DDP wrapper.

    DDP averages gradients only if its own forward has prepared the reduction. Otherwise it raises no error, and every
    rank trains a separate model: https://github.com/kohya-ss/sd-scripts/pull/604.
    """

    summary = "training calls the module inside the DDP wrapper, so no gradient is averaged"
    code = "SYN211"

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:  # noqa: ARG002 - bypassed on purpose
        """Bypass the wrapper on all ranks."""
        return method.module


class GradNotReducedOnce(UnequalGradients):
    """Do not average the gradients of one step: every rank updates with the gradients of its own share.

    Examples: `no_sync()` around the last micro-batch too, because the number of batches is no multiple of the number of
    micro-batches: https://github.com/modelscope/FunASR/pull/3472.
    """

    summary = "the gradients of one step are not averaged, as with no_sync around the last micro-batch"
    code = "SYN211"
    when = "half"

    def around_step(self, step: int, method: Method) -> AbstractContextManager[None]:
        """Keep the gradients local on all ranks."""
        return method.no_sync() if step == self.fault_step else nullcontext()


class LocalGradients(UnequalGradients):
    """Base class of faults that leave the gradients of some layers on each rank."""

    refuses: ClassVar[Mapping[str, str]] = {
        **UnequalGradients.refuses,
        "--grad-clip": (
            "with --grad-clip the norm would include the layer's local gradient, and all parameters would differ; "
            "remove --grad-clip"
        ),
    }


class LateHead(LocalGradients):
    """Add a layer after the classifier when DDP has registered the parameters.

    The optimizer is built later and trains the layer on each rank's own gradients. Replacing the classifier would raise
    an error, because DDP waits for the gradient of the old classifier; here it is still used.
    """

    summary = "a second linear layer, added to the classifier after DDP has wrapped the model, is not averaged"
    code = "SYN212"

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Insert the layer on all ranks."""
        path, head = find_classifier(method.module)
        parent_name, _, name = path.rpartition(".")
        with self.fork_rng(self.settings.seed):
            late = nn.Linear(head.out_features, head.out_features).to(self.ctx.device)
        method.module.get_submodule(parent_name).register_module(name, nn.Sequential(head, late))
        return wrapped


class AdapterOnOneRank(LocalGradients):
    """Attach an adapter to the classifier after wrapping, on the last rank only.

    Examples: a resume or configuration that differs between ranks. The adapter starts at zero and learns from its
    rank's samples; the remaining gradients are averaged, and the remaining parameters stay equal.
    """

    summary = "an adapter is attached to the classifier on one rank only"
    code = "SYN101"

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Add the adapter's output to the classifier's."""
        _, head = find_classifier(method.module)
        if self.is_faulty:
            adapter = nn.Linear(head.in_features, head.out_features, bias=False)
            nn.init.zeros_(adapter.weight)
            head.register_module("adapter", adapter.to(self.ctx.device))
            head.register_forward_hook(lambda layer, inputs, output: output + layer.adapter(*inputs))
        return wrapped


class ClipOnOneRank(Fault):
    """Clip averaged gradients to another norm on the last rank.

    Example: clipping that depends on the configuration, loss or step time of the rank. BLOOM-176B trained for two weeks
    with clipping on one tensor-parallel rank only: https://github.com/microsoft/DeepSpeed/pull/1801. AdamW's moments
    show it: equal direction, different length. With SGD, weight decay is part of the momentum.
    """

    summary = "one rank clips its gradients to a much smaller norm"
    code = "SYN213"

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Clip on one rank, to a norm below --grad-clip."""
        if self.is_faulty:
            clip_grad_norm_(method.module.parameters(), choose_norm(self.settings))


class TiedApart(Fault):
    """Do not add the gradients of both copies of a tied embedding.

    Example: a pipeline without the reduction between the first and the last stage, so each trains its own copy.
    """

    summary = "the gradients of an embedding in the first and last pipeline stage are not added"
    code = "SYN212"
    methods = ("pp", "pp_fsdp")

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Forget the other copy."""
        assert isinstance(method, Pp)
        if not method.tied or method.owners[0] == method.owners[-1]:
            self.refuse("no embedding is in two stages of different ranks; use --model gpt-tiny, and not zbv")
        method.copy = None
        return wrapped


class DiffersByNode(UnequalGradients):
    """Average gradients within each node only.

    Examples: a network that fails while links within nodes work, or a lost replicate group:
    https://github.com/NVIDIA-NeMo/Automodel/issues/3135. On a single machine, the lower and upper halves of the ranks
    act as two nodes, also in the metadata.
    """

    summary = "gradients are averaged within each node only; on one machine the halves of the ranks act as nodes"
    code = "SYN230"

    def _check(self) -> None:
        # The node of each rank.
        nodes = self.ctx.gather(self.ctx.node)
        self.has_real_nodes = len(set(nodes)) > 1
        if not self.has_real_nodes:
            upper_half = self.ctx.world_size // 2
            nodes = [int(rank >= upper_half) for rank in range(self.ctx.world_size)]
        self.node = nodes[self.ctx.rank]
        self.nodes: dict[int, list[int]] = {node: [] for node in sorted(set(nodes))}
        for rank, node in enumerate(nodes):
            self.nodes[node].append(rank)
        count = len(self.nodes)
        if any(len(ranks) < 2 for ranks in self.nodes.values()):
            self.refuse(f"needs at least 2 ranks on each of {count} nodes; start {2 * count} or more")

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:  # noqa: ARG002 - the wrapper is an argument
        """Give DDP a process group of this node's ranks for the reduction."""
        assert isinstance(wrapped, DistributedDataParallel)
        # All ranks must create all groups.
        groups = {node: dist.new_group(ranks) for node, ranks in self.nodes.items()}
        # The loss is `world_size` times this rank's share of the global mean (methods/ddp.py, 3b), and the hook divides
        # the node's sum by the node's number of ranks. So each node follows the mean over its own samples, at the scale
        # of the global mean, even if nodes have different numbers of ranks.
        wrapped.register_comm_hook(groups[self.node], allreduce_hook)
        return wrapped

    @property
    def host(self) -> str | None:
        """Return a host name for each half of a single machine."""
        return None if self.has_real_nodes else f"{os.uname().nodename}-node{self.node}"
