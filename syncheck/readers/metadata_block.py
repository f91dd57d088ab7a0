"""The metadata block: information that a trainer saves beside its tensors.

A state dict does not contain the run, step or rank, nor which of its tensors are buffers. `metadata()` collects this as
plain JSON values. Save the result in a torch.save file under the top-level key ``syncheck``, or in a safetensors file
as JSON text under ``__metadata__["syncheck"]``.

This module does not import torch; it only calls methods of the model, such as `named_buffers()`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.snapshots import Metadata
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "syncheck"
SCHEMA = 1
# Limits for untrusted files: far above any run, and small enough to loop over and print.
MOST_STEPS = 2**63 - 1
_MOST_PARTS, _MOST_LEVELS = 200_000, 100
MOST = {"rank": 1_000_000, "world_size": 1_000_000}


# The name of DDP's class, so that torch need not be imported.
_WRAPPER = "DistributedDataParallel"


def metadata(
    *,
    run: str,
    rank: int,
    world_size: int,
    step: int | None = None,
    epoch: int | None = None,
    run_id: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    buffers_synced: bool | None = None,
    mesh: Mapping[str, int] | None = None,
    optimizer_sharded: bool = False,
    averaging: Mapping[str, int] | None = None,
    tied: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    host: str | None = None,
) -> dict[str, Any]:
    """Describe one rank's checkpoint in plain JSON values, to save beside its tensors under the key `syncheck`.

        block = metadata(run="ddp", rank=rank, world_size=2, step=100, model=ddp, optimizer=optimizer)
        torch.save({"model": ddp.module.state_dict(), "syncheck": block}, f"ckpts/rank{rank}.pth")

    run: name of the run, equal on all ranks. run_id: random text, equal on all ranks of one launch, so that files of
    two launches are not compared as replicas; by default torchrun's run id, if it is set.
    step, epoch: number of completed optimizer steps and epochs.
    model: the module, to record the names of buffers and frozen parameters, and the BatchNorm momentum. If it is DDP's
    wrapper, `buffers_synced` is taken from it.
    optimizer: for the order of its parameters.
    buffers_synced: True if the method synchronizes buffers at least once per step (SyncBatchNorm, or plain DDP with a
    lag of one step), False if never (DDP with forward_sync_buffers=False, FSDP), None if unknown.
    mesh: coordinate of this rank by mesh dimension.
    optimizer_sharded: True if each rank has its own shard of the optimizer state, as with ZeRO; then pass the rank's
    own optimizer, whose parameters define the shard.
    averaging: for local SGD, `period` and `warmup_steps` in optimizer steps, and `last_step`, the step of the last
    average (0 before the first).
    tied: copies of a tensor of another pipeline stage, such as {"head.weight": "embed.weight"}, equal on all ranks.
    config: settings that distinguish runs; runs that differ only in `sync_bn` are reported as a pair.
    host: name of the machine, by default this machine's.

    Raises ValueError for a rank outside 0..world_size-1.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: must be from 0 to world_size - 1 ({rank} given, world_size {world_size})")
    if type(model).__name__ == _WRAPPER:
        if buffers_synced is None:
            buffers_synced = get_buffers_synced(model)
        model = model.module
    block: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run,
        "run_id": run_id if run_id is not None else _get_launcher_run_id(),
        "step": step,
        "epoch": epoch,
        "rank": rank,
        "world_size": world_size,
        "host": host if host is not None else os.uname().nodename,
        "mesh": dict(mesh or {}),
        "optimizer_sharded": optimizer_sharded,
        "averaging": dict(averaging or {}),
        "tied": dict(tied or {}),
        "buffers_synced": buffers_synced,
        "config": dict(config or {}),
        "versions": _list_versions(),
    }
    if model is not None:
        block.update(_describe_model(model))
        if optimizer is not None:
            block["optimizer_parameters"] = _list_optimizer_parameters(model, optimizer)
    return block


def get_buffers_synced(module: Any) -> bool | None:
    """Whether DDP copies rank 0's buffers at each forward; None for other modules."""
    if type(module).__name__ != _WRAPPER:
        return None
    # torch 2.15 has the first name, older versions only the second.
    for name in ("forward_sync_buffers", "broadcast_buffers"):
        value = getattr(module, name, None)
        if isinstance(value, bool):
            return value
    return None


