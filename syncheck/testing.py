"""Assert in a test, with or without pytest, that replicas are the same model: files, things in memory, ranks.

    from syncheck.testing import assert_in_sync

    assert_in_sync("ckpts/*.pth", only=("params", "optimizer"))    # checkpoints
    assert_in_sync(first.state_dict(), second)    # in one process: each thing is a replica
    assert_in_sync(ddp, optimizer)    # in a process group: on all ranks, each rank is a replica

Importing this module imports neither torch, numpy nor pytest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck import api
from syncheck.errors import OutOfSync, SyncheckError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    import torch.distributed

    from syncheck.api import Options
    from syncheck.records import Report

__all__ = ["OutOfSync", "Rank", "assert_in_sync", "compare", "message"]


@dataclass(frozen=True)
class Rank:
    """What the fixture `syncheck_rank` gives a test: who this process is.

    rank: 0 to world_size - 1. world_size: how many ranks the test runs on. shared: a folder that all ranks of this test
    see, empty at first; tmp_path is each rank's own. seed: that random, numpy and torch were seeded with, another one
    on each rank, the same in each run.
    """

    rank: int
    world_size: int
    shared: Path
    seed: int

    def __repr__(self) -> str:  # it stands above every traceback
        return f"<rank {self.rank} of {self.world_size}>"

    @property
    def device(self) -> torch.device:
        """Where the rank's tensors belong: the CPU."""
        import torch

        return torch.device("cpu")

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """The gloo process group of all ranks; None while there is none, which syncheck(group=False) begins with."""
        import torch.distributed as dist

        return dist.group.WORLD if dist.is_initialized() else None

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order. A collective call: every rank has to make it.

        It has a group of its own: where the code under test left a rank in the middle of a collective, this message is
        not taken for one of that.
        """
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        own: Any = dist.new_group(backend="gloo")
        dist.all_gather_object(gathered, value, group=own)
        return gathered

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
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
    """Raise OutOfSync unless replicas are the same model; return the report if they are.

    things, options, group, across_ranks, comparing: as `compare` takes them. limit: rows of tensors in the error's text
    for each group of replicas, 0 for all.

    What could not be told fails too: nothing compared, an unreadable file, a tensor of a kind that is not read, such as
    a sparse one, unless exclude= leaves it out. Only shards are passed over.
    In a process group all ranks raise, with one text, or none does. Raises UsageError as `compare` does.
    """
    __tracebackhide__ = True
    report = _run(things, options, group, across_ranks, comparing, limit)
    from syncheck.report.failure import uncompared_tensors

    if report.verdict != "in_sync" or uncompared_tensors(report):
        raise OutOfSync(message(report, limit), report)
    return report


def compare(
    *things: Any,
    options: Options | None = None,
    group: Any = None,
    across_ranks: bool | None = None,
    **comparing: Any,
) -> Report:
    """Compare replicas: files, things in memory, or the ranks of a process group.

    things: paths and globs alone are compared as the command line does, each rank for itself. Otherwise modules,
    optimizers, state dicts, tensors and whatever has a `state_dict()`: in a process group of several ranks they are the
    parts of this rank's replica, and all ranks have to call this; elsewhere each thing is a replica, a tuple such as
    (model, optimizer) is one too, and so is the path of one file. In memory plain values count as tensors do, missing
    ones too; exclude= leaves them out by name. across_ranks: True or False to choose, on all ranks alike; in a process
    group two things of one kind, such as two models, need it. group: of torch.distributed, by default all ranks.
    options: how to compare. comparing: fields of `syncheck.Options` by name, in place of those of options; a single
    text stands for a tuple.

        report = compare((model, optimizer), (other, other_optimizer), only="params")

    Raises UsageError for a call that cannot be carried out; in a process group on all ranks, with one text.
    """
    __tracebackhide__ = True
    return _run(things, options, group, across_ranks, comparing)


def message(report: Report, limit: int = 10) -> str:
    """Say what a report found in a text of bounded size: what `assert_in_sync` raises with.

    limit: rows of tensors a group, 0 for all.
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
        return _compare(things, group, across_ranks, lambda: _options(options, comparing, limit))
    except UsageError as error:
        # Whoever reads this wants the line of the test, not the frames in here.
        raise error.with_traceback(None) from None
    except SyncheckError as error:
        raise error.with_traceback(None) from error.__cause__


def _compare(things: tuple[Any, ...], group: Any, across_ranks: bool | None, options: Callable[[], Options]) -> Report:
    from syncheck.live import channel

    several = channel.world_size() > 1
    if things and all(map(_is_path, things)) and not across_ranks and (group is None or not several):
        if group is not None:
            raise UsageError("files are compared by each rank for itself; leave out group=")
        return api.compare(*things, options=options())
    if across_ranks or (across_ranks is None and (group is not None or several)):
        from syncheck.live.exchange import compare_across_ranks

        def checked() -> Options:
            if across_ranks is None and group is None:
                from syncheck.live.memory.roles import check_unambiguous

                check_unambiguous(things)
            return options()

        return compare_across_ranks(things, group, checked)
    if group is not None:
        raise UsageError("across_ranks=False compares within this process; leave out group=")
    from syncheck.live.here import compare_here

    return compare_here(things, options())


def _is_path(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike))


def _options(options: Options | None, comparing: dict[str, Any], limit: int) -> Options:
    """Return the options, with fields given by name in place of their own. A single text stands for a tuple of one."""
    if type(limit) is not int or limit < 0:
        raise UsageError(f"limit={limit!r}: needs a number of rows, 0 for all")
    if options is not None and not isinstance(options, api.Options):
        raise UsageError(f"options={options!r:.80}: needs syncheck.Options, or its fields by name, as in only='params'")
    known = api.Options.__dataclass_fields__
    unknown = [name for name in comparing if name not in known]
    if unknown:
        raise UsageError(f"{unknown[0]}=: no such option; needs one of {', '.join(known)}")
    made: dict[str, Any] = {}
    for name, value in comparing.items():
        many = isinstance(known[name].default, tuple)
        # None is what is not given; of what is no collection of texts the options themselves complain.
        if many and not isinstance(value, (list, tuple)):
            value = () if value is None else tuple(value) if isinstance(value, (set, frozenset)) else value
            value = (value,) if isinstance(value, str) else value
        made[name] = tuple(value) if isinstance(value, list) else value
    return api.changed(options or api.Options(), **made)
