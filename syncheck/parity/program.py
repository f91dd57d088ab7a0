"""The parallel program on this rank: its parameters by the names of one process, and this rank's copy of each gradient.

A gradient is never gathered to a whole tensor: that would add partial gradients, and hide a missing reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.layout.alignment import align
from syncheck.layout.boxes import count_indices
from syncheck.layout.dtensors import find_runs
from syncheck.live.memory.tensor_bytes import get_sharding
from syncheck.parity.case import ParityCase, list_aliases, list_modules, plain_names
from syncheck.parity.precision import cast_model, refuse_mixed_precision, unit_roundoff, without_autocast
from syncheck.parity.validation import check_parallel, require, without_dropout
from syncheck.snapshots import Snapshot, Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from syncheck.layout.boxes import Runs
    from syncheck.parity.reference import Reference

_BATCH_NORM = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


@dataclass(slots=True)
class LocalTensor:
    """A rank's copy of a parameter.

    parameter: of the program; a DTensor holds a shard.
    runs: the indices of the whole tensor in this copy, by dimension.
    placements: of a DTensor, by the name of the mesh dimension.
    gradient: this rank's copy in float64, after the backward pass.
    missing: whether the rank has no gradient, so that its copy is zero.
    frozen: whether the program freezes the parameter on this rank, after the backward pass.
    names: of the rank's parameters that are this one in the definition, which ties them.
    others: copies of the gradient by tied parameters that differ from the first.
    before: the values before the step, in float64.
    """

    parameter: Any
    runs: tuple[Runs, ...]
    placements: Mapping[str, str] = field(default_factory=dict)
    gradient: Any = None
    before: Any = None
    missing: bool = False
    frozen: bool = False
    names: tuple[str, ...] = ()
    others: list[Any] = field(default_factory=list)

    def take(self, whole: Any) -> Any:
        """Return the part of a whole tensor that this rank holds."""
        import torch

        part = whole
        for dimension, runs in enumerate(self.runs):
            if runs == ((0, whole.shape[dimension]),):
                continue
            part = part.index_select(dimension, torch.tensor(list_indices(runs), dtype=torch.long))
        return part

    def without_values(self) -> LocalTensor:
        """Return the layout alone, for other ranks."""
        return LocalTensor(None, self.runs, self.placements, names=self.names if self.others else ())

    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's copy."""
        return tuple(map(count_indices, self.runs))


@dataclass(slots=True)
class Program:
    """The parallel program on one rank.

    device_mesh: of the case, None without a process group.
    names: the name in one process of each parameter of this rank.
    tensors: this rank's copies, by the names of one process.
    mesh: the sizes of the device mesh by the names of its dimensions.
    coordinate: of this rank in the mesh.
    """

    case: ParityCase
    model: Any
    device_mesh: Any
    optimizer: Any
    names: dict[str, str]
    tensors: dict[str, LocalTensor]
    mesh: dict[str, int] = field(default_factory=dict)
    coordinate: tuple[int, ...] = ()

    @property
    def tied(self) -> dict[str, str]:
        """The first name of a parameter by its other names, if `build` has a parameter of its own for each name."""
        firsts: dict[int, str] = {}
        tied = {}
        for name, local in self.tensors.items():
            first = firsts.setdefault(id(local.parameter), name)
            if first != name:
                tied[name] = first
        return tied

    def backward(self, batch: Any) -> None:
        """Run the backward pass of the program, and keep this rank's copy of each gradient."""
        with without_autocast(), without_dropout(self.case.title):
            self.case.backward(self.model, batch, self.device_mesh)
        parameters = _list_parameters(self.case, self.model, self.names)
        gone = sorted(self.names.keys() - parameters.keys())
        require(not gone, f"{self.case.title}.backward: no longer parameters of the model: {', '.join(gone)}")
        for stored_name, parameter in parameters.items():
            local = self.tensors.get(self.names.get(stored_name, ""))
            # Neither the definition nor the program trains it.
            if local is None:
                require(
                    not parameter.requires_grad,
                    f"{self.case.title}.backward: {stored_name} is trained only since this method; add it, or unfreeze "
                    "it, in `parallelize`",
                )
                continue
            # FSDP may have replaced the parameter by its shard.
            local.parameter = parameter
            local.names += (stored_name,)
            gradient = copy_gradient(parameter, local.shape(), self.case.title, stored_name)
            if local.gradient is None:
                local.missing = parameter.grad is None
                local.frozen = not parameter.requires_grad
                local.gradient = gradient
            elif not _are_equal(local.gradient, gradient, parameter.dtype):
                local.others.append(gradient)

    def choose_copies(self, name: str, definition: Any) -> None:
        """Compare the copy of untied parameters that is farthest from the definition."""
        local = self.tensors[name]
        for gradient in local.others:
            # A copy with NaN is farther than all others.
            if not (gradient - definition).norm() <= (local.gradient - definition).norm():
                local.gradient = gradient


