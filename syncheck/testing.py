"""Assert in a test, with or without pytest, that replicas are the same model: files, objects in memory, or ranks.

    from syncheck.testing import assert_in_sync

    assert_in_sync("ckpts/*.pth", only=("params", "optimizer"))    # checkpoints
    assert_in_sync(first.state_dict(), second)    # in one process: each object is a replica
    assert_in_sync(ddp, optimizer)    # in a process group: call on all ranks, each rank is a replica
    assert_parallel_equals_single(Mine())    # in a process group: the gradient is that of one process

pytest is not required. Importing this module does not import torch, numpy or pytest.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from syncheck import api
from syncheck.errors import SyncheckError, UsageError
from syncheck.frozen import record
from syncheck.option_kinds import make_tuple
from syncheck.options import PYTHON, DiffOptions, Options, RunOptions, list_options, replace_fields
from syncheck.parity.case import ParityCase, sampler_order
from syncheck.records import OutOfSync
from syncheck.suggestions import suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    import torch.distributed

    from syncheck.records import Report

__all__ = [
    "OutOfSync", "ParityCase", "Rank", "assert_in_sync", "assert_parallel_equals_single", "assert_same_model",
    "compare", "message", "sampler_order",
]  # fmt: skip


@record
class Rank:
    """The value of the fixture `syncheck_rank`: this process and its process group.

    rank: 0 to world_size - 1. world_size: number of ranks of the test. shared: a folder for all ranks of this test,
    initially empty; tmp_path is different on each rank. seed: of random, numpy and torch; different on each rank, equal
    in each run.
    """

    rank: int
    world_size: int
    shared: Path
    seed: int

    # Shown above every traceback.
    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size}>"

    @property
    def device(self) -> torch.device:
        """The device of the rank's tensors: the CPU."""
        import torch

        return torch.device("cpu")

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """The gloo process group of all ranks, or None before it exists, as after syncheck(group=False)."""
        import torch.distributed as dist

        return dist.group.WORLD if dist.is_initialized() else None

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in order. A collective call: every rank must make it.

        Uses a group of its own, so a collective call that the code under test left unfinished cannot receive this
        message.
        """
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        group: Any = dist.new_group(backend="gloo")
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        import torch.distributed as dist

        dist.barrier()


def assert_in_sync(
    *things: Any,
    options: Options | None = None,
    group: Any = None,
    across_ranks: bool | None = None,
    limit: int = 10,
    **comparing: Any,
) -> Report:
    """Raise OutOfSync unless replicas are the same model; otherwise return the report.

    things, options, group, across_ranks, comparing: as in `compare`. limit: rows of tensors per group in the
    error message, 0 for all.

    Also fails if a comparison was impossible: no tensor compared, an unreadable file, or a tensor of an unsupported
    kind, for example a sparse tensor, unless exclude= skips it. Only shards may remain uncompared. In a process group
    all ranks raise the same error or return. Raises UsageError like `compare`.
    """
    __tracebackhide__ = True
    report = _run(things, options, group, across_ranks, comparing, limit)
    from syncheck.report.failure import uncompared_tensors

    if report.verdict != "in_sync" or uncompared_tensors(report):
        raise OutOfSync(message(report, limit), report)
    return report


def assert_same_model(
    a: Any, b: Any, *, options: DiffOptions | None = None, group: Any = None, limit: int = 10, **comparing: Any
) -> Report:
    """Raise OutOfSync unless two models are the same, in any layout; otherwise return the report.

    a, b: the source and the copy. Each is a path like those of `syncheck.diff`, or an object in memory: a module, a
    state dict, or a tuple of parts like (model, optimizer).

        assert_same_model("ckpts/fsdp_rank*.pth", "hf_export/")
        assert_same_model(model, "full.pth", subset=True)

    In a process group of several ranks, every rank calls this function with its own object, which may hold shards
    (DTensors) or a pipeline stage of the model; the verdict is that of the same states saved as files. Files are read
    by the first rank. All ranks raise the same error or return. Non-persistent buffers are skipped, because files lack
    them. group: a torch.distributed process group, all ranks by default. options, comparing: as in `compare`, and the
    fields of `syncheck.DiffOptions`. limit: rows of tensors in the error message, 0 for all. Raises UsageError for
    invalid calls, and CheckpointError for files that cannot be read.
    """
    __tracebackhide__ = True
    from syncheck.live.models import compare_models

    # Options are made within the comparison, so that all ranks raise the same error.
    report = compare_models(a, b, group, partial(_merge_options, options, comparing, limit, DiffOptions))
    if report.verdict != "in_sync":
        raise OutOfSync(message(report, limit), report)
    return report


def assert_parallel_equals_single(
    case: ParityCase,
    *,
    dtype: str = "float64",
    group: Any = None,
    limit: int = 10,
    allow: str | Sequence[str] = (),
) -> Report:
    """Raise OutOfSync unless a parallel program computes the gradient of one process; otherwise return the report.

    case: the model, the batch, the terms of the loss and the program, see `ParityCase`. dtype: of the parameters in
    both programs, float64, float32 or bfloat16. group: a process group of all ranks. limit: rows of tensors in the
    error message, 0 for all. allow: codes of findings that do not count, or one code.

        assert_parallel_equals_single(Mine())

    A collective: all ranks call it, and raise the same error or return. One process can check accumulation only. In
    bfloat16 a right program is undecided, and raises OutOfSync: rounding hides too much. Raises UsageError if the loss
    is not a sum of terms, if a method of the case fails or returns an invalid result, or if the program cannot be
    compared; PeersBlocked if other ranks wait in a collective of the program meanwhile.
    """
    __tracebackhide__ = True
    from syncheck.parity.check import check_parity

    RunOptions(limit=limit)
    report = check_parity(case, dtype, group, allow)
    if report.verdict != "in_sync":
        raise OutOfSync(message(report, limit), report)
    return report


def compare(
    *things: Any,
    options: Options | None = None,
    group: Any = None,
    across_ranks: bool | None = None,
    **comparing: Any,
) -> Report:
    """Compare replicas: files, objects in memory, or the ranks of a process group.

    things: paths and globs, compared as on the command line, by each rank alone. Or modules, optimizers, state dicts,
    tensors and other objects with a `state_dict()`. In a process group of several ranks the objects are the parts of
    this rank's replica, and all ranks must call this function. Otherwise each object is a replica: a module, a tuple of
    parts like (model, optimizer), or the path of one file. In memory, plain values count like tensors, even missing
    values; skip them with exclude=. across_ranks: choose explicitly, equally on all ranks; required in a process group
    for two objects of one kind, for example two models. group: a torch.distributed process group, all ranks by default.
    options: of the comparison. comparing: fields of `syncheck.Options` by name, which override options; a string stands
    for a tuple with one element.

        report = compare((model, optimizer), (other, other_optimizer), only="params")

    Raises UsageError for invalid calls; in a process group the same error on all ranks.
    """
    __tracebackhide__ = True
    return _run(things, options, group, across_ranks, comparing)


def message(report: Report, limit: int = 10) -> str:
    """Return a text of bounded size about a report, the message of OutOfSync.

    limit: rows of tensors per group, 0 for all.
    """
    from syncheck.report import failure

    return failure.message(report, limit)


def _run(
    objects: tuple[Any, ...],
    options: Options | None,
    group: Any,
    across_ranks: bool | None,
    comparing: dict[str, Any],
    limit: int = 10,
) -> Report:
    __tracebackhide__ = True
    try:
        return _compare(objects, group, across_ranks, partial(_merge_options, options, comparing, limit))
    # Without the traceback of this module: only the line of the test matters.
    except UsageError as error:
        raise error.with_traceback(None) from None
    except SyncheckError as error:
        raise error.with_traceback(None) from error.__cause__


def _compare(objects: tuple[Any, ...], group: Any, across_ranks: bool | None, options: Callable[[], Options]) -> Report:
    """Compare files, the ranks of a process group, or objects in memory. options: makes the options, or raises."""
    from syncheck.live import channel

    has_several_ranks = channel.world_size() > 1
    if _are_files(objects) and not across_ranks:
        if group is None:
            return api.compare(*objects, options=options())
        if not has_several_ranks:
            raise UsageError("each rank compares files alone; remove group=")
    # A group asks for a comparison of its ranks, and several ranks alone suggest one.
    is_chosen = across_ranks is not None or group is not None
    compares_ranks = is_chosen or has_several_ranks
    if across_ranks is not None:
        compares_ranks = across_ranks
    if compares_ranks:
        return _compare_ranks(objects, group, options, is_chosen=is_chosen)
    if group is not None:
        raise UsageError("across_ranks=False compares within this process; remove group=")
    from syncheck.live.local_compare import compare_objects

    return compare_objects(objects, options())


def _are_files(objects: tuple[Any, ...]) -> bool:
    """Return whether all objects are paths; no object is no path."""
    return bool(objects) and all(isinstance(path, (str, os.PathLike)) for path in objects)


def _compare_ranks(objects: tuple[Any, ...], group: Any, options: Callable[[], Options], *, is_chosen: bool) -> Report:
    """Compare the objects of all ranks. is_chosen: whether the caller has asked for this explicitly."""
    from syncheck.live.exchange import compare_across_ranks

    def make_options() -> Options:
        # Errors must reach all ranks, so the check runs within the collective call.
        if not is_chosen:
            from syncheck.live.local_compare import check_unambiguous

            check_unambiguous(objects)
        return options()

    return compare_across_ranks(objects, group, make_options)


def _merge_options(options: Options | None, comparing: dict[str, Any], limit: int, kind: type[Any] = Options) -> Any:
    """Return the options with the fields that are given by name. Tuples may be given as a list, a set or one string.

    kind: the class of the options.
    """
    # Raises OptionError for a wrong limit.
    RunOptions(limit=limit)
    if not isinstance(options, kind | None):
        raise UsageError(
            f"options={options!r:.80}: must be syncheck.{kind.__name__}; or pass its fields by name, as in "
            "only='params'"
        )
    declarations = list_options(PYTHON, kind)
    changes: dict[str, Any] = {}
    for name, value in comparing.items():
        if name not in declarations:
            expected = f"must be one of {', '.join(declarations)}"
            raise UsageError(f"{name}=: no such option; {expected}{suggest(name, declarations)}")
        if declarations[name].kind.is_list:
            value = make_tuple(value)
        changes[name] = value
    return replace_fields(options or kind(), **changes)
