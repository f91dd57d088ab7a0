"""Check, inside a running job, that all ranks hold the same model."""

from __future__ import annotations

import random
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from syncheck.api import Options
from syncheck.errors import UsageError
from syncheck.live.exchange import BUDGET, compare_across_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.records import Report

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
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


@eager
def check(
    model: Any,
    optimizer: Any = None,
    scaler: Any = None,
    *,
    group: Any = None,
    mesh: Any = None,
    only: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow: Sequence[str] = (),
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
    need none: they know their own. only, include, exclude, allow: as in `syncheck.Options`. rng: compare the states of
    the random number generators too (Python, numpy, torch, the current CUDA device), which most jobs want to differ.
    budget: bytes of differing tensors that are fetched at most, the smallest first; of the rest it is told that and
    where they differ.

    Raises, on all ranks and with one text: UsageError for what cannot be compared, RankFailed where a rank could not
    take part. Where a rank has ended, each of the others raises RankFailed when it notices, within the group's timeout.
    A difference does not raise: it is `report.verdict == "out_of_sync"`. In a group of one rank the verdict is
    "undecided".
    """
    parts = tuple(part for part in (model, optimizer, scaler) if part is not None)

    def options() -> Options:
        given = {"only": only, "include": include, "exclude": exclude, "allow": allow}
        # A single text stands for a tuple of one, as in the fixes that findings print.
        texts: dict[str, Any] = {n: (of,) if isinstance(of, str) else tuple(of) for n, of in given.items()}
        return Options(**texts, rng=rng)

    chosen = group_of(mesh) if group is None and mesh is not None else group
    states = ({"rng": _random_states()},) if rng else ()
    return compare_across_ranks(
        (*parts, *states), chosen, options, mesh=lambda: _place(mesh), alone=True, budget=budget
    )


def group_of(mesh: Any) -> Any:
    """Return the process group of a mesh of one dimension; of another only all ranks have one."""
    return mesh.get_group() if getattr(mesh, "ndim", None) == 1 else None


def _place(mesh: Any) -> dict[str, int]:
    """Return where this rank stands in a mesh, by the names of its dimensions."""
    if mesh is None:
        return {}
    if not callable(getattr(mesh, "get_coordinate", None)):
        raise UsageError(f"mesh= of class {type(mesh).__name__}: needs a torch.distributed.device_mesh.DeviceMesh")
    at = mesh.get_coordinate()
    if at is None:
        raise UsageError("this rank is not in the mesh given; needs a mesh of the ranks of the group: say group= too")
    return dict(zip(mesh.mesh_dim_names or (), at, strict=False))


def _random_states() -> dict[str, Any]:
    """Return the states of this process's generators, as tensors and arrays. None is changed."""
    torch: Any = sys.modules.get("torch")
    if torch is None:  # then there is no process group either, which is told
        return {}
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    found["python_gauss"] = torch.tensor([version, *([] if gauss is None else [hash(gauss)])])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        found["numpy"] = state["state"]["key"]
        found["numpy_at"] = numpy.array([state["state"]["pos"], state["has_gauss"]])
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found
