"""Assert in tests that replicas are the same model: checkpoint files, objects in memory, or ranks.

    from syncheck.testing import assert_in_sync

    assert_in_sync("ckpts/*.pth", only=("params", "optimizer"))    # checkpoints
    assert_in_sync(first.state_dict(), second)    # in one process: each object is a replica
    assert_in_sync(ddp, optimizer)    # in a process group, called on all ranks: each rank is a replica

pytest is not required. Importing this module does not import torch, numpy or pytest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck import api
from syncheck.errors import PYTHON, OutOfSync, SyncheckError, UsageError
from syncheck.options import Options, RunOptions, list_options, replace_fields

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    import torch.distributed

    from syncheck.records import Report

__all__ = ["OutOfSync", "Rank", "assert_in_sync", "compare", "message"]


@dataclass(frozen=True)
class Rank:
    """The rank of this process, as returned by the pytest fixture `syncheck_rank`.

    rank: from 0 to world_size - 1. world_size: number of ranks of the test. shared: an empty folder that all ranks of
    the test share; `tmp_path` is different on each rank. seed: the seed of random, numpy and torch, which is different
    on each rank and equal in every run.
    """

    rank: int
    world_size: int
    shared: Path
    seed: int

    def __repr__(self) -> str:  # the heading of every traceback
        return f"<rank {self.rank} of {self.world_size}>"

    @property
    def device(self) -> torch.device:
        """The device for the rank's tensors: the CPU."""
        import torch

        return torch.device("cpu")

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """The gloo process group of all ranks; None if it is not initialized, as at the start with group=False."""
        import torch.distributed as dist

        return dist.group.WORLD if dist.is_initialized() else None

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank. A collective call: every rank must make it.

        It uses a new process group, so it cannot be mixed up with an unfinished collective of the code under test.
        """
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        own: Any = dist.new_group(backend="gloo")
        dist.all_gather_object(gathered, value, group=own)
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
    """Raise OutOfSync unless the replicas are the same model; otherwise return the report.

    things, options, group, across_ranks, comparing: as for `compare`. limit: number of tensors to list in the error for
    each group of replicas, 0 for all.

    An undecided comparison fails too: nothing compared, an unreadable file, or a tensor that syncheck cannot read, such
    as a sparse tensor, unless `exclude` skips it. Only shards may remain uncompared.
    In a process group, either all ranks raise the same error, or no rank raises. Raises UsageError as `compare` does.
    """
    __tracebackhide__ = True
    report = _run(things, options, group, across_ranks, comparing, limit)
    from syncheck.report.failure import could_not_compare

    if report.verdict != "in_sync" or could_not_compare(report):
        raise OutOfSync(message(report, limit), report)
    return report


def compare(
    *things: Any,
    options: Options | None = None,
    group: Any = None,
    across_ranks: bool | None = None,
    **comparing: Any,
) -> Report:
    """Compare replicas: checkpoint files, objects in memory, or the ranks of a process group.

    things: the replicas. Only paths and globs: each rank compares the files separately, as on the command line. In a
    process group of several ranks: the parts of this rank's replica, and all ranks must make the call. Otherwise: one
    replica each, where a tuple such as (model, optimizer) or the path of one file is a replica.

    Parts are modules, optimizers, state dicts, tensors, and any object with a `state_dict()`. Python values in memory
    are compared like tensors, including missing values; `exclude` skips them by name.

    across_ranks: True to compare ranks, False to compare within this process; equal on all ranks. It is required in a
    process group if two things have the same kind, such as two models. group: a torch.distributed process group, by
    default all ranks. options: how to compare. comparing: fields of `syncheck.Options` that override `options`; for a
    tuple, a single string is accepted.

        report = compare((model, optimizer), (other, other_optimizer), only="params")

    Raises UsageError for invalid arguments; in a process group, all ranks raise the same error.
    """
    __tracebackhide__ = True
    return _run(things, options, group, across_ranks, comparing)


def message(report: Report, limit: int = 10) -> str:
    """Return the error message of `assert_in_sync` for a report, in text of bounded size.

    limit: number of tensors to list for each group, 0 for all.
    """
    from syncheck.report import failure

    return failure.message(report, limit)


def _run(
    things: tuple[Any, ...],
    options: Options | None,
    group: Any,
    across_ranks: bool | None,
    comparing: dict[str, Any],
    limit: int = 10,
) -> Report:
    __tracebackhide__ = True
    try:
        return _compare(things, group, across_ranks, lambda: _merge_options(options, comparing, limit))
    except UsageError as error:
        # The traceback should end at the line of the test.
        raise error.with_traceback(None) from None
    except SyncheckError as error:
        raise error.with_traceback(None) from error.__cause__


def _compare(things: tuple[Any, ...], group: Any, across_ranks: bool | None, options: Callable[[], Options]) -> Report:
    from syncheck.live import channel

    several = channel.world_size() > 1
    if things and all(map(_is_path, things)) and not across_ranks and (group is None or not several):
        if group is not None:
            raise UsageError("each rank compares files separately; remove group=")
        return api.compare(*things, options=options())
    if across_ranks or (across_ranks is None and (group is not None or several)):
        from syncheck.live.exchange import compare_across_ranks

        def check_options() -> Options:
            if across_ranks is None and group is None:
                from syncheck.live.memory.roles import check_unambiguous

                check_unambiguous(things)
            return options()

        return compare_across_ranks(things, group, check_options)
    if group is not None:
        raise UsageError("across_ranks=False compares within this process; remove group=")
    from syncheck.live.here import compare_here

    return compare_here(things, options())


def _is_path(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike))


def _merge_options(options: Options | None, comparing: dict[str, Any], limit: int) -> Options:
    """Return the options with the fields that are given by name. Tuples may be given as a list, a set or one string."""
    RunOptions(limit=limit)  # raises OptionError for a wrong limit
    if options is not None and not isinstance(options, Options):
        raise UsageError(
            f"options={options!r:.80}: must be syncheck.Options; or pass its fields by name, as in only='params'"
        )
    known = list_options(PYTHON, Options)
    given: dict[str, Any] = {}
    for name, value in comparing.items():
        if name not in known:
            raise UsageError(f"{name}=: no such option; must be one of {', '.join(known)}")
        is_list = known[name].kind.is_list
        if is_list and isinstance(value, str):
            given[name] = (value,)
        elif isinstance(value, list) or (is_list and isinstance(value, (set, frozenset))):
            given[name] = tuple(value)
        else:
            given[name] = value
    return replace_fields(options or Options(), **given)
