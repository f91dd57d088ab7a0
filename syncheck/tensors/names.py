"""Tensor names: container keys, wrapper prefixes, and names of RNG states."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_Value = TypeVar("_Value")

# Top-level keys of the model's state dict in checkpoints; they are not part of tensor names.
MODEL_CONTAINERS = frozenset(
    "model state_dict model_state_dict model_state module net network weights params app module_state_dict".split()
)
# The name of the value with the digest of the code in a TorchScript archive.
CODE = "(code)"
# The names of values with the settings of an adapter.
_ADAPTER_SETTING = "(adapter setting "
# Files of adapters alone: PEFT, torchtune, MLX.
_ADAPTER_FILE = r"(?:adapters?|adapter_\d+|adapter_model(?:-.*)?)\.\w+"
# Segments of names that the adapters of PEFT add, by the prefixes of its tuners.
_ADAPTER_SEGMENT = (
    r"(?:^|\.)(?:modules_to_save|token_adapter|trainable_tokens_\w+|ln_tuning_\w+|oft_[rR]|boft_[rRs]|hada_[wt]\w*"
    r"|lokr_[wt]\w*|ia3_l|hra_u|vera_lambda_\w+|vera_[AB]|lora_\w+)(?:\.|$)"
)
_RNG = ("rng", "random_state", "random_states", "rng_state")
# torch.compile and FSDP insert these at any level of a name.
_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module)\.")
# DDP's prefix of a model, and syncheck's prefix of optimizer states.
_MODULE, _OPTIMIZER = "module.", "optimizer."


@lru_cache(maxsize=64)
def _normalize(names: tuple[str, ...]) -> dict[str, str]:
    plain_names = {name: _WRAPPER.sub("", name) for name in names}
    # Models may be wrapped several times.
    while _is_wrapped_model(plain_names.values()):
        for name, plain in plain_names.items():
            plain_names[name] = plain.removeprefix(_MODULE)

    # An optimizer may contain names of a wrapped model, although the state dict of the model was saved without.
    for name, plain in plain_names.items():
        if plain.startswith(_OPTIMIZER):
            parameter = plain.removeprefix(_OPTIMIZER).removeprefix(_MODULE)
            plain_names[name] = f"{_OPTIMIZER}{parameter}"

    counts = Counter(plain_names.values())
    for name, plain in plain_names.items():
        if counts[plain] > 1:
            plain_names[name] = name

    return plain_names


def _is_wrapped_model(names: Iterable[str]) -> bool:
    """Whether all tensors of the model start with `module.`. RNG states and optimizer states are outside the model."""
    has_model = False
    for name in names:
        if name.startswith(_MODULE):
            has_model = True
            continue

        is_state = name.startswith(_OPTIMIZER) or is_rng_state(name.split("."))
        if not is_state:
            return False

    return has_model


def normalize(names: Iterable[str]) -> dict[str, str]:
    """Map each name to the name without wrapper prefixes.

    `_orig_mod.` and `_fsdp_wrapped_module.` are removed at every level. `module.` is removed only if all tensors of the
    model start with it, because a model may have a submodule of this name. A name that would collide is not changed.
    """
    # Cached, because ranks have equal names, and live checks repeat.
    normalized = _normalize(tuple(names))
    return dict(normalized)


def normalize_ranks(names_of_ranks: Mapping[int, Iterable[str]]) -> dict[int, dict[str, str]]:
    """Map the names of each rank as `normalize` does, but keep `module.` if other ranks have the same names with it.

    The model of these ranks has a submodule of this name, beside tensors that this rank may have lost.
    """
    normalized = {rank: normalize(names) for rank, names in names_of_ranks.items()}
    kept: set[str] = set()
    for names in normalized.values():
        kept.update(name for name in names.values() if name.startswith(_MODULE))

    # In almost all models, no name begins so.
    if not kept:
        return normalized

    for names in normalized.values():
        unwrapped = {name: _WRAPPER.sub("", name) for name in names}
        if kept.isdisjoint(unwrapped.values()):
            continue

        # Also the names that only this rank has.
        for name, plain in unwrapped.items():
            if plain.startswith(_MODULE):
                names[name] = plain

    return normalized


def normalize_keys(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Replace the keys of a mapping by names without wrapper prefixes."""
    normalized = normalize(values)
    return {normal: values[name] for name, normal in normalized.items()}


def list_spellings(path: str) -> list[str]:
    """Return the possible paths of a module after `normalize`, which depends on the names of all tensors."""
    plain = _WRAPPER.sub("", f"{path}.").removesuffix(".")
    spellings = [plain]
    while plain.startswith(_MODULE):
        plain = plain.removeprefix(_MODULE)
        spellings.append(plain)

    return spellings


def is_rng_state(parts: Iterable[str]) -> bool:
    """Whether a name, split at its dots, belongs to an RNG state."""
    return any(part in _RNG or part.endswith("_rng_state") for part in parts)


def is_extra_state(name: str) -> bool:
    """Whether a name ends with the key of `nn.Module.get_extra_state()` in a state dict."""
    return name.rpartition(".")[2] == "_extra_state"


def sibling_name(name: str, last: str) -> str:
    """Return the name of a tensor of the same module: ('bn.running_var', 'weight') gives 'bn.weight'."""
    prefix, dot, _ = name.rpartition(".")
    return f"{prefix}{dot}{last}"


def name_adapter_setting(key: str) -> str:
    """Return the name of the value with a setting of an adapter. It has no container."""
    return f"{_ADAPTER_SETTING}{key})"


def name_model_setting(key: str) -> str:
    """Return the name of the value with a setting of the configuration beside a model."""
    return f"(model setting {key})"


def is_adapter_setting(name: str) -> bool:
    """Whether a value is a setting of an adapter."""
    return name.startswith(_ADAPTER_SETTING)


def has_adapter_segment(name: str) -> bool:
    """Whether a tensor's name has a segment that the adapters of PEFT add."""
    return re.search(_ADAPTER_SEGMENT, name) is not None


def is_adapter_file(file_name: str) -> bool:
    """Whether a file contains an adapter only."""
    return re.fullmatch(_ADAPTER_FILE, file_name) is not None


def is_code_constant(name: str) -> bool:
    """Whether a tensor is a constant of the code of a TorchScript archive."""
    return name.startswith("CONSTANTS.")