def parse_metadata(block: object, path: str) -> Metadata:
    """Check a block from an untrusted file and convert it to a record, without unknown keys.

    Raises MalformedFile for a known key with a value of the wrong type.
    """
    if not isinstance(block, dict):
        raise _malformed(path, "the block", _describe(block), "a mapping")

    def get(key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = block.get(key)
        if value is None:
            return default
        # bool is a subclass of int, but a rank of True is an error.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise _malformed(path, key, _describe(value), getattr(kind, "__name__", str(kind)))
        if isinstance(value, int) and kind is int and not 0 <= value <= MOST.get(key, MOST_STEPS):
            raise _malformed(path, key, _describe(value), f"a number from 0 to {MOST.get(key, MOST_STEPS)}")
        return value

    def names(key: str) -> tuple[str, ...]:
        value = get(key, (list, tuple), ())
        if not all(isinstance(name, str) for name in value):
            raise _malformed(path, key, _describe(value), "a list of names")
        return tuple(value)

    def numbers(key: str) -> dict[str, int]:
        value: dict[str, int] = get(key, dict, {})
        if not all(isinstance(name, str) and type(n) is int and 0 <= n <= MOST_STEPS for name, n in value.items()):
            raise _malformed(path, key, _describe(value), "numbers by name")
        return value

    tied = get("tied", dict, {})
    if not all(isinstance(name, str) for name in (*tied, *tied.values())):
        raise _malformed(path, "tied", _describe(tied), "names by name")
    for key in ("config", "versions", "bn_momentum"):
        if not _is_bounded(get(key, dict, {})):
            raise _malformed(path, key, "nested without end", f"at most {_MOST_LEVELS} levels")
    if get("schema", int, SCHEMA) > SCHEMA:
        raise _malformed(path, "schema", _describe(block["schema"]), f"at most {SCHEMA} (install a newer syncheck)")
    return Metadata(
        **{key: get(key, str, None) for key in ("run", "run_id", "host")},
        **{key: get(key, int, None) for key in ("step", "epoch", "rank", "world_size")},
        **{key: get(key, dict, {}) for key in ("bn_momentum", "config", "versions")},
        mesh=numbers("mesh"),
        averaging=numbers("averaging"),
        tied=tied,
        buffers=names("buffers") if block.get("buffers") is not None else None,
        frozen=names("frozen"),
        optimizer_parameters=names("optimizer_parameters"),
        optimizer_sharded=get("optimizer_sharded", bool, False),
        buffers_synced=get("buffers_synced", bool, None),
    )


def _is_bounded(value: object) -> bool:
    """Whether nested containers are bounded; in a pickle they can contain themselves or each other many times."""
    waiting, left = [(value, 0)], _MOST_PARTS
    while waiting:
        node, level = waiting.pop()
        left -= 1
        if left < 0 or level > _MOST_LEVELS:
            return False
        if isinstance(node, (dict, list, tuple)):
            parts = node.values() if isinstance(node, dict) else node
            waiting += [(part, level + 1) for part in parts]
    return True


def _describe(value: object) -> str:
    return f"{type(value).__name__} {brief(value)}"


def _malformed(path: str, place: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path,
        place=f"metadata block '{KEY}', {place}",
        found=found,
        needed=needed,
        next_step="write it with syncheck.metadata()",
    )


def _get_launcher_run_id() -> str | None:
    """Return torchrun's run id (random with --standalone); its default 'none' does not identify a run."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if elastic == "none" else elastic


def _list_versions() -> dict[str, str]:
    """Return the versions of libraries that affect results, if they are already imported."""
    from importlib import metadata as distributions  # only for writing, so that reading starts faster

    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "numpy"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    try:
        found["syncheck"] = distributions.version("syncheck")
    except distributions.PackageNotFoundError:  # run from a copied folder
        found["syncheck"] = "unknown"
    return found


def _describe_model(model: Any) -> dict[str, Any]:
    saved = set(model.state_dict())
    modules = dict(model.named_modules())
    return {
        "buffers": [name for name, _ in model.named_buffers() if name in saved],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        # momentum=None selects BatchNorm's cumulative average.
        "bn_momentum": {
            name: module.momentum
            for name, module in modules.items()
            if getattr(module, "running_mean", None) is not None and hasattr(module, "momentum")
        },
    }


def _list_optimizer_parameters(model: Any, optimizer: Any) -> list[str]:
    """Return the optimizer's parameter names in the order of the integer ids in its state dict."""
    by_identity = {id(p): name for name, p in model.named_parameters()}
    return [by_identity.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
