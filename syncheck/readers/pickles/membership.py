"""Whether plain values of a checkpoint belong to the model, and not to the run: scales, layouts, extra states.

A number belongs to the model if it is part of a tensor (the scale of a quantized tensor), in a state dict of a model, in
an `_extra_state`, or an attribute of a pickled or scripted module. A number directly beside tensors in another
dictionary may belong to the model.
"""

from __future__ import annotations

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


class Membership(Enum):
    """How certain it is that the plain values in a container belong to the model."""

    NONE = 0
    BESIDE = 1
    """They are directly beside tensors."""
    MODEL = 2


def holds_tensors(value: Any) -> bool:
    """Whether a value is a state dict: a dictionary with tensors."""
    return isinstance(value, dict) and any(isinstance(part, TensorLocation) for part in value.values())


def find_membership(container: Any, parts: Iterable[tuple[str, Any]], inherited: Membership) -> Membership:
    """Return the membership of the direct values of a container. parts: by name. inherited: from its own container."""
    if inherited is Membership.MODEL or _is_module(container, parts):
        return Membership.MODEL
    if inherited is Membership.BESIDE or any(isinstance(value, TensorLocation) for _, value in parts):
        return Membership.BESIDE
    return Membership.NONE


def find_membership_of_part(key: str, value: Any, own: Membership) -> Membership:
    """Return the membership of a part of a container. own: the membership of the container's direct values."""
    if is_extra_state(key):
        return Membership.MODEL
    if key.startswith(_OF_COMPILER):
        return Membership.NONE
    if own is Membership.MODEL:
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


def name_of_object(value: Any) -> str | None:
    """Return the name of a dtype, class or function, which is a plain value; None for other objects."""
    if isinstance(value, TypeName):
        return value.name if "." in value.name else f"torch.{value.name}"
    return value.name if isinstance(value, type) and issubclass(value, Inert) else None
