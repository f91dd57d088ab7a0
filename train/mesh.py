"""The coordinates of a rank in a parallel method: which samples, and which part of the model, it has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from train.errors import UserError, refuse

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from train.settings import Settings

# Along these dimensions ranks have different samples: replicas, shards of FSDP, and groups of ranks with other experts.
DATA = ("data", "replicate", "shard", "expert")


@dataclass(frozen=True)
class Mesh:
    """The position of a rank in a grid of ranks.

    rank: of this process. names, sizes: dimensions of the grid, outermost first, so that ranks with neighboring numbers
    are neighbors in the last dimension. Dimensions that are not listed have size 1.
    """

    rank: int = 0
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def size(self, name: str) -> int:
        """Return the number of ranks along a dimension."""
        return dict(zip(self.names, self.sizes, strict=True)).get(name, 1)

    @property
    def coordinates(self) -> dict[str, int]:
        """Return this rank's coordinate by dimension."""
        strides = [1, *accumulate(reversed(self.sizes[1:]), int.__mul__)][::-1]
        return {
            name: self.rank // stride % size
            for name, size, stride in zip(self.names, self.sizes, strides[-len(self.sizes) :], strict=True)
        }

    def coordinate(self, name: str) -> int:
        """Return this rank's coordinate along a dimension."""
        return self.coordinates.get(name, 0)

    @property
    def data_size(self) -> int:
        """Return the number of groups of ranks with different samples."""
        return self._flatten(DATA)[1]

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's group: ranks with the same number have the same samples."""
        return self._flatten(DATA)[0]

    @property
    def stream(self) -> int:
        """Return the number of this rank's random stream.

        Tensor-parallel ranks compute the same activations, and must draw the same dropout masks.
        """
        outer, size = self._flatten(("pipeline", "context"))
        assert outer < size
        return self.data_rank + self.data_size * outer

    @property
    def counts(self) -> bool:
        """Return whether this rank's sums belong in a total over all ranks.

        The last pipeline stage computes the loss, and tensor-parallel ranks compute the same loss.
        """
        return self.coordinate("tensor") == 0 and self.coordinate("pipeline") == self.size("pipeline") - 1

    def _flatten(self, names: tuple[str, ...]) -> tuple[int, int]:
        """Return the coordinate and size of several dimensions taken as one."""
        coordinate, size = 0, 1
        for name in self.names:
            if name in names:
                coordinate, size = coordinate * self.size(name) + self.coordinate(name), size * self.size(name)
        return coordinate, size

    def build(self, device_type: str) -> DeviceMesh:
        """Build torch's mesh with the same dimensions; a collective."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, self.sizes, mesh_dim_names=self.names)


def gather_whole(tensor: Any) -> Any:
    """Return the whole tensor of a DTensor, a collective; return any other tensor unchanged."""
    if is_dtensor(tensor):
        return tensor.full_tensor()
    return tensor


def is_dtensor(tensor: Any) -> bool:
    """Return whether a value is a DTensor, without importing torch.distributed.tensor, which takes half a second."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor; return any other value unchanged."""
    if is_dtensor(tensor):
        return tensor.to_local()
    return tensor


def join_shards(local: Tensor, *, like: Any) -> Any:
    """Return the DTensor of which `local` is this rank's shard, with the shape and layout of another DTensor."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape = like.device_mesh, like.placements, like.shape
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=like.stride())


def refuse_model(settings: Settings, problem: str, advice: str | None = None) -> UserError:
    """Return the error of a method that cannot divide the model."""
    option, default = f"--model {settings.model}", "use gpt-tiny or gpt-tiny-moe"
    if settings.task is not None:
        option, default = f"--task {settings.task}", "use another --method"
    return UserError(f"{option}: --method {settings.method} {problem}; {advice or default}")


def find_parallel_degree(settings: Settings, world_size: int, default: int | None = None) -> int:
    """Return the number of ranks that share a copy of the model, which divides the number of all ranks.

    default: without --parallel-degree; None for all ranks. Raises UserError.
    """
    degree = settings.parallel_degree
    if degree is not None and degree < 2:
        raise UserError(f"--parallel-degree {degree}: must be at least 2, the ranks that share a copy of the model")
    options = f"--method {settings.method}"
    if degree is not None:
        options += f" --parallel-degree {degree}"
    degree = degree or default or world_size
    refuse(
        (degree < 2, f"{options}: needs at least 2 ranks, found {world_size}"),
        (world_size % degree, f"{options}: needs a multiple of {degree} ranks, found {world_size}"),
    )
    return degree
