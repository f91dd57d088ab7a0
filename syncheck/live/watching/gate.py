"""The gate of `--on-desync raise`: no rank takes a step before all ranks have told of it.

Tensor-parallel ranks do not begin a forward pass before all of them have told of their batch.

Each rank reads the records of all ranks and compares them itself, so that all ranks raise together or none does. A rank
that does not come within a limited time lets the other ranks go on; the judge then compares later.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from syncheck.live.watching.causes import Causes
from syncheck.live.watching.judge import Judgement
from syncheck.live.watching.records import NO_STEP, RANK, SIGNATURE, OptimizerCounts, compare_steps
from syncheck.live.witnesses.batches import BatchWitness
from syncheck.live.witnesses.copies import let_gradients_lead
from syncheck.live.witnesses.gradients import GradientWitness
from syncheck.live.witnesses.parameters import ParameterWitness
from syncheck.live.witnesses.settings import SettingsWitness, relate
from syncheck.records import OutOfSync, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncheck.live.watching.layouts import Step
    from syncheck.live.watching.watcher import Watcher
    from syncheck.live.witnesses.witness import Suspicion, Witness

# Seconds between two looks at the board.
_LOOK_SECONDS = 0.0005


class Gate:
    """Compares the records of all ranks before a step.

    watcher: with the witnesses of this rank.
    seconds: to wait for other ranks.
    allow: codes that do not stop the run.
    report: called on the first rank with a finding before it stops the run.
    """

    def __init__(
        self,
        watcher: Watcher,
        seconds: float,
        allow: frozenset[str],
        report: Callable[[Judgement], None],
    ) -> None:
        self._watcher, self._seconds, self._allow, self._report = watcher, seconds, allow, report
        # What was allowed before, equal on all ranks.
        self._causes = Causes()
        # The judge compares with witnesses of its own, which remember what they have seen.
        self._witnesses: list[Witness] = []
        for witness_class in (GradientWitness, ParameterWitness, SettingsWitness):
            if witness_class.name in watcher.witnesses:
                self._witnesses.append(witness_class())

        let_gradients_lead({witness.name: witness for witness in self._witnesses})
        self._counts = OptimizerCounts()
        # Equal batches of data-parallel ranks leave the replicas in sync, and stop no run.
        self._input_witness = BatchWitness()

    def pass_step(self, step: Step, record: Mapping[str, Any]) -> None:
        """Wait for the records of a step or a forward pass, and compare them. Raises OutOfSync on all ranks."""
        ranks = self._counts.list_stepping(step.layout)
        # Another rank lacks this optimizer.
        if len(ranks) < len(step.layout.clock.ranks):
            return
        records = self._collect(step.key, len(ranks))
        if not records:
            return
        self._counts.add(step.layout, records, step.number)
        for suspicion in self._compare(step, records, record[RANK]):
            judgement = Judgement(
                step.place,
                step.unit,
                suspicion,
                step.layout,
            )
            finding = self._causes.make_finding(judgement, self._allow)
            self._causes.add(judgement, finding)
            if not finding.allowed:
                clock = step.layout.clock
                if record[RANK] == clock.ranks[0]:
                    self._report(judgement)
                place = f"step {step.place}" if clock.counts_steps else f"{clock.unit} {step.place}"
                text = f"{place}: {finding.code} {finding.slug}: {finding.evidence}. {finding.fix}"
                raise OutOfSync(text, Report("out_of_sync", ()))

    def _collect(self, key: str, count: int) -> dict[int, dict[str, Any]]:
        """Return the records of all ranks; empty if they do not come in time."""
        board: Any = self._watcher.board
        deadline = time.monotonic() + self._seconds
        while True:
            records = {row[RANK]: row for row in board.read(key)}
            if len(records) == count:
                return records
            if time.monotonic() > deadline:
                return {}
            time.sleep(_LOOK_SECONDS)

    def _compare(self, step: Step, records: Mapping[int, Mapping[str, Any]], rank: int) -> list[Suspicion]:
        suspicions = compare_steps(step.number, step.layout.clock.ranks, records)
        # Without a step, there are no observations.
        if any(NO_STEP in record for record in records.values()):
            return suspicions

        signatures = {record[SIGNATURE] for record in records.values()}
        if len(signatures) > 1:
            return suspicions
        witnesses = self._witnesses if step.layout.clock.counts_steps else [self._input_witness]
        for witness in witnesses:

            def exchange_details(witness: Witness = witness) -> dict[int, Any]:
                key = f"{step.key}/{witness.key}"
                details = self._watcher.witnesses[witness.name].tell(step.key)
                board: Any = self._watcher.board
                board.post(key, {RANK: rank, "details": details})
                return {number: row["details"] for number, row in self._collect(key, len(records)).items()}

            # Parameters are not observed at every step.
            observations = {number: row[witness.key] for number, row in sorted(records.items()) if witness.key in row}
            suspicions += witness.compare(step.layout, observations, exchange_details)
        return relate(suspicions, step.layout)
