"""Assert in a test, with or without pytest, that replicas are the same model: files, things in memory, ranks.

    from syncheck.testing import assert_in_sync

    assert_in_sync("ckpts/*.pth", only=("params", "optimizer"))    # checkpoints
    assert_in_sync(first.state_dict(), second)    # in one process: each thing is a replica
    assert_in_sync(ddp, optimizer)    # in a process group: on all ranks, each rank is a replica

Importing this module imports neither torch, numpy nor pytest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncheck import api
from syncheck.errors import SyncheckError, UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    import torch.distributed

    from syncheck.api import Options
    from syncheck.records import Finding, Group, Report, TensorDiff

__all__ = ["OutOfSync", "Rank", "assert_in_sync", "compare", "message"]

# Bounds of a failure's text, whatever the names in a checkpoint are.
MOST_COLUMNS = 1000
MOST_GROUPS = 3
MOST_FINDINGS = 8
MOST_UNREADABLE = 5
_NAME, _SENTENCE = 120, 600  # characters


@dataclass(frozen=True)
class Rank:
    """What the fixture `syncheck_rank` gives a test: who this process is.

    rank: 0 to world_size - 1. shared: a folder that all ranks of this test see, empty at first; tmp_path is each rank's
    own. seed: that random, numpy and torch were seeded with, another one on each rank, the same in each run.
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
        dist.all_gather_object(gathered, value, group=dist.new_group(backend="gloo"))
        return gathered

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        import torch.distributed as dist

        dist.barrier()


class OutOfSync(AssertionError):
    """Replicas differ, or it could not be told whether they do. report: the whole answer."""

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self.report = report

    def __reduce__(self) -> tuple[type[OutOfSync], tuple[str, Report]]:
        # Test runners send exceptions from one process to another.
        return type(self), (str(self), self.report)


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
    for each group of replicas, 0 for all. What could not be told fails too: nothing compared, an unreadable file.
    In a process group all ranks raise, with one text, or none does. Raises UsageError as `compare` does.
    """
    __tracebackhide__ = True
    report = compare(*things, options=options, group=group, across_ranks=across_ranks, **comparing)
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
    """Compare replicas: files, things in memory, or the ranks of a process group.

    things: paths and globs alone are compared as the command line does, each rank for itself. Otherwise modules,
    optimizers, state dicts, tensors and whatever has a `state_dict()`: in a process group of several ranks they are the
    parts of this rank's replica, and all ranks have to call this; elsewhere each thing is a replica, a tuple such as
    (model, optimizer) is one too, and so is the path of one file. across_ranks: True or False to choose. group: of
    torch.distributed, by default all ranks. options: or its fields by name as comparing, a single text for a tuple.
    Raises UsageError for a call that cannot be carried out; in a process group on all ranks, with one text.
    """
    __tracebackhide__ = True
    try:
        return _compare(things, options, group, across_ranks, comparing)
    except SyncheckError as error:
        # Whoever reads this wants the line of the test, not the frames in here.
        raise error.with_traceback(None) from (None if isinstance(error, UsageError) else error.__cause__)


def message(report: Report, limit: int = 10) -> str:
    """Say what a report found in a text of bounded size: the worst groups with their findings and tensors, the counts.

    limit: rows of tensors a group, 0 for all.
    """
    from syncheck.report import plain, text, words

    failing = [group for group in report.groups if group.verdict != "in_sync"]
    failing.sort(key=lambda group: group.verdict != "out_of_sync")
    shown = replace(report, groups=tuple(_cut_group(group, limit) for group in failing[:MOST_GROUPS]))
    lines = plain.render(text.comparison(shown, limit)).splitlines()[:-2]
    lines = [line.replace("; -n 0 shows all", "; limit=0 shows all") for line in lines]
    hidden = len(failing) - len(shown.groups)
    if hidden:
        lines += [f"and {hidden} more groups of replicas that are not in sync", ""]
    for file in report.unreadable[:MOST_UNREADABLE]:
        lines.append(f"not read: {one_line(_cut(file.path))}: {one_line(_cut(file.reason, _SENTENCE))}")
    lines += [words.verdict_line(report), words.counts_line(report)]
    codes = dict.fromkeys(f.code for group in failing for f in group.findings if f.fails)
    title = f"replicas are not known to be in sync{': ' + ', '.join(codes) if codes else ''}"
    if report.verdict == "out_of_sync":
        title = f"replicas are out of sync: {', '.join(codes)}"
    return "\n".join(_cut(line, MOST_COLUMNS) for line in [title, "", *lines])


def _compare(
    things: tuple[Any, ...], options: Options | None, group: Any, across_ranks: bool | None, comparing: dict[str, Any]
) -> Report:
    paths = [_is_path(thing) for thing in things]
    if not things:
        raise UsageError("nothing given to compare; needs paths of checkpoints, or modules, state dicts and the like")
    if all(paths) and not across_ranks:
        if group is not None:
            raise UsageError("files are compared by each rank for itself; leave out group=")
        return api.compare(*things, options=_options(options, comparing))
    from syncheck.live import channel  # what only files need is loaded without it

    if across_ranks is None:
        across_ranks = group is not None or channel.world_size() > 1
    if across_ranks:
        from syncheck.live.exchange import compare_across_ranks

        return compare_across_ranks(things, group, lambda: _options(options, comparing))
    if group is not None:
        raise UsageError("across_ranks=False compares within this process; leave out group=")
    from syncheck.live.here import compare_here

    return compare_here(things, _options(options, comparing))


def _is_path(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike))


def _options(options: Options | None, comparing: dict[str, Any]) -> Options:
    """Return the options, with fields given by name in place of their own. A single text stands for a tuple of one."""
    known = api.Options.__dataclass_fields__
    unknown = [name for name in comparing if name not in known]
    if unknown:
        raise UsageError(f"{unknown[0]}=: no such option; needs one of {', '.join(known)}")
    made: dict[str, Any] = {}
    for name, value in comparing.items():
        many = isinstance(known[name].default, tuple)
        made[name] = (value,) if many and isinstance(value, str) else tuple(value or ()) if many else value
    return replace(options or api.Options(), **made)


def _cut(text: str, most: int = _NAME) -> str:
    """Shorten a text in its middle: ends of names tell more than middles."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2 - 2]}...{text[len(text) - most // 2 + 1 :]}"


def _cut_group(group: Group, limit: int) -> Group:
    """Return a group with names and sentences of bounded length."""
    from syncheck.report import words

    worst = words.worst_first([diff for diff in group.tensors if diff.reason != "rng"])
    shown, rest = (worst[:limit], worst[limit:]) if limit else (worst, [])
    return replace(
        group,
        name=_cut(group.name),
        replicas=tuple(replace(replica, path=_cut(replica.path)) for replica in group.replicas),
        notes=tuple(_cut(note, _SENTENCE) for note in group.notes[:MOST_FINDINGS]),
        # The table counts those that it does not show.
        tensors=(*(_cut_diff(diff) for diff in shown), *rest),
        findings=tuple(_cut_findings(group.findings)),
        values=tuple(replace(value, name=_cut(value.name)) for value in group.values),
    )


def _cut_diff(diff: TensorDiff) -> TensorDiff:
    return replace(diff, name=_cut(diff.name), detail=None if diff.detail is None else _cut(diff.detail, _SENTENCE))


def _cut_findings(findings: Iterable[Finding]) -> Iterable[Finding]:
    failing_first = sorted(findings, key=lambda finding: not finding.fails)
    for finding in failing_first[:MOST_FINDINGS]:
        yield replace(finding, evidence=_cut(finding.evidence, _SENTENCE))
