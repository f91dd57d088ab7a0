"""Names of tensors: what surrounds a state dict and what wrappers put in front."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

_Value = TypeVar("_Value")

# Keys under which trainers keep the model's state dict; they are no part of a tensor's name.
MODEL_CONTAINERS = frozenset(
    "model state_dict model_state_dict model_state module net network weights params app module_state_dict".split()
)
_RNG = ("rng", "random_state", "random_states", "rng_state")
# What torch.compile and FSDP put into names, wherever they wrapped.
_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module)\.")


@lru_cache(maxsize=64)
def _normalized(names: tuple[str, ...]) -> dict[str, str]:
    plain = {name: _WRAPPER.sub("", name) for name in names}
    while True:
        # A generator's state lies beside the model and has no prefix; the optimizer is looked at below.
        model = [
            name
            for name, short in plain.items()
            if not short.startswith("optimizer.") and (short.startswith("module.") or not is_random(short.split(".")))
        ]
        if not model or not all(plain[name].startswith("module.") for name in model):
            break
        for name in model:
            plain[name] = plain[name].removeprefix("module.")
    for name, short in plain.items():
        if short.startswith("optimizer."):
            plain[name] = "optimizer." + short.removeprefix("optimizer.").removeprefix("module.")
    taken: dict[str, int] = {}
    for short in plain.values():
        taken[short] = taken.get(short, 0) + 1
    return {name: short if taken[short] == 1 else name for name, short in plain.items()}


def normalize(names: Iterable[str]) -> dict[str, str]:
    """Map each name to the one without wrapper prefixes.

    `_orig_mod.` and `_fsdp_wrapped_module.` are taken out wherever they stand; no one names a module so. `module.` is
    taken off only where every tensor of the model has it in front, for a model may well have a submodule of that name.
    A name that would become equal to another one stays as it is.
    """
    return dict(_normalized(tuple(names)))  # a thousand ranks have the same, and a live check asks again and again


def by_normal_name(found: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return what is kept by names of one checkpoint by these names without wrapper prefixes."""
    return {normal: found[name] for name, normal in normalize(found).items()}


def free_name(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken: the name itself, else `name#2`, `name#3` and so on."""
    free, i = name, 2
    while free in taken:
        free, i = f"{name}#{i}", i + 1
    return free


def is_random(parts: Iterable[str]) -> bool:
    """Whether the parts of a name say that it is of a random number generator."""
    return any(part in _RNG or part.endswith("_rng_state") for part in parts)


def bn_sibling(name: str, of: str) -> str:
    """Name of the tensor `of` beside `name` in the same module: ('bn.running_var', 'weight') gives 'bn.weight'."""
    prefix, dot, _ = name.rpartition(".")
    return f"{prefix}{dot}{of}"
