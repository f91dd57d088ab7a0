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

from syncheck.tensors.averages import find_candidates, find_copies, find_roots, find_swapped
from syncheck.tensors.names import is_rng_state, sibling_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from syncheck.snapshots import Metadata, Snapshot
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
SCALERS = ("scaler", "grad_scaler", "amp_scaler")
# Values of torch's GradScaler: attributes (with an underscore) and keys of its state dict.
_SCALING = frozenset(
    "scale growth_factor backoff_factor growth_interval growth_tracker _scale _growth_factor _backoff_factor "
    "_growth_interval _growth_tracker".split()
)
_SCALAR: tuple[tuple[int, ...], ...] = ((), (1,))


class Kinds(NamedTuple):
    """The kinds of the tensors of a checkpoint.

    guessed: whether a parameter was recognized by its name alone, without metadata or optimizer state. unsure: names of
    tensors that may be parameters or buffers of the model; selecting either kind must include them.
    """

    by_name: dict[str, str]
    guessed: bool
    unsure: frozenset[str]


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
    recorded = None if metadata is None or metadata.buffers is None else frozenset(metadata.buffers)
    described = () if metadata is None else (*metadata.frozen, *metadata.optimizer_parameters)
    model = frozenset(parameters) | frozenset(described)
    trained = _find_trained(shapes, model | (recorded or frozenset()))
    optimized = frozenset() if metadata is None else frozenset(metadata.optimizer_parameters)
    known = _Evidence(shapes, dtypes or {}, model, recorded, optimized, trained, tuple(buffer_globs))
    roots = find_roots(shapes, () if metadata is None else metadata.averaged)
    swapped = find_swapped(shapes)
    averaged = _list_candidates(roots, shapes, known) if roots else []
    candidates = frozenset(averaged) | swapped
    found = {name: known.kind(name) for name in shapes if name not in candidates}
    copies = _find_copies(roots, averaged, found, known) if averaged else frozenset()
    for name in averaged:
        # Options that select parameters or buffers select the copies in modules, too.
        of_module = known.belongs_to_model(name)
        found[name] = ("ema", not of_module) if name in copies else known.kind(name, sure=False)
    found.update(dict.fromkeys(swapped, ("ema", True)))
    kinds = {name: found[name][0] for name in shapes}
    guessed = recorded is None and any(kind == "parameter" and name not in trained for name, kind in kinds.items())
    return Kinds(kinds, guessed, frozenset(name for name, (_, sure) in found.items() if not sure))


def _find_trained(shapes: Mapping[str, tuple[int, ...]], known: Collection[str]) -> frozenset[str]:
    """Return the tensors with optimizer state. With several optimizers, the names of states start with a number."""
    states = (name.removeprefix("optimizer.") for name in shapes if name.startswith("optimizer.") and name not in known)
    owners = {name.rpartition(".")[0] for name in states}
    numbered = (owner.partition(".") for owner in owners if owner not in shapes)
    return frozenset(shapes) & (owners | {rest for number, _, rest in numbered if number.isdecimal()})


class _Evidence(NamedTuple):
    """Evidence about the tensors of a checkpoint, besides their names.

    model: names of parameters. recorded: names of buffers. optimized: the optimizer's parameters of the metadata.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    model: frozenset[str]
    recorded: frozenset[str] | None
    optimized: frozenset[str]
    trained: frozenset[str]
    globs: tuple[str, ...]

    def belongs_to_model(self, name: str) -> bool:
        """Whether a tensor certainly belongs to the model, even if its name is that of a scaler or an RNG state."""
        return name in self.model or name in self.trained or (self.recorded is not None and name in self.recorded)

    def kind(self, name: str, *, sure: bool = True) -> tuple[str, bool]:
        """Return the kind of a tensor outside averaged copies, and whether it is certain."""
        if name in self.model:
            return "parameter", True
        if not self.belongs_to_model(name) and (kind := self._kind_outside_model(name)):
            # No optimizer has a state called `weight`, so this may be a module called `optimizer`.
            return kind, not (kind == "optimizer" and self._is_layer(name))
        if name in self.trained:
            return "parameter", True
        if kind := self._bn_statistic(name):
            return kind, sure
        if self.recorded is not None:
            if name in self.recorded:
                return "buffer", True
            # The optimizer's parameters are listed, so this parameter is frozen, another rank's, or in an undescribed
            # module.
            return "parameter", sure and (not self.optimized or _named_as_parameter(name))
        if any(fnmatchcase(name, glob) for glob in self.globs):
            return "buffer", True
        return self._by_siblings(name, sure)

    def _kind_outside_model(self, name: str) -> str | None:
        """Return the kind of a tensor outside the model; None for the model's tensors."""
        parts, shape = name.split("."), self.shapes[name]
        if parts[0] == "optimizer":
            return "optimizer_step" if parts[-1] == "step" and shape in _SCALAR else "optimizer"
        # An RNG state is a 1-D tensor of bytes or words; other tensors with this name belong to a module.
        if is_rng_state(parts) and len(shape) == 1 and _is_state(parts, self.dtypes.get(name, "uint8")):
            return "rng"
        # The error of torch's PowerSGDState differs between ranks by design, like an RNG state.
        if parts[-2:-1] == ["error_dict"] and parts[-1].isdecimal():
            return "rng"
        if parts[0] in SCALERS and parts[-1] in _SCALING and len(parts) == 2 and shape in _SCALAR:
            fields = sum(f"{parts[0]}.{field}" in self.shapes for field in _SCALING)
            return "scaler" if fields > 1 or parts[1].startswith("_") else None
        return None

    def _is_layer(self, name: str) -> bool:
        owner, _, last = name.removeprefix("optimizer.").rpartition(".")
        return last in ("weight", "bias") and owner not in self.shapes and not owner.isdecimal()

    def _bn_statistic(self, name: str) -> str | None:
        """Return the kind of a BatchNorm statistic, if its siblings confirm it; any parameter may have this name."""
        kind = _BN.get(name.rpartition(".")[2])
        if kind is None:
            return None
        mean, var = (self.shapes.get(sibling_name(name, of)) for of in ("running_mean", "running_var"))
        return kind if mean is not None and mean == var else None

    def _by_siblings(self, name: str, sure: bool) -> tuple[str, bool]:
        """Distinguish parameters from buffers by the tensors of the same module, or else by name."""
        last = name.rpartition(".")[2]

        def beside(*others: str) -> bool:
            return all(sibling_name(name, other) in self.shapes for other in others)

        # weight_u and weight_v are buffers of spectral_norm, but weight_norm has parameters weight_g and weight_v.
        if last in ("weight_u", "weight_v") and beside("weight_orig"):
            return "buffer", sure
        if last in ("_u", "_v") and f"{name.rpartition('.')[0].rpartition('.')[0]}.original" in self.shapes:
            return "buffer", sure
        if last in ("weight_g", "weight_v") and beside("weight_g", "weight_v"):
            return "parameter", sure and not self.trained
        if last in BUFFER_NAMES or last == "weight_u":
            # The name is confirmed if an optimizer exists and has no state for this tensor.
            return "buffer", sure and bool(self.trained)
        # Only floating-point tensors are trained; quantized layers have parameters of integers, with usual names.
        if self.dtypes.get(name, "").startswith(("int", "uint", "bool")) and not _named_as_parameter(name):
            return "buffer", False
        # In FrozenBatchNorm, weight and bias are buffers, and there is no batch counter.
        frozen = beside("running_mean", "running_var") and not beside("num_batches_tracked")
        return "parameter", sure and not self.trained and not frozen and _named_as_parameter(name)


