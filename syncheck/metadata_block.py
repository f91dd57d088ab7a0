"""The metadata block: what a trainer writes beside its tensors so that no one has to guess later.

A saved state dict does not say which run, step or rank it belongs to, nor which of its tensors are buffers.
`metadata()` collects that as plain JSON values. Put the result under the top-level key ``syncheck`` of what
`torch.save` writes, or, in a safetensors file, as JSON text under ``__metadata__["syncheck"]``.

Torch is never imported here: a model is only asked for its `named_buffers()` and the like.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, brief
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "syncheck"
SCHEMA = 1
# Bounds on what an untrusted file may claim: far above any run, and small enough to count up to and to print.
MOST_STEPS = 2**63 - 1
_MOST_PARTS, _MOST_LEVELS = 200_000, 100
MOST = {"rank": 1_000_000, "world_size": 1_000_000}


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
    config: Mapping[str, Any] | None = None,
    host: str | None = None,
) -> dict[str, Any]:
    """Describe one rank's checkpoint in plain JSON values, to be saved beside its tensors under the key `syncheck`.

        block = metadata(run="ddp", rank=rank, world_size=2, step=100, model=ddp.module, optimizer=optimizer)
        torch.save({"model": ddp.module.state_dict(), "syncheck": block}, f"ckpts/rank{rank}.pth")

    run: name of the run, equal on all ranks. run_id: random text, equal on all ranks of one launch, so that
    files of two launches are never taken for replicas of each other; by default torchrun's own id, if it has one.
    step, epoch: optimizer steps and epochs done. model: the unwrapped module, asked for its buffer names, frozen
    parameters and BatchNorm momentum. optimizer: asked for the order of its parameters. buffers_synced: True if the
    method synchronizes buffers at least once a step (SyncBatchNorm; plain DDP, with one step's lag), False if it
    never does (DDP with forward_sync_buffers=False, FSDP), None where that is not known.
    mesh: coordinates of this rank by mesh dimension. optimizer_sharded: True where each rank holds its own part of the
    optimizer's state, as with ZeRO; give its own optimizer then, whose parameters say which part that is. averaging: of
    local SGD, when models are averaged: `period` and `warmup_steps` in optimizer steps, `last_step` the last at
    which they were (0: not yet).
    config: what distinguishes this run from others; runs that differ in `sync_bn` only are reported as a pair.
    host: the machine's name; by default that of this one.

    Raises ValueError for a rank outside 0..world_size-1.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of a world of {world_size}: needs 0 <= rank < world_size")
    block: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run,
        "run_id": run_id if run_id is not None else _launcher_run_id(),
        "step": step,
        "epoch": epoch,
        "rank": rank,
        "world_size": world_size,
        "host": host if host is not None else os.uname().nodename,
        "mesh": dict(mesh or {}),
        "optimizer_sharded": optimizer_sharded,
        "averaging": dict(averaging or {}),
        "buffers_synced": buffers_synced,
        "config": dict(config or {}),
        "versions": _versions(),
    }
    if model is not None:
        block.update(_describe_model(model))
        if optimizer is not None:
            block["optimizer_parameters"] = _optimizer_parameters(model, optimizer)
    return block


def parse(block: object, path: str) -> Metadata:
    """Check a block read from an untrusted file and return it as a record; unknown keys are kept out.

    Raises MalformedFile when a known key holds a value of another type.
    """
    if not isinstance(block, dict):
        raise _malformed(path, "the block", block, "a mapping")

    def get(key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = block.get(key)
        if value is None:
            return default
        # bool is an int in Python, but a rank of True is a mistake.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise _malformed(path, key, value, getattr(kind, "__name__", str(kind)))
        if isinstance(value, int) and kind is int and not 0 <= value <= MOST.get(key, MOST_STEPS):
            raise _malformed(path, key, value, f"a number from 0 to {MOST.get(key, MOST_STEPS)}")
        return value

    def names(key: str) -> tuple[str, ...]:
        value = get(key, (list, tuple), ())
        if not all(isinstance(name, str) for name in value):
            raise _malformed(path, key, value, "a list of names")
        return tuple(value)

    def numbers(key: str) -> dict[str, int]:
        value: dict[str, int] = get(key, dict, {})
        if not all(isinstance(name, str) and type(n) is int and 0 <= n <= MOST_STEPS for name, n in value.items()):
            raise _malformed(path, key, value, "numbers by name")
        return value

    for key in ("config", "versions", "bn_momentum"):
        if not _ends(get(key, dict, {})):
            raise _malformed(path, key, "containers within containers", f"at most {_MOST_LEVELS} levels that end")
    if get("schema", int, SCHEMA) > SCHEMA:
        raise _malformed(path, "schema", block["schema"], f"at most {SCHEMA}; a newer syncheck reads it")
    return Metadata(
        run=get("run", str, None),
        run_id=get("run_id", str, None),
        step=get("step", int, None),
        epoch=get("epoch", int, None),
        rank=get("rank", int, None),
        world_size=get("world_size", int, None),
        host=get("host", str, None),
        mesh=numbers("mesh"),
        optimizer_sharded=get("optimizer_sharded", bool, False),
        averaging=numbers("averaging"),
        buffers=names("buffers") if block.get("buffers") is not None else None,
        frozen=names("frozen"),
        bn_momentum=get("bn_momentum", dict, {}),
        optimizer_parameters=names("optimizer_parameters"),
        buffers_synced=get("buffers_synced", bool, None),
        config=get("config", dict, {}),
        versions=get("versions", dict, {}),
    )


def _ends(value: object) -> bool:
    """Whether containers of a pickle can be compared: they may hold themselves, or each the next one twice."""
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


def _malformed(path: str, place: str, found: object, needed: str) -> MalformedFile:
    return MalformedFile(
        path,
        place=f"metadata block '{KEY}', {place}",
        found=f"{type(found).__name__} {brief(found)}",
        needed=needed,
        next_step="write it with syncheck.metadata()",
    )


def _launcher_run_id() -> str | None:
    """Torchrun's id, random under --standalone; its default 'none' tells runs apart as little as no id does."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if elastic == "none" else elastic


def _versions() -> dict[str, str]:
    """Versions of what decides the bits, of those libraries that are loaded already."""
    from importlib import metadata as distributions  # for writers only: readers start faster without it

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
        # momentum=None is the cumulative average of BatchNorm: kept as null.
        "bn_momentum": {
            name: module.momentum
            for name, module in modules.items()
            if getattr(module, "running_mean", None) is not None and hasattr(module, "momentum")
        },
    }


def _optimizer_parameters(model: Any, optimizer: Any) -> list[str]:
    """Names of the optimizer's parameters in the order of their integer ids in its state dict."""
    by_identity = {id(p): name for name, p in model.named_parameters()}
    return [by_identity.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
