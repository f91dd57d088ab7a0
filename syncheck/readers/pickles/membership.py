"""Whether plain values of a checkpoint belong to the model, and not to the run: scales, layouts, extra states.

A number belongs to the model if it is part of a tensor (the scale of a quantized tensor), in a state dict of a model,
in an `_extra_state`, or an attribute of a pickled or scripted module. A number directly beside tensors in another
dictionary may belong to the model.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any

from syncheck.names import MODEL_CONTAINERS, is_extra_state
from syncheck.readers.pickles.stand_ins import Inert, TensorLocation, TypeName

if TYPE_CHECKING:
    from collections.abc import Iterable

# Attributes of every pickled nn.Module.
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
# The prefix of notes that torch.compile leaves on tensors: which sizes were constant.
_OF_COMPILER = "_dynamo_"
# The prefix of all classes in a TorchScript archive.
_SCRIPTED = "__torch__."
_MANGLED = re.compile(r"\.___torch_mangle_\d+")


class Membership(Enum):
    """How certain it is that the plain values in a container belong to the model."""

    NONE = "none"
    BESIDE = "beside"
    """They are directly beside tensors, and their names may show that they describe the run."""
    MODULE = "module"
    """They are attributes of a module or tensor. Other files of the model may lack them, such as state dicts."""
    MODEL = "model"
    """They are as much a part of the model as its tensors."""


def holds_tensors(value: Any) -> bool:
    """Whether a value is a state dict: a dictionary with tensors."""
    return isinstance(value, dict) and any(isinstance(part, TensorLocation) for part in value.values())


def find_membership(container: Any, parts: Iterable[tuple[str, Any]], inherited: Membership) -> Membership:
    """Return the membership of the direct values of a container. parts: by name. inherited: from its own container."""
    if inherited in (Membership.MODEL, Membership.MODULE):
        return inherited
    if _is_module(container, parts):
        return Membership.MODULE
    if inherited is Membership.BESIDE or any(isinstance(value, TensorLocation) for _, value in parts):
        return Membership.BESIDE
    return Membership.NONE


def find_membership_of_part(key: str, value: Any, own: Membership) -> Membership:
    """Return the membership of a part of a container. own: the membership of the container's direct values."""
    if is_extra_state(key):
        return Membership.MODEL
    if key.startswith(_OF_COMPILER):
        return Membership.NONE
    if own in (Membership.MODEL, Membership.MODULE):
        # The training flag does not belong to the weights: the same model is saved in both modes.
        return Membership.NONE if key == "training" else own
    if not isinstance(value, (dict, Inert)):
        return own
    if key in MODEL_CONTAINERS and holds_tensors(value):
        return Membership.MODEL
    # A model of several state dicts, such as {"encoder": {...}, "decoder": {...}, "temperature": 0.5}.
    if key in MODEL_CONTAINERS and isinstance(value, dict) and any(holds_tensors(part) for part in value.values()):
        return Membership.BESIDE
    return Membership.NONE


def _is_module(container: Any, parts: Iterable[tuple[str, Any]]) -> bool:
    """Whether an object is a pickled nn.Module, or a module or another object of a TorchScript archive."""
    if not isinstance(container, Inert):
        return False
    return container.name.startswith(_SCRIPTED) or {key for key, _ in parts} >= _OF_MODULES


def name_of_class(kind: Inert | type[Inert]) -> str:
    """Return the name of a class, without the number that torch.jit adds to the name of a class that it knows."""
    return _MANGLED.sub("", kind.name)


def name_of_object(value: Any) -> str | None:
    """Return the name of a dtype, class or function, which is a plain value; None for other objects."""
    if isinstance(value, TypeName):
        return value.name if "." in value.name else f"torch.{value.name}"
    return name_of_class(value) if isinstance(value, type) and issubclass(value, Inert) else None
