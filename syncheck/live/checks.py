"""Check, inside a running job, that all ranks hold the same model."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from syncheck.api import Options
from syncheck.errors import UsageError
from syncheck.live.exchange import BUDGET, compare_across_ranks
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.records import Report

P = ParamSpec("P")
R = TypeVar("R")


def exclude_from_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function that is called in compiled code: collectives and hashes are no graph.

    torch.compiler.disable does that too, but loads the compiler, more than a second, also where nobody compiles.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            found: R = torch.compiler.disable(function)(*args, **kwargs)
            return found
        return function(*args, **kwargs)

    return called


@exclude_from_compile
def check(
    model: Any,
    optimizer: Any = None,
    scaler: Any = None,
    *,
    group: Any = None,
    mesh: Any = None,
    only: str | Sequence[str] = (),
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    rng: bool = False,
    budget: int = BUDGET,
) -> Report:
    """Compare the model of every rank of a process group, and return the same report on all of them.

    A collective call: every rank of the group has to make it, between steps, while nothing writes the tensors (what is
    written meanwhile may be told of as a difference, or missed until the next check). Nothing is changed and no random
    number is drawn. Parameters, buffers (those too that no state dict holds), the optimizer's state by parameter name,
    plain values such as learning rates, and the scaler are compared. Every tensor has one digest of 128 bits, computed
    where it lies (`syncheck.live.digest`); bytes are fetched only of what differs.

    model: a module, or a tuple of modules and of whatever has a `state_dict()`. optimizer, scaler: of this rank; one
    that is given on some ranks only is a difference. group: a process group of torch.distributed; by default that of a
    one-dimensional mesh, else all ranks. mesh: a DeviceMesh of the ranks of the group: along its dimensions of tensor,
    pipeline and expert parallelism (tp, pp, ep and the like) plain tensors are parts, along all others copies. DTensors
    need none: they know their own. only, include, exclude, allow: as in `syncheck.Options`, a single text for a tuple.
    rng: compare the states of the random number generators too (Python, numpy, torch, the current CUDA device), which
    most jobs want to differ. budget: bytes of differing tensors that are fetched at most, the smallest first; of the
    rest it is told that and where they differ.

    Raises, on all ranks and with one text: UsageError for what cannot be compared, RankFailed where a rank could not
    take part. Where a rank has ended, each of the others raises RankFailed when it notices, within the group's timeout.
    A difference does not raise: it is `report.verdict == "out_of_sync"`. In a group of one rank the verdict is
    "undecided".
    """
    parts = tuple(part for part in (model, optimizer, scaler) if part is not None)

    # What may fail is done in there: a rank that raises out here leaves the others waiting.
    def options() -> Options:
        if type(budget) is not int or budget < 0:
            raise UsageError(f"budget={budget!r:.80}: needs a whole number of bytes, 0 or more")
        return Options(
            only=_as_tuple(only),
            include=_as_tuple(include),
            exclude=_as_tuple(exclude),
            allow=_as_tuple(allow),
            rng=rng,
        )

    chosen = group_of(mesh) if group is None and mesh is not None else group
    states = (RandomStates(rng=_GlobalStates()),) if rng else ()
    return compare_across_ranks(
        (*parts, *states), chosen, options, mesh=lambda: _get_mesh_coordinates(mesh, chosen), alone=True, budget=budget
    )


def group_of(mesh: Any) -> Any:
    """Return the process group of a mesh of one dimension; of another only all ranks have one.

    Raises UsageError on a rank that is not in that mesh.
    """
    if not _is_mesh(mesh) or mesh.ndim != 1:
        return None
    if mesh.get_coordinate() is None:
        raise UsageError("this rank is not in the mesh given; call this on its ranks only")
    return mesh.get_group()


def _is_mesh(thing: Any) -> bool:
    return all(hasattr(thing, name) for name in ("get_coordinate", "get_group", "mesh_dim_names", "ndim"))


def _as_tuple(given: Any) -> Any:
    """Return a tuple: of one for a single text, of none for None. Of anything else the options complain."""
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    return tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else given


def _get_mesh_coordinates(mesh: Any, group: Any) -> dict[str, int]:
    """Return where this rank stands in a mesh, by the names of its dimensions. group: None for all ranks."""
    if mesh is None:
        return {}
    if not _is_mesh(mesh):
        raise UsageError(f"mesh= of class {type(mesh).__name__}: needs a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise UsageError(
            "mesh= has no names of dimensions, so nothing tells along which of them ranks hold parts; needs "
            'mesh_dim_names=, as in init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))'
        )
    dist = sys.modules["torch.distributed"]
    inside = set(mesh.mesh.flatten().tolist())
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    outside = tuple(rank for rank in members if rank not in inside)
    if outside:
        raise UsageError(
            f"mesh= is without {ranks_text(outside)} of the group; needs a mesh with all of its ranks, or the mesh's "
            "own ranks as group="
        )
    return dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate(), strict=False))


class RandomStates(dict[str, "_GlobalStates"]):
    """The states of the random number generators, under the name that checkpoints give them; reports name the class."""


class _GlobalStates:
    """The states of this process's random number generators."""

    def state_dict(self) -> dict[str, Any]:
        """Return them as tensors and arrays. None is changed."""
        torch: Any = sys.modules["torch"]
        version, words, gauss = random.getstate()
        # On the CPU, whatever a training has made the default for new tensors.
        found: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(words, dtype=torch.int64, device="cpu"),
            "python_gauss": torch.tensor([version, *_encode_gauss(gauss)], dtype=torch.int64, device="cpu"),
        }
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            found |= _get_numpy_state(numpy)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
        return found


def _get_numpy_state(numpy: Any) -> dict[str, Any]:
    """Return the state of numpy's global generator, as arrays."""
    state = numpy.random.get_state(legacy=False)
    if "key" not in state["state"]:  # not the usual generator; numbers of any size, in a dict
        return {"numpy": numpy.frombuffer(hashlib.sha256(repr(state).encode()).digest(), numpy.uint8)}
    at = [state["state"]["pos"], *_encode_gauss(state["gauss"] if state["has_gauss"] else None)]
    return {"numpy": state["state"]["key"], "numpy_at": numpy.array(at, numpy.int64)}


def _encode_gauss(gauss: float | None) -> tuple[int, int]:
    """Return whether a generator keeps a normal number for its next call, and the bits of that."""
    return (0, 0) if gauss is None else (1, *struct.unpack("<q", struct.pack("<d", gauss)))
