"""Classify tensors: parameter, buffer, BatchNorm statistic, optimizer state, loss scaler, averaged copy, RNG state.

A state dict does not distinguish parameters from buffers, nor a module called `scaler` from a gradient scaler. The
evidence, strongest first: names of parameters and buffers recorded by the trainer, the optimizer (its states belong to
parameters), the user's globs, names and shapes of other tensors, and the tensor's own name. A kind that depends only on
the tensor's name is unsure, unless torch.nn gives this name only to parameters.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from syncheck.snapshots import Metadata
from syncheck.tensors.averages import find_candidates, find_copies, find_roots, find_swapped
from syncheck.tensors.names import is_rng_state, sibling_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from syncheck.snapshots import Snapshot
    from syncheck.tensors.averages import Root

KINDS = (
    "parameter", "buffer", "bn_mean", "bn_var", "bn_count",
    "optimizer", "optimizer_step", "scaler", "ema", "rng",
)  # fmt: skip
PARAMETERS = frozenset({"parameter"})
BUFFERS = frozenset({"buffer", "bn_mean", "bn_var", "bn_count"})
OPTIMIZER = frozenset({"optimizer", "optimizer_step"})
MODEL = PARAMETERS | BUFFERS
BN_STATISTICS = frozenset({"bn_mean", "bn_var"})

_BN = {"running_mean": "bn_mean", "running_var": "bn_var", "num_batches_tracked": "bn_count"}
# Last name segments that libraries register as buffers: rotary embeddings, causal masks, position ids, counts of
# codebooks, quantization observers.
BUFFER_NAMES = frozenset(
    "inv_freq cos_cached sin_cached attn_mask causal_mask position_ids relative_position_index masked_bias "
    "cluster_size embed_avg queue_ptr fake_quant_enabled observer_enabled".split()
)
# Last name segments of parameters in torch.nn, which rarely name anything else.
_PARAMETER = re.compile(
    r"weight|bias|(in|[qkv])_proj_weight|in_proj_bias|(weight|bias)_(ih|hh|hr)_l\d+(_reverse)?|weight_orig|original\d?"
)
# Integers; only floating-point tensors are trained.
_INTEGERS = ("int", "uint", "bool")
SCALERS = ("scaler", "grad_scaler", "amp_scaler")
# Values of torch's GradScaler: attributes (with an underscore) and keys of its state dict.
_SCALING = frozenset(
    "scale growth_factor backoff_factor growth_interval growth_tracker _scale _growth_factor _backoff_factor "
    "_growth_interval _growth_tracker".split()
)
_SCALAR: tuple[tuple[int, ...], ...] = ((), (1,))


class Kinds(NamedTuple):
    """The kinds of the tensors of a checkpoint.

    guessed: whether a parameter was recognized by its name alone, without metadata or optimizer state.
    unsure: names of tensors that may be parameters or buffers of the model; selecting either kind must include them.
    """

    by_name: dict[str, str]
    guessed: bool
    unsure: frozenset[str]


class _Kind(NamedTuple):
    """The kind of one tensor, and whether it is certain."""

    kind: str
    sure: bool


def classify_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Metadata | None,
    buffer_globs: Iterable[str] = (),
    *,
    dtypes: Mapping[str, str] | None = None,
    parameters: Iterable[str] = (),
) -> Kinds:
    """Classify each tensor of one checkpoint.

    shapes, dtypes: by tensor name. parameters: names of known model parameters, besides the metadata's.
    """
    evidence = _collect_evidence(
        shapes,
        dtypes or {},
        metadata or Metadata(),
        parameters,
        buffer_globs,
    )
    roots = find_roots(shapes, evidence.averaged)
    swapped = find_swapped(shapes)
    candidates = _list_candidates(roots, evidence)

    possible_copies = swapped.union(candidates)
    kinds = {name: evidence.kind(name) for name in shapes if name not in possible_copies}

    copies = _find_copies(
        roots,
        candidates,
        kinds,
        evidence,
    )
    for name in candidates:
        if name in copies:
            # Options that select parameters or buffers select the copies in modules, too.
            kinds[name] = _Kind("ema", name not in evidence.model)
        else:
            kinds[name] = evidence.kind(name, sure=False)

    kinds |= dict.fromkeys(swapped, _Kind("ema", sure=True))
    by_name = {name: kinds[name].kind for name in shapes}
    unsure = [name for name in shapes if not kinds[name].sure]
    # A parameter is recognized by its name if neither an optimizer nor a description of the model proves it.
    untrained = [name for name, kind in by_name.items() if kind == "parameter" and name not in evidence.trained]
    guessed = evidence.buffers is None and len(untrained) > 0
    return Kinds(by_name, guessed, frozenset(unsure))


def _collect_evidence(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    metadata: Metadata,
    parameters: Iterable[str],
    buffer_globs: Iterable[str],
) -> _Evidence:
    """Return the evidence about the tensors of a checkpoint. Arguments as in `classify_tensors`."""
    optimized = frozenset(metadata.optimizer_parameters)
    known_parameters = optimized.union(parameters, metadata.frozen)
    described = known_parameters.union(metadata.buffers or ())
    buffers = None if metadata.buffers is None else frozenset(metadata.buffers)
    trained = _find_trained(shapes, described)
    return _Evidence(
        shapes=shapes,
        dtypes=dtypes,
        parameters=known_parameters,
        buffers=buffers,
        optimized=optimized,
        averaged=metadata.averaged,
        trained=trained,
        model=trained.union(described),
        globs=tuple(buffer_globs),
    )


def _find_trained(names: Collection[str], model: Collection[str]) -> frozenset[str]:
    """Return the tensors with optimizer state. model: names that are not optimizer states in any case."""
    states = [name for name in names if name.startswith("optimizer.") and name not in model]
    owners = {name.removeprefix("optimizer.").rpartition(".")[0] for name in states}
    trained = owners.intersection(names)
    # With several optimizers, the names of states start with a number.
    for owner in owners - trained:
        number, _, parameter = owner.partition(".")
        if number.isdecimal() and parameter in names:
            trained.add(parameter)

    return frozenset(trained)


class _NameRule(NamedTuple):
    """A rule about last parts of names that libraries use for one kind.

    names: last parts.
    siblings: last parts of other tensors that must exist.
    kind: of the tensor.
    trained: the kind is certain if it is known (True) or unknown (False) which tensors are trained.
    depth: number of parts that names of siblings replace; 1 for tensors of the same module.
    """

    names: frozenset[str]
    siblings: tuple[str, ...]
    kind: str
    trained: tuple[bool, ...] = (True, False)
    depth: int = 1


_NAME_RULES = (
    # Buffers of spectral_norm. weight_norm has parameters weight_g and weight_v.
    _NameRule(frozenset({"weight_u", "weight_v"}), ("weight_orig",), "buffer"),
    # The same as parametrization: `parametrizations.weight.0._u` beside `parametrizations.weight.original`.
    _NameRule(frozenset({"_u", "_v"}), ("original",), "buffer", depth=2),
    _NameRule(frozenset({"weight_g", "weight_v"}), ("weight_g", "weight_v"), "parameter", (False,)),
    # The name is confirmed if an optimizer exists and has no state for this tensor.
    _NameRule(BUFFER_NAMES | {"weight_u"}, (), "buffer", (True,)),
)


class _Evidence(NamedTuple):
    """Evidence about the tensors of a checkpoint, besides their names.

    shapes, dtypes: by tensor name.
    parameters: names of parameters, according to metadata or the caller.
    buffers: names of buffers in the metadata; None if it does not list them.
    optimized: the optimizer's parameters in the metadata.
    averaged: names of objects in memory that average the weights.
    trained: tensors with optimizer state.
    model: tensors that certainly belong to the model, even if their names are those of a scaler or an RNG state.
    globs: the user's globs of buffers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    parameters: frozenset[str]
    buffers: frozenset[str] | None
    optimized: frozenset[str]
    averaged: tuple[str, ...]
    trained: frozenset[str]
    model: frozenset[str]
    globs: tuple[str, ...]

    def kind(self, name: str, *, sure: bool = True) -> _Kind:
        """Return the kind of a tensor outside averaged copies.

        sure: whether the kind of a tensor with a usual name may be certain.
        """
        if name in self.parameters:
            return _Kind("parameter", sure=True)

        kind = self._kind_outside_model(name)
        if kind is not None:
            # No optimizer has a state called `weight`, so this may be a module called `optimizer`.
            is_layer = kind == "optimizer" and self._is_layer(name)
            return _Kind(kind, sure=not is_layer)

        if name in self.trained:
            return _Kind("parameter", sure=True)

        statistic = self._bn_statistic(name)
        if statistic is not None:
            return _Kind(statistic, sure)

        if self.buffers is not None:
            return self._by_listed_buffers(name, self.buffers, sure)

        if matches_any(name, self.globs):
            return _Kind("buffer", sure=True)

        return self._by_siblings(name, sure)

    def _by_listed_buffers(self, name: str, buffers: frozenset[str], sure: bool) -> _Kind:
        """Return the kind of a tensor if all buffers of described modules are listed."""
        if name in buffers:
            return _Kind("buffer", sure=True)

        # If the optimizer's parameters are listed, this parameter is frozen, another rank's, or in an undescribed
        # module.
        is_confirmed = not self.optimized or _named_as_parameter(name)
        return _Kind("parameter", sure and is_confirmed)

    def _kind_outside_model(self, name: str) -> str | None:
        """Return the kind of a tensor outside the model; None for the model's tensors."""
        if name in self.model:
            return None

        parts = name.split(".")
        if parts[0] == "optimizer":
            # A tensor called `step` that is no scalar is a state of an unknown optimizer.
            is_step = parts[-1] == "step" and self.shapes[name] in _SCALAR
            return "optimizer_step" if is_step else "optimizer"

        if self._is_rng_state(name, parts):
            return "rng"

        # Like RNG states, these errors differ between ranks by design.
        if _is_powersgd_error(parts):
            return "rng"

        if self._is_of_scaler(name):
            return "scaler"

        return None

    def _is_rng_state(self, name: str, parts: Sequence[str]) -> bool:
        """Whether a tensor is a 1-D tensor of bytes or words; other tensors with this name belong to a module."""
        if not is_rng_state(parts):
            return False

        if len(self.shapes[name]) != 1:
            return False

        dtype = self.dtypes.get(name, "uint8")
        if dtype.startswith(("uint", "unknown")):
            return True

        # Signed integers need the key at either end of the name.
        if not dtype.startswith("int"):
            return False

        words = [part for part in parts if not part.isdecimal()]
        ends = (parts[0], *words[-1:])
        return is_rng_state(ends)

    def _is_of_scaler(self, name: str) -> bool:
        """Whether a number is a value of a gradient scaler, and not of a module called `scaler`."""
        scaler, _, value = name.partition(".")
        if scaler not in SCALERS or value not in _SCALING:
            return False

        if self.shapes[name] not in _SCALAR:
            return False

        # One value alone may be a parameter, unless its name is that of a private attribute.
        if value.startswith("_"):
            return True

        values = [value for value in _SCALING if f"{scaler}.{value}" in self.shapes]
        return len(values) > 1

    def _is_layer(self, name: str) -> bool:
        """Whether a name of an optimizer state is that of a parameter in a module called `optimizer`."""
        owner, _, last = name.removeprefix("optimizer.").rpartition(".")
        if last not in ("weight", "bias"):
            return False

        # The owner of a state is a parameter, by its name or its number.
        return owner not in self.shapes and not owner.isdecimal()

    def _bn_statistic(self, name: str) -> str | None:
        """Return the kind of a BatchNorm statistic, if its siblings confirm it; any parameter may have this name."""
        last = name.rpartition(".")[2]
        kind = _BN.get(last)
        if kind is None:
            return None

        running_mean = sibling_name(name, "running_mean")
        running_var = sibling_name(name, "running_var")
        mean_shape = self.shapes.get(running_mean)
        var_shape = self.shapes.get(running_var)
        is_confirmed = mean_shape is not None and mean_shape == var_shape
        return kind if is_confirmed else None

    def _by_siblings(self, name: str, sure: bool) -> _Kind:
        """Distinguish parameters from buffers by the tensors of the same module, or else by name."""
        last = name.rpartition(".")[2]
        is_trained_known = bool(self.trained)
        for rule in _NAME_RULES:
            if last not in rule.names:
                continue

            if self._has_siblings(name, *rule.siblings, depth=rule.depth):
                is_confirmed = is_trained_known in rule.trained
                return _Kind(rule.kind, sure and is_confirmed)

        if not _named_as_parameter(name):
            # Quantized layers have parameters of integers, with usual names.
            is_integer = self.dtypes.get(name, "").startswith(_INTEGERS)
            return _Kind("buffer" if is_integer else "parameter", sure=False)

        # If an optimizer exists, it has a state for each parameter that is trained.
        if is_trained_known or self._is_of_frozen_norm(name):
            return _Kind("parameter", sure=False)

        return _Kind("parameter", sure)

    def _is_of_frozen_norm(self, name: str) -> bool:
        """Whether a tensor is in a FrozenBatchNorm, whose weight and bias are buffers, and which counts no batches."""
        # Most tensors have no statistics beside them.
        if not self._has_siblings(name, "running_mean", "running_var"):
            return False

        return not self._has_siblings(name, "num_batches_tracked")

    def _has_siblings(self, name: str, *siblings: str, depth: int = 1) -> bool:
        """Whether tensors exist whose names have other last parts. depth: number of parts that they replace."""
        module = name.split(".")[:-depth]
        # A parametrization belongs to a parameter, which has a name.
        if depth > 1 and not module:
            return False

        return all(".".join([*module, sibling]) in self.shapes for sibling in siblings)


