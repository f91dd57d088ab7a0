"""Check inside a running job that all ranks hold the same model."""

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
from syncheck.loaded import find_loaded
from syncheck.option_kinds import make_tuple
from syncheck.options import check_codes
from syncheck.text import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.records import Report

P = ParamSpec("P")
R = TypeVar("R")


def exclude_from_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from torch.compile, which cannot trace collectives and hashes.

    torch.compiler.disable does the same, but imports the compiler, which takes more than a second, even in programs
    that never compile.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        torch = find_loaded("torch")
        if torch is not None and torch.compiler.is_compiling():
            result: R = torch.compiler.disable(function)(*args, **kwargs)
            return result
        return function(*args, **kwargs)

    return wrapper


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
    """Compare the model of every rank of a process group, and return the same report on all ranks.

    A collective call: every rank of the group must make it, between steps, while nothing writes the tensors (concurrent
    writes may appear as differences, or go unnoticed until the next check). The check changes nothing and draws no
    random number. It compares parameters, buffers (also non-persistent buffers), the optimizer's state by parameter
    name, plain values like learning rates, and the scaler. `requires_grad` and the order of registration count; plain
    attributes of modules that differ are named in a note. Each tensor gets one 128-bit digest, computed on its device
    (`syncheck.live.digest`); only the bytes of differing tensors are fetched.

    model: a module, or a tuple of modules and other objects with a `state_dict()`.
    optimizer, scaler: of this rank; an object given on some ranks only is a difference.
    group: a torch.distributed process group, by default the group of a one-dimensional mesh, else all ranks.
    mesh: a DeviceMesh of the ranks of the group. Plain tensors are shards along its tensor, pipeline and expert
        parallel dimensions (named tp, pp, ep and so on) and copies along its other dimensions. DTensors have their own
        mesh.
    only, include, exclude, allow: as in `syncheck.Options`; a string stands for a tuple with one element.
    rng: also compare the RNG states (Python, numpy, torch, the current CUDA device), which differ by design in most
        jobs.
    budget: maximum bytes of differing tensors to fetch, smallest tensors first; the report lists the other tensors and
        their ranks without the size of the difference.

    Raises the same error on all ranks: UsageError for arguments that cannot be compared, RankFailed if a rank could not
    take part. If a rank exits, the other ranks raise RankFailed when they notice, within the group's timeout. A
    difference is not an error: the report has `verdict == "out_of_sync"`. In a group of one rank the verdict is
    "undecided".
    """
    return run_check(
        (model, optimizer, scaler),
        group=group,
        mesh=mesh,
        only=only,
        include=include,
        exclude=exclude,
        allow=allow,
        rng=rng,
        budget=budget,
    )


@exclude_from_compile
def run_check(
    objects: Sequence[Any],
    cache: dict[Any, Report] | None = None,
    *,
    group: Any = None,
    mesh: Any = None,
    rng: bool = False,
    budget: int = BUDGET,
    **selection: Any,
) -> Report:
    """Run `check` with a cache, as in `compare_across_ranks`. objects: model, optimizer and scaler, or None.

    selection: only=, include= and so on.
    """

    # Checked within the collective call: a rank that raises here would leave its peers waiting.
    def check_options() -> Options:
        if type(budget) is not int or budget < 0:
            raise UsageError(f"budget={budget!r:.80}: must be an integer number of bytes, at least 0")
        return make_options(rng=rng, **selection)

    parts = [part for part in objects if part is not None]
    if rng:
        parts.append(RandomStates(rng=_GlobalStates()))
    members = group_of(mesh) if group is None and mesh is not None else group
    return compare_across_ranks(
        parts,
        members,
        check_options,
        find_mesh=lambda: _get_mesh_coordinates(mesh, members),
        alone=True,
        budget=budget,
        cache=cache,
    )


def group_of(mesh: Any) -> Any:
    """Return the process group of a one-dimensional mesh, or None for other meshes, whose group is all ranks.

    Raises UsageError on a rank outside the mesh.
    """
    if not _is_mesh(mesh) or mesh.ndim != 1:
        return None

    if mesh.get_coordinate() is None:
        raise UsageError("this rank is not in mesh=; call this on the ranks of the mesh only")

    return mesh.get_group()


