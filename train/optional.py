"""The only imports of syncheck; a copy of this folder trains without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from syncheck import Options, SyncheckError, compare, metadata, read
    from syncheck.live import SyncMonitor

    MISSING = ""
except ImportError as error:
    MISSING = f"syncheck cannot be imported ({error})"
    if not TYPE_CHECKING:
        Options = compare = read = SyncMonitor = None

        class SyncheckError(Exception):
            """Never raised."""

        def metadata(model: Any, optimizer: Any, **facts: Any) -> dict[str, Any]:
            """Return the facts for --resume and safetensors files; a block without `schema` is not saved."""
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            return {"mesh": {}, "optimizer_parameters": order, **facts}


__all__ = ["MISSING", "Options", "SyncMonitor", "SyncheckError", "compare", "metadata", "read"]
