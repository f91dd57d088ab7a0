"""Declare an option of run.py in the field of a dataclass: its default, its help, and its valid numbers.

train/options.py builds the parser from the declarations. Tables of plug-ins (methods, models, data sets, faults) give
the choices of their options there.
"""

from __future__ import annotations

import math
from dataclasses import Field, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

# The maximum of float32, to which torch's optimizers convert rates.
LARGEST = 3.4e38
# Per rank; each worker takes memory, so a larger number is probably a typing error.
MOST_WORKERS = 1024


class Numbers(NamedTuple):
    """The valid numbers of an option. expected: the end of the message after "must be"."""

    accept: Callable[[float], bool]
    expected: str


COUNT = Numbers(lambda number: number >= 1, "at least 1")
POWERSGD_START = Numbers(lambda number: number >= 2, "at least 2; earlier DDP may rebuild its buckets")
POSITIVE = Numbers(lambda number: math.isfinite(number) and number > 0, "a positive number")
MOMENTUM = Numbers(lambda number: 0 <= number < 1, "at least 0 and below 1")
DECAY = Numbers(lambda number: 0 < number < 1, "between 0 and 1, for example 0.999")
WEIGHT_DECAY = Numbers(lambda number: 0 <= number <= LARGEST, f"from 0 to {LARGEST}")
SEED = Numbers(lambda number: 0 <= number < 2**63, "from 0 to 2**63 - 1")
NOT_NEGATIVE = Numbers(lambda number: number >= 0, "at least 0")
FINITE = Numbers(lambda number: 0 <= number < math.inf, "at least 0 and finite")
WORKERS = Numbers(lambda number: 0 <= number <= MOST_WORKERS, f"from 0 to {MOST_WORKERS}")
CHECKS = Numbers(lambda number: number >= 0, "a number of steps, or 0 for no checks")


def option(
    default: Any,
    text: str = "",
    /,
    *,
    group: str | None = None,
    numbers: Numbers = COUNT,
    affects_training: bool = True,
    replaced_by_task: bool = False,
    aliases: tuple[str, ...] = (),
    **arguments: Any,
) -> Any:
    """Declare the option of a field; a bool is a switch, whose name starts with --no if the default is True.

    text: its help, without the default; empty for the list of the choices.
    group: the title of the group in the help that begins with this option.
    numbers: the valid numbers of an option that takes a number.
    affects_training: False for paths, outputs and checks.
    replaced_by_task: whether a user's task replaces it.
    aliases: further spellings.
    arguments: for argparse's add_argument; `default` if the parser's differs from the field's.
    """
    metadata = {
        "text": text,
        "group": group,
        "numbers": numbers,
        "affects_training": affects_training,
        "replaced_by_task": replaced_by_task,
        "aliases": aliases,
        "arguments": arguments,
    }
    return field(default=default, metadata=metadata)


def spell(declared: Field[Any]) -> str:
    """Return the option of a field as users type it: --batch-size for batch_size."""
    name = declared.name.replace("_", "-")
    return f"--no-{name}" if declared.default is True else f"--{name}"
