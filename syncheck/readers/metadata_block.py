"""The metadata block: information that a trainer saves beside its tensors.

A state dict does not contain the run, step or rank, nor which of its tensors are buffers. `metadata()` collects this as
plain JSON values. Save the result in a torch.save file under the top-level key ``syncheck``, or in a safetensors file
as JSON text under ``__metadata__["syncheck"]``.

This module does not import torch; it only calls methods of the model, for example `named_buffers()`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.loaded import find_loaded
from syncheck.readers.untrusted import are_strings
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
    tied: copies of a tensor of another pipeline stage, for example {"head.weight": "embed.weight"}, equal on all ranks.
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
        raise _malformed(
            path,
            "the block",
            problem=_describe(block),
            needed="a mapping",
        )

    fields = _Fields(block, path)
    tied = fields.texts("tied")
    config = fields.bounded("config")
    versions = fields.bounded("versions")
    bn_momentum = fields.bounded("bn_momentum")
    schema = fields.number("schema")
    if schema is not None and schema > SCHEMA:
        raise _malformed(
            path,
            "schema",
            problem=_describe(schema),
            needed=f"at most {SCHEMA} (install a newer syncheck)",
        )
    return Metadata(
        run=fields.get("run", str),
        run_id=fields.get("run_id", str),
        host=fields.get("host", str),
        step=fields.number("step"),
        epoch=fields.number("epoch"),
        rank=fields.number("rank"),
        world_size=fields.number("world_size"),
        mesh=fields.numbers("mesh"),
        averaging=fields.numbers("averaging"),
        tied=tied,
        buffers=None if block.get("buffers") is None else fields.names("buffers"),
        frozen=fields.names("frozen"),
        optimizer_parameters=fields.names("optimizer_parameters"),
        optimizer_sharded=fields.get("optimizer_sharded", bool, default=False),
        buffers_synced=fields.get("buffers_synced", bool),
        bn_momentum=bn_momentum,
        config=config,
        versions=versions,
    )


class _Fields:
    """The fields of an untrusted block. All methods raise MalformedFile for a value of another type."""

    def __init__(self, block: dict[Any, Any], path: str) -> None:
        self.block, self.path = block, path

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of a type, or the default if there is none."""
        value = self.block.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self._wrong(key, getattr(kind, "__name__", str(kind)))
        return value

    def number(self, key: str) -> int | None:
        """Return a whole number, or None if there is none."""
        value: int | None = self.get(key, int)
        if value is None:
            return None
        # bool is a subclass of int, but a rank of True is an error.
        if isinstance(value, bool):
            raise self._wrong(key, "int")

        most = MOST.get(key, MOST_STEPS)
        if not 0 <= value <= most:
            raise self._wrong(key, f"a number from 0 to {most}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of names as a tuple."""
        value = self.get(key, (list, tuple), ())
        if not are_strings(value):
            raise self._wrong(key, "a list of names")
        return tuple(value)

    def texts(self, key: str) -> dict[str, str]:
        """Return names by name."""
        value: dict[str, str] = self.get(key, dict, {})
        if not are_strings([*value, *value.values()]):
            raise self._wrong(key, "names by name")
        return value

    def numbers(self, key: str) -> dict[str, int]:
        """Return whole numbers by name."""
        value: dict[str, int] = self.get(key, dict, {})
        for name, number in value.items():
            is_count = type(number) is int and 0 <= number <= MOST_STEPS
            if not is_count or not isinstance(name, str):
                raise self._wrong(key, "numbers by name")
        return value

    def bounded(self, key: str) -> dict[str, Any]:
        """Return a dictionary of any values that are not nested too deeply."""
        value: dict[str, Any] = self.get(key, dict, {})
        if not _is_bounded(value):
            raise _malformed(
                self.path,
                key,
                problem="nested without end",
                needed=f"at most {_MOST_LEVELS} levels",
            )
        return value

    def _wrong(self, key: str, needed: str) -> MalformedFile:
        return _malformed(
            self.path,
            key,
            problem=_describe(self.block.get(key)),
            needed=needed,
        )


def _is_bounded(value: object) -> bool:
    """Whether nested containers are bounded; in a pickle they can contain themselves or each other many times."""
    waiting = [(value, 0)]
    remaining_parts = _MOST_PARTS
    while waiting:
        node, level = waiting.pop()
        remaining_parts -= 1
        if remaining_parts < 0 or level > _MOST_LEVELS:
            return False
        if isinstance(node, dict):
            waiting += [(part, level + 1) for part in node.values()]
        elif isinstance(node, (list, tuple)):
            waiting += [(part, level + 1) for part in node]
    return True


def _describe(value: object) -> str:
    return f"{type(value).__name__} {brief(value)}"


def _malformed(path: str, key: str, *, problem: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path,
        place=f"metadata block '{KEY}', {key}",
        found=problem,
        needed=needed,
        next_step="write it with syncheck.metadata()",
    )


def _get_launcher_run_id() -> str | None:
    """Return torchrun's run id (random with --standalone); its default 'none' does not identify a run."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if run_id == "none" else run_id


def _list_versions() -> dict[str, str]:
    """Return the versions of libraries that affect results, if they are already imported."""
    # Only for writing, so that reading starts faster.
    from importlib import metadata as distributions

    versions = {"python": ".".join(str(number) for number in sys.version_info[:3])}
    for name in ("torch", "numpy"):
        module = find_loaded(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", "unknown"))

    try:
        versions["syncheck"] = distributions.version("syncheck")
    except distributions.PackageNotFoundError:  # run from a copied folder
        versions["syncheck"] = "unknown"
    return versions


def _describe_model(model: Any) -> dict[str, Any]:
    """Return the names of buffers and frozen parameters, and the momentum of BatchNorm."""
    saved_names = set(model.state_dict())
    momentum_by_module = {}
    for name, module in model.named_modules():
        has_statistics = getattr(module, "running_mean", None) is not None
        if has_statistics and hasattr(module, "momentum"):
            # None selects BatchNorm's cumulative average.
            momentum_by_module[name] = module.momentum
    return {
        "buffers": [name for name, _ in model.named_buffers() if name in saved_names],
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "bn_momentum": momentum_by_module,
    }


def _list_optimizer_parameters(model: Any, optimizer: Any) -> list[str]:
    """Return the optimizer's parameter names in the order of the integer ids in its state dict."""
    name_by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    names: list[str] = []
    for group in optimizer.param_groups:
        names += [name_by_identity.get(id(parameter), "") for parameter in group["params"]]
    return names
