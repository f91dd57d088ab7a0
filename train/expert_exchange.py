"""Experts on several ranks: send each token to its experts, and the outputs back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from train.models.gpt import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


def send_to_experts(experts: list[nn.Module], group: ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a replacement for `Experts.apply_experts`. experts: of this rank."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd  # takes half a second

    own, ranks = len(experts), group.size()

    def apply_experts(tokens: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        # Sort the pairs of token and expert by expert, and so by rank, because ranks hold consecutive experts.
        order = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=EXPERTS)
        # Exchange the number of tokens for each expert, so that every rank knows the lengths of its messages.
        arriving = torch.empty_like(counts)  # by rank, then by expert
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (numbers.view(ranks, -1).sum(1).tolist() for numbers in (counts, arriving))
        inputs = all_to_all_single_autograd(tokens[order // expert_ids.shape[1]], received, sent, group)
        # Sort the received tokens by expert. An expert without tokens computes an empty output, and gets gradients.
        numbers = torch.arange(own, device=tokens.device).repeat(ranks).repeat_interleave(arriving)
        by_expert = numbers.argsort(stable=True)
        parts = torch.split(inputs[by_expert], numbers.bincount(minlength=own).tolist())
        outputs = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
        # Send the outputs back, and undo both sorts.
        outputs = all_to_all_single_autograd(outputs[by_expert.argsort()], sent, received, group)
        by_token = outputs[order.argsort()].view(*expert_ids.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    return apply_experts
