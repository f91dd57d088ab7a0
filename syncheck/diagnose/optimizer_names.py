"""Names of optimizer tensors: the parameter and the state in 'optimizer.fc.weight.exp_avg'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.selection import last_part, module_of
from syncheck.findings import FIRST_MOMENTS, SECOND_MOMENTS

if TYPE_CHECKING:
    from collections.abc import Collection

# Both SGD and RMSprop use this name. RMSprop keeps averages of squares beside its momentum.
_MOMENTUM = "momentum_buffer"
_SQUARES_OF_RMSPROP = "square_avg"


def parameter_of(name: str) -> str:
    """Return the parameter of an optimizer tensor: 'fc.weight' for 'optimizer.fc.weight.exp_avg'."""
    return module_of(name.removeprefix("optimizer."))


def split_number(parameter: str) -> tuple[str, str]:
    """Return the number of one of several optimizers and its parameter: '0' and 'fc.weight' for '0.fc.weight'.

    The number is empty for a single optimizer, whose parameters have no number in front.
    """
    number, _, name = parameter.partition(".")
    is_numbered = number.isdecimal() and bool(name)
    return (number, name) if is_numbered else ("", parameter)


def is_momentum(name: str) -> bool:
    """Whether a tensor is the momentum of SGD or RMSprop."""
    return last_part(name) == _MOMENTUM


def is_rmsprop_momentum(name: str, names: Collection[str]) -> bool:
    """Whether a tensor is RMSprop's momentum, which averages steps instead of gradients. names: of all tensors."""
    square = f"{module_of(name)}.{_SQUARES_OF_RMSPROP}"
    return is_momentum(name) and square in names


def is_gradient_average(name: str) -> bool:
    """Whether a tensor has the name of a first moment. RMSprop's momentum has it too."""
    return last_part(name) in FIRST_MOMENTS


def is_square(name: str) -> bool:
    """Whether a tensor is a running average of squared gradients."""
    return last_part(name) in SECOND_MOMENTS


def is_setting(name: str) -> bool:
    """Whether the name is that of a setting in a parameter group, which may be a tensor too."""
    return ".param_groups." in name
