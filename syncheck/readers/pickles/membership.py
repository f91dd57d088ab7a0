"""Whether plain values of a checkpoint belong to the model, and not to the run: scales, layouts, extra states.

A number belongs to the model if it is part of a tensor (the scale of a quantized tensor), in a state dict of a model,
in an `_extra_state`, or an attribute of a pickled or scripted module. A number directly beside tensors in another
dictionary may belong to the model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from syncheck.readers.pickles.keys import to_text
from syncheck.readers.pickles.stand_ins import Inert, Ordered, StandIn, StorageType, TensorLocation, TypeName
from syncheck.snapshots import Membership
from syncheck.tensors.names import MODEL_CONTAINERS, is_extra_state, is_rng_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Attributes of every pickled nn.Module.
BUFFERS = "_buffers"
OF_MODULES = frozenset({"_parameters", BUFFERS, "_modules"})
# The names of the buffers of a module that its state dict does not contain.
_NOT_PERSISTENT = "_non_persistent_buffers_set"
# The module of the containers of torch, like Sequential and ModuleList, which compute in the order of registration.
_ORDERED = "torch.nn.modules.container."
# The prefix of all classes in a TorchScript archive.
_SCRIPTED = "__torch__."
_MANGLED = r"\.___torch_mangle_\d+"
# Attributes that do not belong to the weights: the same model is saved in both modes, and torch.compile leaves notes on
# tensors about the sizes that were constant.
_NOT_OF_MODEL = r"training|_dynamo_.*"


CERTAIN = (Membership.MODULE, Membership.MODEL)


def holds_tensors(value: Any) -> bool:
    """Whether a value is a state dict: a dictionary with tensors."""
    return isinstance(value, dict) and any(isinstance(part, TensorLocation) for part in value.values())


def find_membership(container: Any, parts: Mapping[str, Any], inherited: Membership) -> Membership:
    """Return the membership of the direct values of a container.

    parts: the parts of the container, by name.
    inherited: the membership that the container has as a part of its own container.
    """
    if inherited is not Membership.NONE:
        return inherited
    if isinstance(container, Inert) and _is_module(container, parts):
        return Membership.MODULE

    # Numbers beside tensors often belong to them: the position in a queue, the temperature of a head.
    if _is_state_dict(parts):
        return Membership.BESIDE

    return Membership.NONE


def _is_module(container: Inert, parts: Mapping[str, Any]) -> bool:
    """Whether an object is a pickled nn.Module, or a module or another object of a TorchScript archive."""
    if container.name.startswith(_SCRIPTED):
        return True

    return is_pickled_module(container, parts)


def is_pickled_module(container: Any, parts: Mapping[str, Any]) -> bool:
    """Whether an object is a pickled nn.Module. parts: the parts of the object, by name."""
    # The class of a pickled module may be of any package, so its attributes show what it is.
    return isinstance(container, Inert) and parts.keys() >= OF_MODULES


def find_omitted_buffers(module: Any, parts: Sequence[tuple[str, Any]]) -> frozenset[str]:
    """Return the names of the buffers of a pickled nn.Module that are in no state dict. parts: of the object."""
    attributes = dict(parts)
    names = attributes.get(_NOT_PERSISTENT)
    if not is_pickled_module(module, attributes) or not isinstance(names, (set, frozenset)):
        return frozenset()
    return frozenset(map(to_text, names))


def _is_state_dict(parts: Mapping[str, Any]) -> bool:
    """Whether a container has tensors, and no models or optimizers, beside which a checkpoint has the run's values."""
    tensor_keys: list[str] = []
    for key, value in parts.items():
        if isinstance(value, TensorLocation):
            tensor_keys.append(key)
        elif isinstance(value, dict) and _is_model_or_optimizer(key, value):
            return False

    # A checkpoint has the states of random number generators beside its model.
    return not all(is_rng_state([key]) for key in tensor_keys)


def _is_model_or_optimizer(key: str, content: Mapping[str, Any]) -> bool:
    """Whether a dictionary in a checkpoint is the state dict of a model or of an optimizer."""
    if "param_groups" in content:
        return True

    # The extra state of a module is beside the tensors of the module, and may contain further tensors.
    return holds_tensors(content) and not is_extra_state(key)


def find_membership_of_part(key: str, value: Any, container: Membership) -> Membership:
    """Return the membership of a part of a container.

    key: the name of the part.
    value: the part itself.
    container: the membership of the container's direct values.
    """
    if is_extra_state(key):
        return Membership.MODEL

    if container in CERTAIN:
        # All parts of a model belong to it, whatever their names are.
        if re.fullmatch(_NOT_OF_MODEL, key):
            return Membership.NONE
        return container

    if not isinstance(value, (dict, Inert)):
        return container

    # A dictionary beside tensors is part of the model only if its key or its own content shows this.
    if key in MODEL_CONTAINERS:
        return _find_membership_in_model(value)

    return Membership.NONE


def _find_membership_in_model(value: dict[str, Any] | Inert) -> Membership:
    """Return the membership of the values below a key such as `model`."""
    if holds_tensors(value):
        return Membership.MODEL

    # A model of several state dicts, like {"encoder": {...}, "decoder": {...}, "temperature": 0.5}.
    if isinstance(value, dict) and any(holds_tensors(part) for part in value.values()):
        return Membership.BESIDE

    # The attributes of an object show whether it is a module: see find_membership().
    return Membership.NONE


def name_of_class(kind: Inert | type[Inert]) -> str:
    """Return the name of a class, without the number that torch.jit adds to the name of a class that it knows."""
    return re.sub(_MANGLED, "", kind.name)


def list_submodules(module: Inert, parts: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the submodules of a pickled nn.Module, None for another object.

    The names are in the order of registration if it determines what the module computes, and otherwise sorted.
    parts: the attributes of the module.
    """
    submodules = parts.get("_modules")
    if not isinstance(submodules, dict) or not is_pickled_module(module, parts):
        return None

    # None stands for a module that an architecture may have, like the downsampling of a residual block.
    names = [to_text(key) for key, submodule in submodules.items() if submodule is not None]
    # Subclasses of Sequential and ModuleList number their submodules, too.
    are_numbered = all(name.isdecimal() for name in names)
    if are_numbered or module.name.startswith(_ORDERED):
        return tuple(names)
    return tuple(sorted(names))


def name_of_object(value: Any) -> str | None:
    """Return the name of a dtype, class or function, which is a plain value; None if it is another object."""
    if isinstance(value, TypeName):
        return value.full_name

    if isinstance(value, (StandIn, StorageType)):
        return value.name

    if not isinstance(value, type):
        return None

    if issubclass(value, Ordered):
        return "collections.OrderedDict"

    # Unknown classes and functions are subclasses of Inert, and objects are instances.
    return name_of_class(value) if issubclass(value, Inert) else None
