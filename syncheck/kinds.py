"""What each tensor is: from the metadata block, from the optimizer, from the tensors beside it, and last from its name.

A saved state dict does not tell parameters from buffers, nor a module called `scaler` from a gradient scaler. Evidence
in order of weight: names of parameters and buffers that a trainer recorded, the optimizer (whose states belong to
parameters), the globs of the user, names and shapes of other tensors, the tensor's own name. What only its own name
tells is unsure, unless torch.nn gives that name to parameters alone.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from syncheck.names import bn_sibling, is_random

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from syncheck.snapshots import Metadata, Snapshot

KINDS = (
    "parameter", "buffer", "bn_mean", "bn_var", "bn_count",
    "optimizer", "optimizer_step", "scaler", "ema", "rng",
)  # fmt: skip
PARAMETERS = frozenset({"parameter"})
BUFFERS = frozenset({"buffer", "bn_mean", "bn_var", "bn_count"})
OPTIMIZER = frozenset({"optimizer", "optimizer_step"})
BN_STATISTICS = frozenset({"bn_mean", "bn_var"})

_BN = {"running_mean": "bn_mean", "running_var": "bn_var", "num_batches_tracked": "bn_count"}
# Last parts of names that libraries register as buffers: rotary embeddings, causal masks, position ids, codebooks'
# counts, quantization observers.
BUFFER_NAMES = frozenset(
    "inv_freq cos_cached sin_cached attn_mask causal_mask position_ids relative_position_index masked_bias "
    "cluster_size embed_avg queue_ptr fake_quant_enabled observer_enabled".split()
)
# Last parts of names that the modules of torch.nn give to parameters, and to nothing else but in rare modules.
_PARAMETER = re.compile(
    r"weight|bias|(in|[qkv])_proj_weight|in_proj_bias|(weight|bias)_(ih|hh|hr)_l\d+(_reverse)?|weight_orig|original\d?"
)
# What surrounds an averaged copy of a model below its key.
_WRAPPERS = ("", "module.", "model.", "shadow.", "shadow_params.", "state_dict.", "module.module.")
SCALERS = ("scaler", "grad_scaler", "amp_scaler")
# What torch's GradScaler keeps: of these, those with an underscore are its attributes, the others its state dict's.
_SCALING = frozenset(
    "scale growth_factor backoff_factor growth_interval growth_tracker _scale _growth_factor _backoff_factor "
    "_growth_interval _growth_tracker".split()
)
AVERAGED = frozenset("ema model_ema ema_model swa swa_model n_averaged shadow ema_state_dict".split())
_SCALAR: tuple[tuple[int, ...], ...] = ((), (1,))


class Kinds(NamedTuple):
    """The kinds of the tensors of a checkpoint.

    guessed: whether a parameter was told from buffers by its name: then no metadata block said it and no optimizer
    state covers it. unsure: names of tensors that may as well be a parameter or a buffer of the model; whoever asks for
    either of these has to look at them.
    """

    by_name: dict[str, str]
    guessed: bool
    unsure: frozenset[str]


def kinds_of(
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Metadata | None,
    buffer_globs: Iterable[str] = (),
    *,
    dtypes: Mapping[str, str] | None = None,
    parameters: Iterable[str] = (),
) -> Kinds:
    """Find the kind of each tensor of one checkpoint.

    shapes, dtypes: by tensor name. parameters: names that are known to be of a model's parameters, those of the
    metadata aside.
    """
    recorded = None if metadata is None or metadata.buffers is None else frozenset(metadata.buffers)
    described = () if metadata is None else (*metadata.frozen, *metadata.optimizer_parameters)
    model = frozenset(parameters) | frozenset(described)
    trained = _trained(shapes, model | (recorded or frozenset()))
    known = _Known(
        shapes, dtypes or {}, model, recorded, bool(metadata and metadata.optimizer_parameters), trained,
        tuple(buffer_globs),
    )  # fmt: skip
    averaged = [name for name in shapes if not known.of_model(name) and not AVERAGED.isdisjoint(name.split("."))]
    aside = frozenset(averaged)
    found = {name: known.kind(name) for name in shapes if name not in aside}
    copies = _copies(averaged, found, known) if averaged else frozenset()
    for name in averaged:
        found[name] = ("ema", True) if name in copies else known.kind(name, sure=False)
    kinds = {name: found[name][0] for name in shapes}
    guessed = recorded is None and any(kind == "parameter" and name not in trained for name, kind in kinds.items())
    return Kinds(kinds, guessed, frozenset(name for name, (_, sure) in found.items() if not sure))


def _trained(shapes: Mapping[str, tuple[int, ...]], known: Collection[str]) -> frozenset[str]:
    """Return the tensors for which optimizers keep a state; of several optimizers, each has its number in front."""
    states = (name.removeprefix("optimizer.") for name in shapes if name.startswith("optimizer.") and name not in known)
    owners = {name.rpartition(".")[0] for name in states}
    numbered = (owner.partition(".") for owner in owners if owner not in shapes)
    return frozenset(shapes) & (owners | {rest for number, _, rest in numbered if number.isdecimal()})


class _Known(NamedTuple):
    """What is known of a checkpoint's tensors besides their names.

    model: names of parameters; recorded: of buffers. described: whether the metadata names the optimizer's parameters.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    model: frozenset[str]
    recorded: frozenset[str] | None
    described: bool
    trained: frozenset[str]
    globs: tuple[str, ...]

    def of_model(self, name: str) -> bool:
        """Whether a tensor is certainly the model's: a submodule may have any name, that of a scaler or a generator."""
        return name in self.model or name in self.trained or (self.recorded is not None and name in self.recorded)

    def kind(self, name: str, *, sure: bool = True) -> tuple[str, bool]:
        """Return the kind of a tensor that is no averaged copy, and whether it is sure. sure: unless only named so."""
        if name in self.model:
            return "parameter", True
        if not self.of_model(name) and (helper := self._helper(name)):
            # No optimizer calls a state `weight`: this may be a module that is called `optimizer`.
            return helper, not (helper == "optimizer" and self._is_layer(name))
        if name in self.trained:
            return "parameter", True
        if kind := self._statistic(name):
            return kind, sure
        if self.recorded is not None:
            if name in self.recorded:
                return "buffer", True
            # The optimizer's parameters are known: this one is frozen, another rank's, or of no described module.
            return "parameter", sure and (not self.described or _named_as_parameter(name))
        if any(fnmatchcase(name, glob) for glob in self.globs):
            return "buffer", True
        return self._by_siblings(name, sure)

    def _helper(self, name: str) -> str | None:
        """Say what beside the model a tensor is of; None where it is of the model."""
        parts, shape = name.split("."), self.shapes[name]
        if parts[0] == "optimizer":
            return "optimizer_step" if parts[-1] == "step" and shape in _SCALAR else "optimizer"
        # The state of a generator is a row of bytes or words; another tensor of that name is a module's.
        if is_random(parts) and len(shape) == 1 and _is_state(parts, self.dtypes.get(name, "uint8")):
            return "rng"
        # PowerSGD's error, by its name in torch's PowerSGDState: as a generator's state, each rank's own by design.
        if parts[-2:-1] == ["error_dict"] and parts[-1].isdecimal():
            return "rng"
        if parts[0] in SCALERS and parts[-1] in _SCALING and len(parts) == 2 and shape in _SCALAR:
            fields = sum(f"{parts[0]}.{field}" in self.shapes for field in _SCALING)
            return "scaler" if fields > 1 or parts[1].startswith("_") else None
        return None

    def _is_layer(self, name: str) -> bool:
        owner, _, last = name.removeprefix("optimizer.").rpartition(".")
        return last in ("weight", "bias") and owner not in self.shapes and not owner.isdecimal()

    def _statistic(self, name: str) -> str | None:
        """Return the kind of a running statistic, by its siblings: a parameter may be called running_mean too."""
        kind = _BN.get(name.rpartition(".")[2])
        if kind is None:
            return None
        mean, var = (self.shapes.get(bn_sibling(name, of)) for of in ("running_mean", "running_var"))
        return kind if mean is not None and mean == var else None

    def _by_siblings(self, name: str, sure: bool) -> tuple[str, bool]:
        """Tell a parameter from a buffer by the tensors beside it, and at last by its name."""
        last = name.rpartition(".")[2]

        def beside(*others: str) -> bool:
            return all(bn_sibling(name, other) in self.shapes for other in others)

        # Of spectral_norm, old and new; weight_norm has parameters weight_g and weight_v.
        if last in ("weight_u", "weight_v") and beside("weight_orig"):
            return "buffer", sure
        if last in ("_u", "_v") and f"{name.rpartition('.')[0].rpartition('.')[0]}.original" in self.shapes:
            return "buffer", sure
        if last in ("weight_g", "weight_v") and beside("weight_g", "weight_v"):
            return "parameter", sure and not self.trained
        if last in BUFFER_NAMES or last == "weight_u":
            # That the optimizer does not train it bears the name out.
            return "buffer", sure and bool(self.trained)
        # FrozenBatchNorm has weight and bias as buffers, and counts no batches.
        frozen = beside("running_mean", "running_var") and not beside("num_batches_tracked")
        return "parameter", sure and not self.trained and not frozen and _named_as_parameter(name)