def _are_equal(gradient: Any, other: Any, dtype: Any) -> bool:
    """Whether two sums of the same gradients in a dtype are equal apart from their order."""
    rounding = 64 * unit_roundoff(str(dtype).removeprefix("torch."))
    # NaN differs from everything.
    return float((gradient - other).norm()) <= rounding * float(gradient.norm())


def list_indices(runs: Runs) -> list[int]:
    """Return the indices of runs of (start, size)."""
    indices: list[int] = []
    for start, size in runs:
        indices += range(start, start + size)
    return indices


def copy_local(tensor: Any) -> Any:
    """Return a copy of a tensor in float64; of a DTensor, of this rank's shard."""
    import torch

    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    # `clone` waits for a tensor whose collective is not finished.
    return tensor.detach().clone().to(torch.float64)


def copy_gradient(parameter: Any, shape: tuple[int, ...], title: str, name: str) -> Any:
    """Return this rank's copy of a gradient in float64, zeros without a gradient. Raises UsageError for other shapes.

    A DTensor that declares itself partial is reduced here, as each optimizer reduces it: the missing reduction is no
    fault. A plain tensor, and a DTensor that declares itself replicated, are compared as they are.
    """
    import torch

    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(shape, dtype=torch.float64)
    if hasattr(gradient, "placements") and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    copy = copy_local(gradient)
    require(
        tuple(copy.shape) == shape,
        f"{title}: the gradient of {name} has shape {list(copy.shape)}; expected {list(shape)}",
    )
    return copy


def build_program(reference: Reference, channel: Any) -> Program:
    """Build the parallel program, and find the part of each tensor that this rank holds. A collective.

    Raises UsageError if parameters differ from those of one process, or if the program cannot be compared.
    """
    case = reference.case
    mesh = case.make_mesh()
    with without_autocast():
        model = check_parallel(case, case.parallelize(cast_model(case.build(), reference.dtype), mesh))
    parameters = _list_parameters(case, model, reference.aliases.values())
    # A schedule or another object beside the modules has no modules of its own.
    roots = [module for _, module in list_modules(model) if hasattr(module, "named_modules")]
    refuse_mixed_precision(roots)
    _refuse_coupled_samples(reference, roots)
    names = _align_names(parameters, reference, channel)
    trained = {name for stored_name, name in names.items() if parameters[stored_name].requires_grad}
    # On any rank: all ranks compare the same parameters.
    trained_anywhere = trained.union(*channel.gather(trained, "trained parameters").values())
    reference.add_frozen(trained_anywhere.difference(reference.names))
    tensors: dict[str, LocalTensor] = {}
    for stored_name, name in names.items():
        if name in reference.names and name not in tensors:
            tensors[name] = _locate(case, name, parameters[stored_name], reference, channel.rank)
    program = Program(case, model, mesh, case.parallel_optimizer(model, mesh), names, tensors)
    _check_values(program, reference, channel.rank)
    if mesh is not None:
        program.mesh = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        program.coordinate = tuple(mesh.get_coordinate() or ())
    return program


def _list_parameters(case: ParityCase, model: Any, defined: Collection[str]) -> dict[str, Any]:
    """Return this rank's parameters, by their names without the prefixes of wrappers. Some may be frozen.

    defined: names that a parameter has beside its first name if the program ties it.
    """
    parameters = dict(case.named_parameters(model))
    plain = plain_names(list(parameters))
    named = {plain[name]: parameter for name, parameter in parameters.items()}
    # Other names of the program, like names in a stage, may belong to other parameters of `build`.
    if type(case).named_parameters is ParityCase.named_parameters:
        aliases = list_aliases(model)
        for name in filter(aliases.__contains__, defined):
            named.setdefault(name, aliases[name])
    return named