def _is_mesh(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("get_coordinate", "get_group", "mesh_dim_names", "ndim"))


def make_options(**arguments: Any) -> Options:
    """Return options from arguments of `check`: None stands for (), and a string for a tuple with one element.

    The codes of witnesses, which no comparison finds, are left out of `allow`.
    """
    options = {name: _list_given(value) for name, value in arguments.items()}
    allow = options.get("allow")
    if isinstance(allow, tuple):
        from syncheck.live.witnesses.rules import WITNESS_CODES, WITNESS_RULES

        # Other values than texts are refused below.
        if all(isinstance(code, str) for code in allow):
            check_codes(allow, {rule.slug: rule.code for rule in WITNESS_RULES})
        options["allow"] = tuple(code for code in allow if str(code).upper() not in WITNESS_CODES)
    return Options(**options)


def list_allowed(allow: Any) -> tuple[str, ...]:
    """Return the codes of the argument `allow`, also of witnesses, as findings spell them. Raises UsageError."""
    make_options(allow=allow)
    return tuple(map(str.upper, _list_given(allow)))


def _list_given(value: Any) -> Any:
    """Return the tuple of an argument of `check`."""
    return make_tuple(() if value is None else value)


def _get_mesh_coordinates(mesh: Any, group: Any) -> dict[str, int]:
    """Return this rank's coordinate in each named mesh dimension. group: None for all ranks."""
    if mesh is None:
        return {}

    if not _is_mesh(mesh):
        raise UsageError(f"mesh= of class {type(mesh).__name__}: expected a torch.distributed.device_mesh.DeviceMesh")

    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise UsageError(
            "mesh= has no dimension names, which are required to distinguish shards from copies; pass "
            'mesh_dim_names=, as in init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))'
        )

    dist = sys.modules["torch.distributed"]
    group_ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    # A rank outside the mesh has no coordinate, so nobody knows which shards it holds.
    mesh_ranks = set(mesh.mesh.flatten().tolist())
    missing_ranks = tuple(rank for rank in group_ranks if rank not in mesh_ranks)
    if missing_ranks:
        raise UsageError(
            f"mesh= does not contain {ranks_text(missing_ranks)} of the group; pass a mesh with all ranks of the "
            "group, or the ranks of the mesh as group="
        )

    return dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate(), strict=False))


class RandomStates(dict[str, "_GlobalStates"]):
    """The RNG states under the names that checkpoints use. Reports show the class name."""


class _GlobalStates:
    """The RNG states of this process."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states as tensors and arrays, without changing them."""
        torch: Any = sys.modules["torch"]
        version, words, gauss = random.getstate()
        # Explicitly on the CPU: the training may have changed the default device.
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(words, dtype=torch.int64, device="cpu"),
            "python_gauss": torch.tensor([version, *_encode_gauss(gauss)], dtype=torch.int64, device="cpu"),
        }
        numpy = find_loaded("numpy")
        if numpy is not None:
            state |= _get_numpy_state(numpy)

        # Asking an uninitialized device for its state would initialize it.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()

        return state


def _get_numpy_state(numpy: Any) -> dict[str, Any]:
    """Return the state of numpy's global generator as arrays."""
    state = numpy.random.get_state(legacy=False)
    generator_state = state["state"]
    # Generators other than MT19937 have integers of any size, which no array holds.
    if "key" not in generator_state:
        return {"numpy": numpy.frombuffer(hashlib.sha256(repr(state).encode()).digest(), numpy.uint8)}

    gauss = state["gauss"] if state["has_gauss"] else None
    position = [generator_state["pos"], *_encode_gauss(gauss)]
    return {"numpy": generator_state["key"], "numpy_at": numpy.array(position, numpy.int64)}


def _encode_gauss(gauss: float | None) -> tuple[int, int]:
    """Encode the normal variate that a generator has cached for its next call: (present, bits)."""
    if gauss is None:
        return 0, 0

    (bits,) = struct.unpack("<q", struct.pack("<d", gauss))
    return 1, bits
