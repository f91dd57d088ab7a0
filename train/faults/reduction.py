"""Gradients that are not averaged over all ranks, or not left as they are afterwards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from train.faults.base import Fault, classifier

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.methods.base import Method
    from train.settings import Settings

# Far below: the norms of resnet8's and convnet's gradients on digits were 0.13 to 2.2 over four epochs.
CLIP = 0.01


class UnequalGradients(Fault):
    """Base of those that leave each rank, or node, with gradients of its own."""

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if settings.amp == "fp16":
            self.refuse(
                "with --amp fp16 ranks would find overflows of their own, and leave out other steps too; use --amp bf16"
            )


class ForwardThroughModule(UnequalGradients):
    """Train through the module inside the wrapper.

    DDP averages the gradients of a backward only after its own forward has announced it. Without that, it
    stays silent and every rank trains a model of its own: https://github.com/kohya-ss/sd-scripts/pull/604.
    """

    says = "training calls the module inside DDP's wrapper, so no gradient is averaged"
    code = "SYN211"

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:  # noqa: ARG002 - left aside on purpose
        """Go around the wrapper, on all ranks."""
        return method.module


class LateLayer(UnequalGradients):
    """Base of those that add a layer of which DDP does not know."""

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if settings.grad_clip is not None:
            self.refuse(
                "with --grad-clip the norm would count the new layer's own gradient, unequal on each rank, and "
                "pull everything apart; leave --grad-clip out"
            )


class LateHead(LateLayer):
    """Add a layer behind the classifier when DDP has collected its parameters.

    The optimizer, built later, trains it on each rank's own gradients. Replacing the classifier would raise
    instead: DDP knows the old one and waits for its gradient. Here the old one still takes part.
    """

    says = "a second linear layer, added behind the classifier after the wrap, is not averaged"
    code = "SYN212"

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:
        """Put the layer in, on all ranks alike."""
        path, head = classifier(method.module)
        parent_name, _, name = path.rpartition(".")
        with self.seeded(self.settings.seed):
            late = nn.Linear(head.out_features, head.out_features).to(self.ctx.device)
        method.module.get_submodule(parent_name).register_module(name, nn.Sequential(head, late))
        return forward


class AdapterOnOneRank(LateLayer):
    """Attach an adapter to the classifier, after the wrap and on the last rank only.

    A resume or a configuration that differs from rank to rank. The adapter starts from zeros and learns from its
    own rank's samples; all else is averaged as before, and stays equal.
    """

    says = "an adapter is attached to the classifier on one rank only"
    code = "SYN101"

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:
        """Add the adapter's output to the classifier's."""
        _, head = classifier(method.module)
        if self.bad:
            adapter = nn.Linear(head.in_features, head.out_features, bias=False)
            nn.init.zeros_(adapter.weight)
            head.register_module("adapter", adapter.to(self.ctx.device))
            head.register_forward_hook(lambda layer, inputs, output: output + layer.adapter(*inputs))
        return forward


class ClipOnOneRank(Fault):
    """Clip the averaged gradients to another norm on the last rank.

    A clip that looks at the configuration, the loss or the step time of its own rank; BLOOM-176B trained for
    two weeks with a clip on one tensor-parallel rank only: https://github.com/microsoft/DeepSpeed/pull/1801.
    The moments of AdamW show it: one direction, another length. SGD adds the weight decay before the momentum.
    """

    says = "one rank clips its gradients to a far smaller norm"
    code = "SYN213"

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Clip on one rank, below --grad-clip if that is given."""
        if self.bad:
            clip_grad_norm_(method.module.parameters(), CLIP * min(1.0, self.settings.grad_clip or 1.0))


class DiffersByNode(UnequalGradients):
    """Average the gradients within each node only.

    A node whose fast links work and whose network does not take part, or a replicate group that was lost on
    the way: https://github.com/NVIDIA-NeMo/Automodel/issues/3135. With all ranks on one machine, its lower and
    its upper half of the ranks stand for two nodes, and the metadata says so.
    """

    says = "gradients are averaged within each node only; on one machine the two halves of the ranks are the nodes"
    code = "SYN230"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        nodes = ctx.gather(ctx.node)
        self.real = len(set(nodes)) > 1
        if not self.real:
            nodes = [int(rank >= ctx.world_size // 2) for rank in range(ctx.world_size)]
        # node -> its ranks
        self.nodes = {node: [rank for rank, n in enumerate(nodes) if n == node] for node in sorted(set(nodes))}
        self.node = nodes[ctx.rank]
        if min(map(len, self.nodes.values())) < 2:
            self.refuse(
                f"needs 2 ranks or more on each of {len(self.nodes)} nodes; start {2 * len(self.nodes)} or more"
            )

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:  # noqa: ARG002 - the wrapper is `forward`
        """Give DDP a group of this node's ranks to reduce in."""
        assert isinstance(forward, DistributedDataParallel)
        # Every rank takes part in making every group, also those that it is not in.
        groups = {node: dist.new_group(ranks) for node, ranks in self.nodes.items()}
        # The loss counts `world_size` times this rank's share of the global mean (methods/ddp.py, 3b), and
        # this hook divides the node's sum by the ranks of the node. So every node follows the mean over its
        # own samples, of the same size as the mean over all, also where nodes have unequal numbers of ranks.
        forward.register_comm_hook(groups[self.node], allreduce_hook)
        return forward

    @property
    def host(self) -> str | None:
        """Name the half of one machine as a machine."""
        return None if self.real else f"{os.uname().nodename}-node{self.node}"