def _refuse_coupled_samples(reference: Reference, roots: list[Any]) -> None:
    """Raise UsageError if the loss is not a sum of terms, unless SyncBatchNorm computes it over all ranks."""
    if reference.separable is not False:
        return
    kinds: set[str] = set()
    for root in roots:
        kinds.update(type(module).__name__ for module in root.modules())
    if "SyncBatchNorm" in " ".join(kinds):
        return
    # SyncBatchNorm couples the samples of all ranks in the same way as one process.
    reason = "as in a contrastive loss over the batch"
    if kinds.intersection(_BATCH_NORM):
        reason = "because of BatchNorm; use SyncBatchNorm, or eval() in `build`"
    raise UsageError(
        f"{reference.case.title}.loss_terms: the loss is not a sum of terms: the terms of a sample depend on other "
        f"samples of the batch, {reason}"
    )


def _align_names(parameters: dict[str, Any], reference: Reference, channel: Any) -> dict[str, str]:
    """Return the name in one process of each parameter of this rank.

    Raises UsageError for unknown names. Frozen parameters of the program alone are left out.
    """
    described = {name: _describe(name, parameter) for name, parameter in parameters.items()}
    snapshot = Snapshot(path=f"rank {channel.rank}", format="memory", bytes=0, tensors=described)
    alignment = align(channel.gather(snapshot, "names of parameters"))
    names: dict[str, str] = {}
    for stored_name, parameter in parameters.items():
        common_name = alignment.names[channel.rank][stored_name]
        source = alignment.find_source(common_name)
        name = reference.aliases.get(common_name) or reference.aliases.get(source)
        if name is not None:
            names[stored_name] = name
        elif parameter.requires_grad:
            raise UsageError(
                f"{reference.case.title}: {stored_name} is no parameter of `build`; override `named_parameters` to map "
                "its name"
            )
    return names


def _describe(name: str, parameter: Any) -> Tensor:
    """Return the description of a parameter without its values."""
    sharding = get_sharding(parameter) if hasattr(parameter, "placements") else None
    shape = tuple(parameter.shape)
    if sharding is not None:
        shape = tuple(parameter.to_local().shape)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Tensor(
        name=name,
        dtype=dtype,
        shape=shape,
        strides=contiguous_strides(shape),
        path="memory",
        offset=0,
        parameter=True,
        sharding=sharding,
    )


def _locate(case: ParityCase, name: str, parameter: Any, reference: Reference, rank: int) -> LocalTensor:
    """Find the part of a tensor that this rank holds. Raises UsageError if it is unknown, or holds other values."""
    whole = dict(reference.model.named_parameters())[name]
    described = _describe(name, parameter)
    placements: dict[str, str] = {}
    runs: list[Runs] | None = [((0, size),) for size in whole.shape]
    if described.sharding is not None:
        runs = find_runs(rank, described, described.sharding)
        mesh_names = described.sharding.names or tuple(map(str, range(len(described.sharding.mesh))))
        placements = dict(zip(mesh_names, described.sharding.placements, strict=True))
    else:
        slices = case.box(name, parameter)
        if slices is not None:
            runs = []
            for part, size in zip(slices, whole.shape, strict=True):
                start, stop, _ = part.indices(size)
                runs.append(((start, stop - start),))
    local = LocalTensor(parameter, tuple(runs or ()), placements)
    require(
        runs is not None and local.shape() == described.shape,
        f"{case.title}: rank {rank} holds {name} with shape {list(described.shape)}, one process with "
        f"{list(whole.shape)}; return its slices from `box`",
    )
    local.before = copy_local(parameter)
    return local


def _check_values(program: Program, reference: Reference, rank: int) -> None:
    """Raise UsageError for a parameter with other values than in one process, except those that the program ties."""
    tied = program.tied
    parameters = dict(reference.model.named_parameters())
    for name in program.tensors.keys() - {*tied, *tied.values()}:
        local = program.tensors[name]
        require(
            local.take(parameters[name].detach()).double().equal(local.before),
            f"{program.case.title}: {name} has other values on rank {rank} than in one process: `build` must seed the "
            "model, and `parallelize` must not change parameters",
        )