def _is_powersgd_error(parts: Sequence[str]) -> bool:
    """Whether a tensor is an error of torch's PowerSGDState."""
    if parts[-2:-1] != ["error_dict"]:
        return False

    return parts[-1].isdecimal()


def matches_any(name: str, globs: Iterable[str]) -> bool:
    """Whether a glob matches a whole name."""
    return any(fnmatchcase(name, glob) for glob in globs)


def _named_as_parameter(name: str) -> bool:
    last = name.rpartition(".")[2]
    return _PARAMETER.fullmatch(last) is not None


def _list_candidates(roots: Sequence[Root], evidence: _Evidence) -> dict[str, None]:
    """Return the names below roots of averaged copies, without trained tensors, in the order of the checkpoint."""
    if not roots:
        return {}

    below = find_candidates(roots, evidence.shapes)
    # Averaged copies are not trained.
    candidates = below - evidence.trained - evidence.optimized
    return dict.fromkeys(name for name in evidence.shapes if name in candidates)


def _find_copies(
    roots: Sequence[Root],
    candidates: Collection[str],
    kinds: Mapping[str, _Kind],
    evidence: _Evidence,
) -> frozenset[str]:
    """Return the tensors of averaged copies.

    candidates: names of possible copies.
    kinds: of the other tensors.

    A key is no proof, because a module may have this name. Below it, every parameter needs a copy of the same name and
    shape. Names of copies may lack their dots (LitEma), or be numbers in the order of the model.
    """
    if not candidates:
        return frozenset()

    # The copies are recognized by the model beside them.
    parameters = [name for name, kind in kinds.items() if kind.kind == "parameter"]
    trained = [name for name in parameters if name in evidence.trained]
    certain = [name for name in parameters if kinds[name].sure]
    return find_copies(
        roots,
        candidates,
        evidence.shapes,
        parameters,
        trained or certain or parameters,
    )


