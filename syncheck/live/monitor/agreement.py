"""What keeps the ranks of a monitor together: they check at one step, and none goes on where another has raised."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from syncheck.errors import RankFailed, SyncheckError, UsageError, brief
from syncheck.records import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncheck.live.channel import Channel
    from syncheck.records import Report


def agree(channel: Channel, mine: tuple[int, int, str]) -> None:
    """Raise on all ranks unless all are at the same step of equal monitors."""
    found = channel.gather(mine, "monitor")
    for place, name in ((1, "every"), (2, "on_desync")):
        if len({sent[place] for sent in found.values()}) > 1:
            raise UsageError(f"{name}= is not the same on all ranks: {_by_value(found, place)}")
    if len({sent[0] for sent in found.values()}) > 1:
        raise RankFailed(
            f"the monitors are at different steps: {_by_value(found, 0)}; call step() on every rank once after each "
            "optimizer step, with the same step= if any"
        )


def _by_value(found: Mapping[int, tuple[Any, ...]], place: int) -> str:
    ranks: dict[Any, list[int]] = {}
    for rank, sent in sorted(found.items()):
        ranks.setdefault(sent[place], []).append(rank)
    return ", ".join(f"{value} on {ranks_text(of)}" for value, of in list(ranks.items())[:8])


def call_together(channel: Channel, action: Callable[[Report], object], report: Report) -> None:
    """Call a function on every rank. Where it raises on some ranks only, the others raise RankFailed."""
    try:
        action(report)
    except (Exception, SystemExit) as error:
        with suppress(SyncheckError):  # where others are gone, this rank's own error is what matters
            channel.gather(f"{type(error).__name__}: {brief(str(error), 200)}", "on_desync")
        raise
    sent = channel.gather("", "on_desync")
    failed = {rank: (text,) for rank, text in sent.items() if text}
    if failed:
        raise RankFailed(f"on_desync raised {_by_value(failed, 0)}")
