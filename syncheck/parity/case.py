"""What the user writes: the model, the batch, the terms of the loss, and how the parallel program computes a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from syncheck.errors import UsageError
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Names of mesh dimensions whose ranks have different samples.
DATA_DIMENSIONS = frozenset(
    "data dp ddp data_parallel replicate dp_replicate shard dp_shard fsdp hsdp replica zero".split()
)


class ParityCase:
    """One step of a parallel program, and the definition of its loss as a sum of terms.

    The definition of the gradient is that of the sum of all terms divided by `count`. Each term belongs to an owner:
    the data rank and the micro-batch that compute it. Subclasses override `build`, `batch`, `loss_terms`,
    `parallelize` and `backward`; the other methods have defaults.

    mesh_sizes: sizes of the device mesh by the names of its dimensions, outermost first; empty for one dimension `dp`
        of all ranks.
    micro_batches: of one optimizer step, in the default of `owner`.
    max_norm: the largest gradient norm after clipping, if `finish` clips by norm.
    clip_value: the largest absolute value of an element after clipping, if `finish` clips by value.
    """

    mesh_sizes: ClassVar[Mapping[str, int]] = {}
    micro_batches: int = 1
    max_norm: float | None = None
    clip_value: float | None = None

    def build(self) -> Any:
        """Return the module of one process. It must have equal parameters at each call and on each rank: seed it."""
        raise NotImplementedError

    def batch(self) -> Any:
        """Return the global batch: a tensor, or a tuple, list or dictionary of tensors. Equal on all ranks."""
        raise NotImplementedError

    def loss_terms(self, model: Any, batch: Any) -> Any:
        """Return one loss per sample, [samples], or per token, [samples, tokens], without collectives.

        model: the module of `build`. A term must depend on its own sample only.
        """
        raise NotImplementedError

    def parallelize(self, model: Any, mesh: Any) -> Any:
        """Return the parallel model: a module, or the modules of this rank's pipeline stages (list or dictionary).

        model: a module of `build`. mesh: of `make_mesh`; None in a program without a process group.
        """
        raise NotImplementedError

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        """Do what the trainer does up to the gradients of the optimizer step, accumulation included.

        model: the result of `parallelize`. batch: the global batch; take this rank's samples.
        """
        raise NotImplementedError

    def count(self, batch: Any) -> float | None:  # noqa: ARG002 - for subclasses
        """Return the divisor of the sum of all terms; None for the number of terms that are not ignored."""
        return None

    def ignored(self, batch: Any) -> Any:  # noqa: ARG002 - for subclasses
        """Return a mask of the terms that do not count, such as `labels == -100`; None if all terms count."""
        return None

    def owner(self, batch: Any) -> tuple[Any, Any]:
        """Return the data rank and the micro-batch of each term: two integer tensors of the terms' first dimensions.

        The default is the order of DistributedSampler: data rank r has the samples r, r + ranks, r + 2 * ranks, ...,
        which `tensor_split` divides into `micro_batches`.
        """
        return sampler_order(count_samples(batch), self.count_data_ranks(), self.micro_batches)

    def optimizer(self, model: Any) -> Any:  # noqa: ARG002 - for subclasses
        """Return the optimizer of one process for the parameters of a model; None if no step is checked."""
        return None

    def parallel_optimizer(self, model: Any, mesh: Any) -> Any:  # noqa: ARG002 - for subclasses
        """Return the optimizer of the parallel program. model: the result of `parallelize`."""
        return self.optimizer(model)

    def finish(self, model: Any, optimizer: Any) -> Any:
        """Clip and step as the trainer does. Returns the gradient norm before clipping, or None.

        model: the result of `parallelize`. Do not clear the gradients before the step.
        """

    def make_mesh(self) -> Any:
        """Return the device mesh of the program; by default of `mesh_sizes` on the CPU."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            return None
        sizes = self.mesh_sizes or {"dp": dist.get_world_size()}
        return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def select(self, batch: Any, samples: Any) -> Any:
        """Return a batch of some samples. samples: their indices, an integer tensor."""
        return select_samples(batch, samples, count_samples(batch))

    def named_parameters(self, model: Any) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of this rank by their names in the module of `build`.

        Override it if pipeline stages have other names. Prefixes of wrappers are removed later.
        """
        for prefix, module in list_modules(model):
            for name, parameter in module.named_parameters():
                yield f"{prefix}{name}", parameter

    def box(self, name: str, parameter: Any) -> Sequence[slice] | None:  # noqa: ARG002 - for subclasses
        """Return the slices of a tensor of `build` that a plain parameter of this rank holds; None for all of it.

        name: in the module of `build`. DTensors have their own layout.
        """
        return None

    def count_data_ranks(self) -> int:
        """Return the number of ranks with different samples, by the names of the dimensions of the mesh."""
        from syncheck.live.channel import world_size

        # Without a process group, the only process has all samples.
        if not self.mesh_sizes:
            return max(world_size(), 1)
        sizes = [size for name, size in self.mesh_sizes.items() if name.lower() in DATA_DIMENSIONS]
        return math.prod(sizes)

    @property
    def title(self) -> str:
        """The name of the case in reports."""
        return type(self).__name__


def list_modules(model: Any) -> list[tuple[str, Any]]:
    """Return the modules of a parallel model with the prefix of their names: itself, or the stages of a pipeline."""
    if isinstance(model, Mapping):
        return [(f"{prefix}.", module) for prefix, module in model.items()]
    # Stages in a list have the names of the whole model.
    modules = model if isinstance(model, (list, tuple)) else [model]
    return [("", module) for module in modules]


def list_aliases(model: Any) -> dict[str, Any]:
    """Return the parameters of a parallel model by all of their plain names: a tied parameter has several."""
    aliases: dict[str, Any] = {}
    for prefix, module in list_modules(model):
        # Other objects with parameters may not know their second names.
        if hasattr(module, "named_modules"):
            aliases.update(module.named_parameters(prefix.removesuffix("."), remove_duplicate=False))
    plain = plain_names(list(aliases))
    return {plain[name]: parameter for name, parameter in aliases.items()}


def sampler_order(samples: int, ranks: int, micro_batches: int = 1) -> tuple[Any, Any]:
    """Return rank and micro-batch of each sample, [samples] each, in the order of DistributedSampler."""
    import torch

    rank_of_sample = torch.arange(samples) % ranks
    micro_batch_of_sample = torch.zeros(samples, dtype=torch.long)
    for rank in range(ranks):
        samples_of_rank = torch.arange(rank, samples, ranks)
        for micro_batch, part in enumerate(samples_of_rank.tensor_split(micro_batches)):
            micro_batch_of_sample[part] = micro_batch
    return rank_of_sample, micro_batch_of_sample


def list_tensors(batch: Any) -> list[Any]:
    """Return the tensors of a batch in order."""
    tensors: list[Any] = []
    map_tensors(batch, tensors.append)
    return tensors


def count_samples(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor of a batch. Raises UsageError without a tensor."""
    for tensor in list_tensors(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    raise UsageError("batch: contains no tensor with samples; override `owner` and `select`")


def map_tensors(batch: Any, change: Any) -> Any:
    """Return a batch with each tensor replaced by the result of a function."""
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(part, change) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(map_tensors(part, change) for part in batch)
    # Numbers and strings of a batch stay as they are.
    return batch


def select_samples(batch: Any, samples: Any, count: int) -> Any:
    """Return the batch with some samples. Tensors whose first dimension has another size than `count` stay whole."""

    def select(tensor: Any) -> Any:
        has_samples = tuple(tensor.shape[:1]) == (count,)
        return tensor[samples] if has_samples else tensor

    return map_tensors(batch, select)


def plain_names(names: Sequence[str]) -> dict[str, str]:
    """Return the names without the prefixes of wrappers and of activation checkpointing."""
    normalized = normalize(names)
    return {name: plain.replace("_checkpoint_wrapped_module.", "") for name, plain in normalized.items()}
