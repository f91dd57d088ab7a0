"""How to start a script that expects a launcher, but was started alone."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# The variables that torchrun sets, and that scripts and `init_process_group` read.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def describe_launch(error: BaseException, command: Sequence[str]) -> str | None:
    """Return how to start a script under torchrun, if it ended because a variable of a launcher is missing.

    command: the arguments of syncheck, from `watch` on.
    """
    if "RANK" in os.environ or not isinstance(error, (KeyError, ValueError)):
        return None
    words = str(error).replace("'", " ").split()
    missing = [name for name in _VARIABLES if name in words]
    if not missing:
        return None
    launch = f"torchrun --nproc-per-node 2 -m syncheck {shlex.join(command)}"
    return f"the script expects {missing[0]} from a launcher; start it with: {launch}"
