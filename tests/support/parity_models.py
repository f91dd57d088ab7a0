"""Cases for the tests of parity: a small transformer under all kinds of parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from torch import nn

from support.parity_cases import TokenCase, count_tokens, token_losses
from syncheck.testing import ParityCase

WIDTH, HEADS, VOCABULARY = 16, 4, 20


class Block(nn.Module):
    """One layer of a transformer: [samples, tokens, WIDTH] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Return [samples, heads, tokens, width of a head], of the heads of this rank."""
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

    def attend(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q(h)), self.split(self.k(h)), self.split(self.v(h))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.attend(self.norm1(x)).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """[samples, tokens] to logits [samples, tokens, VOCABULARY]. Missing layers are skipped, for pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm: Any = nn.LayerNorm(WIDTH)
        self.head: Any = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class TransformerCase(TokenCase):
    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Transformer()


class Fsdp(TransformerCase):
    """FSDP2; with a two-dimensional mesh, HSDP. shard: the mesh of FSDP, by name; None for all of it."""

    shard: str | None = None

    def parallelize(self, model: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        chosen = mesh if self.shard is None else mesh[self.shard]
        for block in model.blocks.values():
            fully_shard(block, mesh=chosen)
        return fully_shard(model, mesh=chosen)

    def accumulating(self, model: Any, *, is_last: bool) -> Any:
        model.set_requires_gradient_sync(is_last)
        return super().accumulating(model, is_last=is_last)


class Tp(TransformerCase):
    """Tensor parallelism over all ranks, or over `tp` with FSDP2 over `dp`.

    sequence: shard activations between layers by position. loss_parallel: shard the logits.
    """

    sequence = False
    loss_parallel = False
    mesh_sizes: ClassVar[dict[str, int]] = {"tp": 2}

    def parallelize(self, model: Any, mesh: Any) -> Any:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        tp = mesh["tp"]
        layout = Shard(1) if self.sequence else Replicate()
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
            "head": ColwiseParallel(
                input_layouts=layout,
                output_layouts=Shard(-1) if self.loss_parallel else Replicate(),
                use_local_output=not self.loss_parallel,
            ),
        }
        block_plan: dict[str, Any] = {name: ColwiseParallel(input_layouts=layout) for name in ("q", "k", "v", "up")}
        block_plan |= {name: RowwiseParallel(output_layouts=layout) for name in ("o", "down")}
        if self.sequence:
            plan["norm"] = SequenceParallel()
            block_plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        parallelize_module(model, tp, plan)
        for block in model.blocks.values():
            parallelize_module(block, tp, block_plan)
        if "dp" in self.mesh_sizes:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=mesh["dp"])
        return model

    def micro(self, batch: Any) -> Any:
        ranks = self.count_data_ranks()
        # The tensor-parallel dimension is the inner one.
        rank = dist.get_rank() // self.mesh_sizes["tp"]
        return [tuple(part[rank::ranks] for part in batch)]

    def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return self.count_data_ranks() / count_tokens(all_targets)

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        from contextlib import nullcontext

        from torch.distributed.tensor.parallel import loss_parallel

        [(inputs, targets)] = self.micro(batch)
        with loss_parallel() if self.loss_parallel else nullcontext():
            logits = model(inputs)
            if self.loss_parallel:
                count = count_tokens(targets)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100) * count
            else:
                loss = token_losses(logits, targets).sum()
            (loss * self.factor(targets, batch[1])).backward()


class Cp(TransformerCase):
    """Context parallelism by hand: each rank has a part of the positions, and gathers keys and values."""

    mesh_sizes: ClassVar[dict[str, int]] = {"cp": 2}
    divisor = 1

    def owner(self, batch: Any) -> Any:
        positions = batch[1].shape[1]
        rank = torch.arange(positions) // (positions // dist.get_world_size())
        return rank.expand(batch[1].shape), torch.zeros_like(batch[1])

    def parallelize(self, model: Any, mesh: Any) -> Any:
        for block in model.blocks.values():
            block.attend = lambda h, block=block: attend_over_ranks(block, h)
        return model

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        inputs, targets = (part.chunk(dist.get_world_size(), 1)[dist.get_rank()] for part in batch)
        (token_losses(model(inputs), targets).sum() / count_tokens(batch[1])).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.divisor


def attend_over_ranks(block: Block, h: torch.Tensor) -> torch.Tensor:
    """Attend to the positions of all ranks before those of this rank."""
    keys = torch.cat(collectives.all_gather(block.k(h).contiguous()), 1)
    values = torch.cat(collectives.all_gather(block.v(h).contiguous()), 1)
    tokens = h.shape[1]
    mask = torch.ones(tokens, keys.shape[1], dtype=torch.bool).tril(diagonal=dist.get_rank() * tokens)
    return F.scaled_dot_product_attention(
        block.split(block.q(h)), block.split(keys), block.split(values), attn_mask=mask
    )


class Pp(TransformerCase):
    """A pipeline of two stages with a schedule of torch."""

    mesh_sizes: ClassVar[dict[str, int]] = {"pp": 2}
    schedule = "ScheduleGPipe"
    divided_twice = False

    def __init__(self) -> None:
        super().__init__(4)

    def owner(self, batch: Any) -> Any:
        return torch.zeros(len(batch[1]), dtype=torch.long), torch.arange(len(batch[1])) // 2

    def parallelize(self, model: Any, mesh: Any) -> Any:
        if dist.get_rank() == 0:
            model.norm = model.head = None
            del model.blocks["1"]
        else:
            model.embed = None
            del model.blocks["0"]
        return model

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        import torch.distributed.pipelining as pipelining

        stage = pipelining.PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
        count = count_tokens(batch[1])
        schedule = getattr(pipelining, self.schedule)(
            stage,
            4,
            loss_fn=lambda logits, targets: token_losses(logits, targets).sum() / count,
            scale_grads=self.divided_twice,
        )
        if dist.get_rank() == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1])


class Experts(nn.Module):
    """Two experts in one tensor, mixed by a gate: [samples, WIDTH] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1)
        return sum(share[:, i : i + 1] * torch.tanh(x @ self.weight[i]) for i in range(2))


class Ep(ParityCase):
    """Expert parallelism by hand: each rank has samples and one of two experts. scaled: factor of its gradient."""

    scaled = 1.0

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Experts()

    def batch(self) -> torch.Tensor:
        return torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1))

    def loss_terms(self, model: Any, batch: Any) -> torch.Tensor:
        return model(batch).pow(3).sum(1)

    def parallelize(self, model: Any, mesh: Any) -> Any:
        rank = dist.get_rank()
        model.weight = nn.Parameter(model.weight.detach()[rank : rank + 1].clone())
        return model

    def box(self, name: str, parameter: Any) -> Any:
        rank = dist.get_rank()
        return (slice(rank, rank + 1), slice(None), slice(None)) if name == "weight" else None

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        everything = torch.cat(collectives.all_gather(batch[rank::ranks].contiguous().requires_grad_()))
        share = model.gate(everything).softmax(-1)[:, rank : rank + 1]
        outputs = collectives.all_reduce(share * torch.tanh(everything @ model.weight[0]))
        own_outputs = outputs.chunk(ranks)[rank]
        (own_outputs.pow(3).sum() / len(batch)).backward()
        for parameter in model.gate.parameters():
            dist.all_reduce(parameter.grad)
        model.weight.grad *= self.scaled
