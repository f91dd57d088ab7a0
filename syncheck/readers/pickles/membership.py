"""Whether plain values of a checkpoint belong to the model, and not to the run: scales, layouts, extra states.

A number belongs to the model if it is part of a tensor (the scale of a quantized tensor), in a state dict of a model,
in an `_extra_state`, or an attribute of a pickled or scripted module. A number directly beside tensors in another
dictionary may belong to the model.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any

from syncheck.names import MODEL_CONTAINERS, is_extra_state, is_rng_state
from syncheck.readers.pickles.stand_ins import Inert, TensorLocation, TypeName

if TYPE_CHECKING:
    from collections.abc import Mapping

# Attributes of every pickled nn.Module.
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
# The prefix of all classes in a TorchScript archive.
_SCRIPTED = "__torch__."
_MANGLED = re.compile(r"\.___torch_mangle_\d+")
# Attributes that do not belong to the weights: the same model is saved in both modes, and torch.compile leaves notes on
# tensors about the sizes that were constant.
_NOT_OF_MODEL = re.compile(r"training|_dynamo_.*")


class Membership(Enum):
    """How certain it is that the plain values in a container belong to the model."""

    NONE = "none"
    BESIDE = "beside"
    """They are directly beside tensors, and their names may show that they describe the run."""
    MODULE = "module"
    """They are attributes of a module or tensor. Other files of the model may lack them, such as state dicts."""
    MODEL = "model"
    """They are as much a part of the model as its tensors."""


CERTAIN = (Membership.MODULE, Membership.MODEL)


def holds_tensors(value: Any) -> bool:
    """Whether a value is a state dict: a dictionary with tensors."""
    return isinstance(value, dict) and any(isinstance(part, TensorLocation) for part in value.values())


def find_membership(container: Any, parts: Mapping[str, Any], inherited: Membership) -> Membership:
    """Return the membership of the direct values of a container. parts: by name. inherited: from its own container."""
    if inherited is not Membership.NONE:
        return inherited
    if isinstance(container, Inert) and _is_module(container, parts):
        return Membership.MODULE
    # Numbers beside tensors often belong to them: the position in a queue, the temperature of a head.
    return Membership.BESIDE if _is_state_dict(parts) else Membership.NONE


def _is_state_dict(parts: Mapping[str, Any]) -> bool:
    """Whether a container has tensors, and no models or optimizers, beside which a checkpoint has the run's values."""
    has_tensors = False
    for key, value in parts.items():
        if isinstance(value, TensorLocation):
            # A checkpoint has the states of random number generators beside its model.
            has_tensors |= not is_rng_state([key])
        elif holds_tensors(value) & (not is_extra_state(key)) or (isinstance(value, dict) and "param_groups" in value):
            return False
    return has_tensors


def find_membership_of_part(key: str, value: Any, container: Membership) -> Membership:
    """Return the membership of a part of a container. container: the membership of the container's direct values."""
    if is_extra_state(key):
        return Membership.MODEL
    if container in CERTAIN:
        # All parts of a model belong to it, whatever their names are.
        described = _NOT_OF_MODEL.fullmatch(key) is not None
        return Membership.NONE if described else container
    if not isinstance(value, (dict, Inert)):
        return container
    # A dictionary beside tensors is part of the model only if its key or its own content shows this.
    return _find_membership_of_model(value) if key in MODEL_CONTAINERS else Membership.NONE


def _find_membership_of_model(value: Any) -> Membership:
    """Return the membership of the values below a key such as `model`."""
    if not isinstance(value, dict):
        return Membership.NONE
    if holds_tensors(value):
        return Membership.MODEL
    # A model of several state dicts, such as {"encoder": {...}, "decoder": {...}, "temperature": 0.5}.
    has_parts = any(map(holds_tensors, value.values()))
    return Membership.BESIDE if has_parts else Membership.NONE


def _is_module(container: Inert, parts: Mapping[str, Any]) -> bool:
    """Whether an object is a pickled nn.Module, or a module or another object of a TorchScript archive."""
    is_scripted = container.name.startswith(_SCRIPTED)
    return is_scripted | (parts.keys() >= _OF_MODULES)


def name_of_class(kind: Inert | type[Inert]) -> str:
    """Return the name of a class, without the number that torch.jit adds to the name of a class that it knows."""
    return _MANGLED.sub("", kind.name)


def name_of_object(value: Any) -> str | None:
    """Return the name of a dtype, class or function, which is a plain value; None for other objects."""
    if isinstance(value, TypeName):
        return value.full_name
    # Unknown classes and functions are subclasses of Inert, and objects are instances.
    if isinstance(value, type) and issubclass(value, Inert):
        return name_of_class(value)
    return None