def _is_state(parts: Sequence[str], dtype: str) -> bool:
    """Whether a row of integers below `rng` is a generator's state; signed ones only at the top, or if named so."""
    own = next((part for part in reversed(parts) if not part.isdecimal()), "")
    return dtype.startswith(("uint", "unknown")) or (dtype.startswith("int") and is_random((parts[0], own)))


def _named_as_parameter(name: str) -> bool:
    return _PARAMETER.fullmatch(name.rpartition(".")[2]) is not None


def _copies(averaged: Iterable[str], found: Mapping[str, tuple[str, bool]], known: _Known) -> frozenset[str]:
    """Return the tensors of averaged copies. averaged: names that have one of their keys; found: kinds of the others.

    A key alone proves nothing, for it may be a module of the model. Below it there has to be a copy of each parameter,
    of the same name and shape; the names may be without dots (LitEma), or numbers in the order of the model.
    """
    below: dict[str, list[str]] = {}
    for name in averaged:
        parts = name.split(".")
        at = next(i for i, part in enumerate(parts) if part in AVERAGED)
        below.setdefault(".".join(parts[: at + 1]), []).append(name)
    parameters = [name for name, (kind, _) in found.items() if kind == "parameter"]
    moved = [name for name in parameters if name in known.trained]
    usual = moved or [name for name in parameters if found[name][1]] or parameters
    copies: set[str] = set()
    for key, names in below.items():
        # `ema_model` beside `model` is a copy of that module, whatever lies beside both.
        head = "model." if "model" in key.rpartition(".")[2].split("_") else ""
        own = [name for name in usual if name.startswith(head)]
        for prefix, listed in ((head, own), ("", usual)):
            short = [name.removeprefix(prefix) for name in listed]
            ways = ([*short], [name.replace(".", "") for name in short], [str(i) for i in range(len(short))])
            if listed and any(
                all(
                    known.shapes.get(f"{key}.{wrapper}{copy}") == known.shapes[name]
                    for copy, name in zip(way, listed, strict=True)
                )
                for way in ways
                for wrapper in _WRAPPERS
            ):
                copies.update(names)
                break
    return frozenset(copies)


def kinds_in(snapshot: Snapshot) -> Kinds:
    """Find the kind of each tensor of one opened checkpoint, as `kinds_of` does."""
    tensors = snapshot.tensors
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return kinds_of({name: tensor.shape for name, tensor in tensors.items()}, snapshot.metadata, dtypes=dtypes)


def selector(
    only: frozenset[str], include: Iterable[str], exclude: Iterable[str], unsure: Collection[str] = ()
) -> Callable[[str, str], bool]:
    """Return a function of (name, kind) that says whether a tensor is asked for.

    only: kinds, empty for all but `rng`, which differs between ranks by design. Globs match whole names. unsure: names
    of tensors that may be parameters or buffers, whatever their kind says: asked for with either.
    """
    included, excluded = tuple(include), tuple(exclude)
    of_model = bool(only & (PARAMETERS | BUFFERS))

    def wanted(name: str, kind: str) -> bool:
        if only and kind not in only and not (of_model and name in unsure):
            return False
        if included and not any(fnmatchcase(name, glob) for glob in included):
            return False
        return not any(fnmatchcase(name, glob) for glob in excluded)

    return wanted
