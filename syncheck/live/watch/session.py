"""The watching of one process: the watcher, its threads, and what they print."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from syncheck.live.reporter import Reporter
from syncheck.live.watch.board import PAUSE
from syncheck.live.watch.judge import Judge, Judgement, Responder
from syncheck.live.watch.watcher import Watcher
from syncheck.text import ranks_text

if TYPE_CHECKING:
    from syncheck.live.watch.board import Board

# Seconds at the end of the script for the judge to judge the last steps, and for the other ranks to answer it.
_END_SECONDS = 2.0
_DONE = "done"
_LEFT = "left"


class Session:
    """Watches this process from `start` to `finish`.

    events: path of a JSONL file, written by the ranks that judge; None for none.
    """

    def __init__(self, events: str | None = None) -> None:
        self._reporter = Reporter(events=events)
        self.watcher = Watcher(self._print_on_first_rank, self._begin_judging)
        self._board: Board | None = None
        self._judge: Judge | None = None
        self._responder: Responder | None = None
        self.judgements: list[Judgement] = []
        """What this rank's judge found; empty on the other ranks."""

    def start(self) -> None:
        """Install the hooks. Imports torch."""
        self.watcher.install()

    def finish(self, *, normally: bool) -> None:
        """Judge the last steps, and end all threads. normally: the script ended without an error."""
        self.watcher.is_on = False
        if self._board is None or self._responder is None:
            return
        if self._judge is not None:
            # After an error, other ranks may have ended too.
            self._judge.finish(_END_SECONDS if normally else 0.0)
            self._print_summary(self._judge)
        try:
            self._leave(self._board, self._responder, wait=normally)
        except RuntimeError:
            # The process that served the store has ended.
            self._responder.stop()

    def _leave(self, board: Board, responder: Responder, *, wait: bool) -> None:
        """End together with the other ranks, if they end in time: judges may ask, and rank 0 may serve the store."""
        judges: set[int] = set()
        members: set[int] = set()
        for clock in self.watcher.clocks:
            judges.add(clock.ranks[0])
            members.update(clock.ranks)
        if self._judge is not None:
            board.post(f"{_DONE}/{responder.rank}", {})
        deadline = time.monotonic() + (2 * _END_SECONDS if wait else 0.0)
        _wait_for_keys(board, [f"{_DONE}/{rank}" for rank in judges], deadline)
        responder.stop()
        board.post(f"{_LEFT}/{responder.rank}", {})
        if responder.rank in judges:
            _wait_for_keys(board, [f"{_LEFT}/{rank}" for rank in members], deadline)

    def _begin_judging(self, watcher: Watcher, board: Board) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        rank = distributed.get_rank()
        self._board = board.clone()
        self._responder = Responder(watcher, board.clone(), rank)
        self._responder.start()
        if any(clock.ranks[0] == rank for clock in watcher.clocks):
            self._judge = Judge(watcher, board.clone(), self._report)
            self._judge.start()

    def _report(self, judgement: Judgement) -> None:
        self.judgements.append(judgement)
        text = describe_judgement(judgement)
        self._reporter.print_text(text, "bold red")
        names: list[str] = []
        if judgement.disagreement is not None:
            names = [judgement.step.layout.names[index] for index in judgement.disagreement.tensors]
        self._reporter.write_event(
            "witness",
            step=judgement.reduction,
            code=judgement.code,
            ranks=list(judgement.ranks),
            tensors=len(names),
            names=names[:10],
        )

    def _print_summary(self, judge: Judge) -> None:
        steps = judge.judged.total()
        if not self.judgements:
            self._reporter.print_text(f"in sync: {steps} steps watched", "green")
        else:
            self._reporter.print_text(f"OUT OF SYNC at {judge.judged['out of sync']} of {steps} steps", "bold red")

    def _print_on_first_rank(self, text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            self._reporter.print_text(text, "yellow")


def _wait_for_keys(board: Board, keys: list[str], deadline: float) -> None:
    """Wait until all keys are on the board, until a time of time.monotonic()."""
    missing = list(keys)
    while missing and time.monotonic() < deadline:
        missing = [key for key in missing if not board.read(key)]
        time.sleep(PAUSE)


def describe_judgement(judgement: Judgement) -> str:
    """Return one line: what differs, on which ranks and since which reduction."""
    who = ranks_text(judgement.ranks)
    if judgement.code == "SYN214":
        return f"reduction {judgement.reduction}: SYN214 step-skipped on {who}: no optimizer step followed it"
    disagreement = judgement.disagreement
    text = f"reduction {judgement.reduction}: SYN410 gradients-differ on {who}, after the reduction"
    if disagreement is None:
        return text
    names = [judgement.step.layout.names[index] for index in disagreement.tensors[:3]]
    text += f": {len(disagreement.tensors)} of {len(judgement.step.layout.names)} tensors ({', '.join(names)})"
    if disagreement.ratio is not None:
        text += f"; scaled by {disagreement.ratio:.4g}"
    return text