def find_outside_model(snapshot: Snapshot) -> frozenset[str]:
    """Return the tensors that certainly do not belong to the model, for example optimizer state and averaged copies."""
    kinds = classify_snapshot(snapshot)
    names = snapshot.tensors.keys()
    states = [name for name in names if name.startswith("optimizer.")]
    # States belong to a parameter or to its number. Otherwise, a module of the model is called `optimizer`.
    is_module = not any(_has_owner(name, names) for name in states)
    # No optimizer has a state called `weight` or `bias`.
    layers = {name for name in states if is_module or name.endswith((".weight", ".bias"))}

    outside = {name for name, kind in kinds.by_name.items() if kind not in MODEL}
    return frozenset(outside - kinds.unsure - layers)


def _has_owner(name: str, names: Collection[str]) -> bool:
    """Whether a name contains that of another tensor, or the number of a parameter, after `optimizer.`."""
    segments = name.split(".")[1:-1]
    if segments and segments[0].isdecimal():
        return True

    return any(".".join(segments[:count]) in names for count in range(1, len(segments) + 1))


def classify_snapshot(snapshot: Snapshot) -> Kinds:
    """Classify each tensor of an opened checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, tensor in snapshot.tensors.items():
        shapes[name] = tensor.shape
        dtypes[name] = tensor.dtype

    return classify_tensors(shapes, snapshot.metadata, dtypes=dtypes)


def make_selector(
    only: frozenset[str], include: Iterable[str], exclude: Iterable[str], unsure: Collection[str] = ()
) -> Callable[[str, str], bool]:
    """Return a predicate of (name, kind) for the selected tensors.

    only: kinds, or empty for all except `rng`, which differs between ranks by design.
    include, exclude: globs of full names.
    unsure: names of tensors that may be parameters or buffers, and are selected with either kind.
    """
    included = tuple(include) or ("*",)
    excluded = tuple(exclude)
    # Other kinds are not confused with each other.
    if only.isdisjoint(PARAMETERS | BUFFERS):
        unsure = ()

    def is_selected(name: str, kind: str) -> bool:
        is_of_kind = not only or kind in only
        if not is_of_kind and name not in unsure:
            return False

        if matches_any(name, excluded):
            return False

        return matches_any(name, included)

    return is_selected
