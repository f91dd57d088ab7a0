"""The parameters and buffers of each rank alone, which DistributedDataParallel is told to ignore."""

from __future__ import annotations

from glob import escape
from typing import TYPE_CHECKING, Any

from syncheck.live.watching.clock import unwrap

if TYPE_CHECKING:
    from collections.abc import Sequence

# The attribute of a module that DistributedDataParallel reads. torch's function for the attribute is private, too.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def list_ignored(wrappers: Sequence[Any]) -> list[str]:
    """Return globs of the ignored tensors in a comparison of all wrappers, and of states of the tensors."""
    globs = []
    for number, wrapper in enumerate(wrappers):
        prefix = f"model.{number}." * (len(wrappers) > 1)
        for name in sorted(getattr(unwrap(wrapper), _IGNORED, ())):
            tensor = escape(prefix + name)
            globs += [tensor, f"optimizer*.{tensor}.*"]
    return globs
