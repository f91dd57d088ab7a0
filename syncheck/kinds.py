"""What each tensor is: from the metadata block, from the optimizer, from well-known names; else it is guessed.

A saved state dict does not tell parameters from buffers. The sources are asked in the order of how much they know:
the buffer names a trainer recorded, the optimizer (whose states belong to parameters), the well-known names, and
the globs a user gave.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from syncheck.names import bn_sibling, is_random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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
# Last parts of names that libraries register as buffers and that no one gives a parameter: rotary embeddings, causal
# masks, position ids, codebooks' counts, quantization observers, spectral norm's vectors.
BUFFER_NAMES = frozenset(
    "inv_freq cos_cached sin_cached attn_mask causal_mask position_ids relative_position_index masked_bias "
    "cluster_size embed_avg queue_ptr fake_quant_enabled observer_enabled weight_u weight_v".split()
)
SCALERS = ("scaler", "grad_scaler", "amp_scaler")
_EMA = ("ema", "model_ema", "ema_model", "swa", "swa_model", "n_averaged", "shadow", "ema_state_dict")


def kinds_of(
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Metadata | None,
    buffer_globs: Iterable[str] = (),
    *,
    dtypes: Mapping[str, str] | None = None,
    parameters: Iterable[str] = (),
) -> tuple[dict[str, str], bool]:
    """Name the kind of each tensor of one checkpoint.

    shapes, dtypes: by tensor name. parameters: names that are known to be of a model's parameters, those of the
    metadata aside. Returns the kinds by name, and whether telling parameters from buffers was a guess: then no
    metadata block said it and no optimizer state covers the parameters.
    """
    recorded = None if metadata is None or metadata.buffers is None else frozenset(metadata.buffers)
    described = () if metadata is None else (*metadata.frozen, *metadata.optimizer_parameters)
    model = frozenset(parameters) | frozenset(described)
    known = model | (recorded or frozenset())
    states = (n.removeprefix("optimizer.") for n in shapes if n.startswith("optimizer.") and n not in known)
    trained = frozenset(name.rpartition(".")[0] for name in states)
    globs = tuple(buffer_globs)

    def kind_of(name: str) -> str:
        if name in model:
            return "parameter"
        # A submodule may have any name, that of an optimizer or a generator too.
        if name not in known and (helper := _helper(name, shapes[name], (dtypes or {}).get(name))):
            return helper
        return _of_model(name, shapes, recorded, trained, globs)

    kinds = {name: kind_of(name) for name in shapes}
    if recorded is not None:
        return kinds, False
    guessed = [name for name, kind in kinds.items() if kind == "parameter"]
    return kinds, any(name not in trained for name in guessed)


def kinds_in(snapshot: Snapshot) -> tuple[dict[str, str], bool]:
    """Name the kind of each tensor of one opened checkpoint, as `kinds_of` does."""
    tensors = snapshot.tensors
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return kinds_of({name: tensor.shape for name, tensor in tensors.items()}, snapshot.metadata, dtypes=dtypes)


def _helper(name: str, shape: tuple[int, ...], dtype: str | None) -> str | None:
    """Say what beside the model a tensor is of, by its name; None where it is of the model."""
    parts = name.split(".")
    if parts[0] == "optimizer":
        return "optimizer_step" if parts[-1] == "step" and shape in ((), (1,)) else "optimizer"
    # The states of random number generators are bytes or words; what is called so and has floats is a layer.
    if is_random(parts) and (dtype is None or dtype.startswith(("int", "uint", "unknown"))):
        return "rng"
    # PowerSGD's error, by its name in torch's PowerSGDState: as a generator's state, each rank's own by design.
    if parts[-2:-1] == ["error_dict"]:
        return "rng"
    if parts[0] in SCALERS:
        return "scaler"
    if any(part in _EMA for part in parts):
        return "ema"
    return None


def _of_model(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    recorded: frozenset[str] | None,
    trained: frozenset[str],
    globs: tuple[str, ...],
) -> str:
    parts = name.split(".")
    # Siblings are asked for, so that a parameter that happens to be called running_mean is not taken for one.
    if parts[-1] in _BN and all(bn_sibling(name, of) in shapes for of in ("running_mean", "running_var")):
        return _BN[parts[-1]]
    if recorded is not None:
        return "buffer" if name in recorded else "parameter"
    if name in trained:
        return "parameter"
    if parts[-1] in BUFFER_NAMES or any(fnmatchcase(name, glob) for glob in globs):
        return "buffer"
    return "parameter"


def selector(only: frozenset[str], include: Iterable[str], exclude: Iterable[str]) -> Callable[[str, str], bool]:
    """Return a function of (name, kind) that says whether a tensor is asked for.

    only: kinds, empty for all but `rng`, which differs between ranks by design. Globs match whole names.
    """
    included, excluded = tuple(include), tuple(exclude)

    def wanted(name: str, kind: str) -> bool:
        if only and kind not in only:
            return False
        if included and not any(fnmatchcase(name, glob) for glob in included):
            return False
        return not any(fnmatchcase(name, glob) for glob in excluded)

    return wanted
