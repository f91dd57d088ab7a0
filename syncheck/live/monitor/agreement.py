"""What keeps the ranks of a monitor together: they check at one step, and none goes on where another has raised."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from syncheck.errors import RankFailed, SyncheckError, UsageError, brief
from syncheck.live.channel import MOST_TOLD, by_answer
from syncheck.records import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncheck.live.channel import Channel
    from syncheck.records import Report


def agree(channel: Channel, mine: tuple[int, int, str]) -> None:
    """Raise on all ranks unless all are at the same step of equal monitors. mine: step, every= and on_desync=."""
    found = channel.gather(mine, "monitor")
    steps, intervals, actions = ({rank: sent[i] for rank, sent in found.items()} for i in range(3))
    for name, answers in (("every", intervals), ("on_desync", actions)):
        if len(set(answers.values())) > 1:
            raise UsageError(f"{name}= is not the same on all ranks: {_told(answers)}")
    if len(set(steps.values())) > 1:
        raise RankFailed(
            f"the monitors are at different steps: {_told(steps)}; call step() on every rank once after each "
            "optimizer step, with the same step= if any"
        )


def _told(answers: Mapping[int, object]) -> str:
    """Write what ranks answered: '5 on rank 0, 10 on ranks 1, 2'."""
    ranks = by_answer(dict(sorted(answers.items())))
    return ", ".join(f"{answer} on {ranks_text(of)}" for answer, of in list(ranks.items())[:MOST_TOLD])


def call_together(channel: Channel, action: Callable[[Report], object], report: Report) -> None:
    """Call a function on every rank. Where it raises on some ranks only, the others raise RankFailed."""
    try:
        action(report)
    except (Exception, SystemExit) as error:
        with suppress(SyncheckError):  # where others are gone, this rank's own error is what matters
            channel.gather(f"{type(error).__name__}: {brief(str(error), 200)}", "on_desync")
        raise
    sent = channel.gather("", "on_desync")
    failed = {rank: text for rank, text in sent.items() if text}
    if failed:
        raise RankFailed(f"on_desync raised {_told(failed)}")