def _is_state(parts: Sequence[str], dtype: str) -> bool:
    """Whether integers below an `rng` key are an RNG state; signed integers need the key at either end of the name."""
    own = next((part for part in reversed(parts) if not part.isdecimal()), "")
    return dtype.startswith(("uint", "unknown")) or (dtype.startswith("int") and is_rng_state((parts[0], own)))


def _named_as_parameter(name: str) -> bool:
    return _PARAMETER.fullmatch(name.rpartition(".")[2]) is not None


def _list_candidates(roots: Sequence[Root], shapes: Mapping[str, tuple[int, ...]], known: _Evidence) -> list[str]:
    """Return the names below roots of averaged copies, without trained tensors."""
    below = find_candidates(roots, shapes)
    return [name for name in shapes if name in below and name not in known.trained and name not in known.optimized]


def _find_copies(
    roots: Sequence[Root], averaged: Sequence[str], found: Mapping[str, tuple[str, bool]], known: _Evidence
) -> frozenset[str]:
    """Return the tensors of averaged copies. averaged: candidates. found: kinds of the other tensors.

    A key is no proof, because a module may have this name. Below it, every parameter needs a copy of the same name and
    shape. Names of copies may lack their dots (LitEma), or be numbers in the order of the model.
    """
    parameters = [name for name, (kind, _) in found.items() if kind == "parameter"]
    moved = [name for name in parameters if name in known.trained]
    usual = moved or [name for name in parameters if found[name][1]] or parameters
    return find_copies(roots, averaged, known.shapes, parameters, usual)


def find_outside_model(snapshot: Snapshot) -> frozenset[str]:
    """Return the tensors that certainly do not belong to the model, such as optimizer state and averaged copies."""
    kinds = classify_snapshot(snapshot)
    names = snapshot.tensors.keys()
    states = [name for name in names if name.startswith("optimizer.")]
    # States belong to a parameter or to its number. Otherwise, a module of the model is called `optimizer`.
    is_module = not any(_has_owner(name, names) for name in states)
    outside = set()
    for name, kind in kinds.by_name.items():
        # No optimizer has a state called `weight` or `bias`.
        layer = name.startswith("optimizer.") and (is_module or name.rpartition(".")[2] in ("weight", "bias"))
        if kind not in MODEL and name not in kinds.unsure and not layer:
            outside.add(name)
    return frozenset(outside)


def _has_owner(name: str, names: Collection[str]) -> bool:
    """Whether a name contains that of another tensor, or the number of a parameter, after `optimizer.`."""
    segments = name.split(".")[1:-1]
    if segments and segments[0].isdecimal():
        return True
    return any(".".join(segments[:count]) in names for count in range(1, len(segments) + 1))


def classify_snapshot(snapshot: Snapshot) -> Kinds:
    """Classify each tensor of an opened checkpoint."""
    tensors = snapshot.tensors
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return classify_tensors({name: tensor.shape for name, tensor in tensors.items()}, snapshot.metadata, dtypes=dtypes)


def make_selector(
    only: frozenset[str], include: Iterable[str], exclude: Iterable[str], unsure: Collection[str] = ()
) -> Callable[[str, str], bool]:
    """Return a predicate of (name, kind) for the selected tensors.

    only: kinds, or empty for all except `rng`, which differs between ranks by design. Globs match full names. unsure:
    names of tensors that may be parameters or buffers, and are selected with either kind.
    """
    included, excluded = tuple(include), tuple(exclude)
    selects_model = bool(only & (PARAMETERS | BUFFERS))

    def is_selected(name: str, kind: str) -> bool:
        if only and kind not in only and not (selects_model and name in unsure):
            return False
        if included and not any(fnmatchcase(name, glob) for glob in included):
            return False
        return not any(fnmatchcase(name, glob) for glob in excluded)

    return is_selected
