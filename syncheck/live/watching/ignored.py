"""What a wrapper leaves to each rank: the parameters and buffers that DistributedDataParallel is told to ignore."""

from __future__ import annotations

from glob import escape
from typing import TYPE_CHECKING, Any

from syncheck.live.watching.clock import unwrap

if TYPE_CHECKING:
    from collections.abc import Sequence

# The attribute of a module that DistributedDataParallel reads. torch's function for the attribute is private, too.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def list_ignored(wrappers: Sequence[Any]) -> list[str]:
    """Return globs of what the wrappers of some ranks ignore, and of its states in optimizers.

    They match names in a comparison of all wrappers.
    """
    globs = []
    for number, wrapper in enumerate(wrappers):
        prefix = f"model.{number}." * (len(wrappers) > 1)
        for name in sorted(getattr(unwrap(wrapper), _IGNORED, ())):
            tensor = escape(prefix + name)
            globs += [tensor, f"optimizer*.{tensor}.*"]
    return globs
