"""What the witnesses proved explains the differences that are found later, on the same ranks and tensors.

A witness sees a fault at the step of the fault: a rank skips the step, or has different gradients or settings. After
the step, parameters differ, and a later witness and the comparison of all replicas find the difference. A cause derived
from the difference alone is often a weaker cause.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field, replace
from itertools import chain, filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.watching.allowances import has_ignored_differences, list_allowed
from syncheck.live.watching.board import PAUSE
from syncheck.live.watching.claims import find_unseen, limit_claims
from syncheck.live.witnesses.rules import PARAMETERS_DIFFER, make_finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncheck.live.channel import Channel
    from syncheck.live.watching.judge import Judgement
    from syncheck.live.watching.layouts import Layout
    from syncheck.live.watching.watcher import Watcher
    from syncheck.records import Finding, Report

# The findings of witnesses after which parameters differ.
_CAUSES = frozenset({"SYN107", "SYN212", "SYN214", "SYN216", "SYN410"})
# The causes that the witness of gradients sees at their step, if they are there.
_SEEN = frozenset({"SYN211", "SYN213", "SYN214", "SYN216"})
# The findings of witnesses after which optimizers count different numbers of steps.
_UNEQUAL_STEPS = frozenset({"SYN214", "SYN216", "SYN410"})
# Seconds that a comparison out of sync waits for the judge, which is a few steps behind.
_JUDGE_SECONDS = 3.0


@dataclass
class _Cause:
    """A fault that a witness proved.

    finding: with the place where it was first.
    parameters: the parameters that differ because of the fault, by identity: a later wrapper may contain them, too.
    clock: of its last step.
    number: of its last step.
    """

    finding: Finding
    parameters: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    clock: str = ""
    number: int = 0


class Causes:
    """The faults that the witnesses proved on the rank that judges.

    is_judging: whether the judge still has steps before the current one; False without a judge.
    """

    def __init__(self) -> None:
        self.is_judging: Callable[[bool], bool] = lambda _after_step: False
        self._causes: dict[tuple[str, tuple[int, ...]], _Cause] = {}
        # The parameters that differed without a known cause, with the number of the step, by identity.
        self._unexplained: dict[int, int] = {}
        # The number of the first step after the last comparison in sync, by clock.
        self._in_sync: dict[str, int] = {}
        self._is_late = False

    def add(self, judgement: Judgement, finding: Finding) -> None:
        """Remember a fault that makes parameters differ, or parameters that differ without a known fault."""
        layout, suspicion = judgement.layout, judgement.suspicion
        if layout is None:
            return
        if finding.code == PARAMETERS_DIFFER and not self.find(judgement):
            for parameter in _list_parameters(layout, suspicion.names):
                self._unexplained.setdefault(id(parameter), judgement.number)
        if finding.code not in _CAUSES:
            return
        cause = self._causes.setdefault((finding.code, finding.ranks), _Cause(finding))
        cause.clock = layout.clock.name
        cause.number = judgement.number
        affected = suspicion.names or layout.names if suspicion.affected is None else suspicion.affected
        for parameter in _list_parameters(layout, affected):
            # Parameters that differed before have another cause.
            if not self._is_current(layout.clock.name, self._unexplained.get(id(parameter), -1)):
                cause.parameters[id(parameter)] = weakref.ref(parameter)

    def _is_current(self, clock: str, number: int) -> bool:
        """Whether a step comes after the last comparison in sync. number: negative for no step."""
        return number >= self._in_sync.get(clock, 0)

    def _list_current(self) -> list[_Cause]:
        """Return the faults since the last comparison in sync, in the order in which they began."""
        # Another thread may add a fault.
        causes = list(self._causes.values())
        return [cause for cause in causes if self._is_current(cause.clock, cause.number)]

    def find(self, judgement: Judgement) -> str:
        """Return the code of the first fault that explains parameters that differ; empty without an explanation."""
        explaining = self._list_explaining(judgement)
        return explaining[0].code if explaining else ""

    def make_finding(self, judgement: Judgement, allow: frozenset[str]) -> Finding:
        """Return the finding of a witness. Different parameters are allowed if allowed faults explain all of them."""
        suspicion = judgement.suspicion
        finding = make_finding(
            suspicion.code,
            suspicion.ranks,
            suspicion.facts,
            names=suspicion.names,
            variant=suspicion.variant,
            allow=allow,
        )
        if finding.code != PARAMETERS_DIFFER:
            return finding
        explaining = self._list_explaining(judgement)
        is_effect = 0 < len(list_allowed(explaining)) == len(explaining)
        return replace(finding, allowed=any((finding.allowed, is_effect)))

    def _list_explaining(self, judgement: Judgement) -> list[Finding]:
        """Return the faults that explain parameters that differ; none if they do not explain all of them."""
        explaining: list[Finding] = []
        for parameter in _list_parameters(judgement.layout, judgement.suspicion.names):
            findings = self._list_of_parameter(parameter)
            suspects = chain.from_iterable(map(attrgetter("ranks"), findings))
            if not judgement.suspicion.agrees_beside(suspects):
                return []
            explaining += findings
        return explaining

    def _list_of_parameter(self, parameter: Any) -> list[Finding]:
        """Return the faults that make a parameter differ."""
        return [cause.finding for cause in self._list_current() if id(parameter) in cause.parameters]

    def note_in_sync(self, watcher: Watcher, ranks: Iterable[int], *, after_step: bool) -> None:
        """Note that a comparison found some ranks in sync: earlier faults explain no later difference.

        after_step: whether the step after the last reduction was compared, too.
        """
        for clock in watcher.clocks:
            if set(clock.ranks) <= set(ranks):
                self._in_sync[clock.name] = clock.ticks + after_step

    def was_in_sync(self, watcher: Watcher, ranks: Iterable[int]) -> bool:
        """Whether a comparison found some ranks in sync before, which reduce gradients together."""
        names = {clock.name for clock in watcher.clocks if clock.reduces and set(clock.ranks) <= set(ranks)}
        return bool(names) and names <= self._in_sync.keys()

    def list_findings(self, objects: Sequence[Any], *, after_step: bool) -> list[Finding]:
        """Return the faults so far, with the parameters that they explain as a comparison names them.

        Waits for the judge, which may be a few steps behind.

        objects: that are compared.
        """
        self._wait(after_step)
        # An allowed finding would hide the differences: the comparison attributes what its own rules explain.
        causes = list(filterfalse(attrgetter("finding.allowed"), self._list_current()))
        names = _name_parameters(objects) if causes else {}
        findings = []
        for cause in causes:
            explained: dict[str, None] = {}
            for reference in cause.parameters.values():
                # A parameter that has ended is in no comparison.
                name = names.get(_locate(reference()), "")
                explained[name] = None
            explained.pop("", None)
            finding = replace(
                cause.finding,
                tensors=tuple(explained),
            )
            findings.append(finding)
        return findings

    @property
    def is_complete(self) -> bool:
        """Whether the judge has judged all steps before each comparison; True without a judge."""
        return not self._is_late

    def _wait(self, after_step: bool) -> None:
        deadline = time.monotonic() + _JUDGE_SECONDS
        while not self._is_late and self.is_judging(after_step):
            # Records that never come must not delay every comparison.
            self._is_late = time.monotonic() > deadline
            time.sleep(PAUSE)


def _list_parameters(layout: Layout | None, names: Sequence[str]) -> list[Any]:
    """Return the parameters with some names; none without a layout."""
    if layout is None:
        return []
    parameters = dict(zip(layout.names, layout.parameters, strict=True))
    return list(map(parameters.__getitem__, names))


def _locate(parameter: Any) -> int:
    """Return the address of the elements of a parameter; of a DTensor, of its shard; of None, -1."""
    if parameter is None:
        return -1
    tensor = getattr(
        parameter,
        "_local_tensor",
        parameter,
    )
    return int(tensor.data_ptr())


def _name_parameters(objects: Sequence[Any]) -> dict[int, str]:
    """Return the names of tensors in a comparison of objects, by address."""
    from syncheck.live.memory import snapshot
    from syncheck.live.memory.tensor_bytes import TensorBytes
    from syncheck.tensors.names import normalize

    tensors = snapshot(*objects).tensors
    names: dict[int, str] = {}
    for name, normalized in normalize(tensors).items():
        content = tensors[name].data
        # A tensor without elements has no address, and no difference.
        if tensors[name].numel and isinstance(content, TensorBytes):
            names.setdefault(_locate(content.source), normalized)
    return names


def _name_all(parameters: Sequence[Any], objects: Sequence[Any]) -> set[str]:
    """Return the names of parameters in a comparison of objects."""
    names = _name_parameters(objects) if parameters else {}
    return {names.get(_locate(parameter), "") for parameter in parameters}


class _Told(NamedTuple):
    """What the ranks have seen before a comparison out of sync: one value of each field from each rank."""

    findings: tuple[list[Finding], ...]
    """The faults that its judge found."""
    numbers_all_steps: tuple[bool, ...]
    further_steps: tuple[int, ...]
    """The numbers of steps beside one for each last reduction."""
    are_unseen: tuple[bool, ...]
    """Whether the steps of a parameter that differs were not seen."""
    has_own_step: tuple[bool, ...]
    """Whether the class of an optimizer is not torch's."""
    were_equal: tuple[bool, ...]
    """Whether parameters are known to have been equal before."""


class Comparing:
    """Connects the comparisons of a monitor with the witnesses of this rank.

    after_step: whether comparisons come after the step of the last reduction; otherwise before it.
    """

    def __init__(self, watcher: Watcher, causes: Causes) -> None:
        self._watcher, self._causes = watcher, causes
        self.after_step = False

    def explain(self, report: Report, channel: Channel, objects: Iterable[Any], allow: frozenset[str]) -> Report:
        """Return a report whose differences have the causes that the witnesses proved before. On all ranks together."""
        if report.verdict == "in_sync" and not has_ignored_differences(report):
            self._causes.note_in_sync(
                self._watcher,
                channel.ranks,
                after_step=self.after_step,
            )
        if report.verdict != "out_of_sync":
            return report
        from syncheck.diagnose.rules import diagnose  # only needed if the ranks differ
        from syncheck.diagnose.verdicts import overall, with_findings

        if self.after_step:
            self._watcher.tell_last_skipped()
        parts = [part for part in objects if part is not None]
        (group,) = report.groups
        told_by_rank = channel.gather(self._tell(group, channel.ranks, parts), "causes")
        told = _Told(*zip(*told_by_rank.values(), strict=True))
        witnessed = tuple(chain.from_iterable(told.findings))
        impossible, excluded = self._find_impossible(told, {finding.code for finding in witnessed}, allow)
        diagnosed = group.findings
        # The rest without an explanation has less possible causes, too.
        if witnessed or impossible:
            diagnosed = diagnose(group, (), allow, witnessed, impossible)
        findings = []
        for finding in diagnosed:
            possible = set(finding.alternatives).difference(excluded)
            alternatives = sorted(possible, key=finding.alternatives.index)
            findings.append(replace(finding, alternatives=tuple(alternatives)))
        limited = limit_claims(findings, are_unseen=any(told.are_unseen), has_own_step=any(told.has_own_step))
        explained = with_findings(group, limited)
        return replace(
            report,
            groups=(explained,),
            verdict=overall((explained,), ()),
        )

    def _tell(self, group: Any, ranks: tuple[int, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
        """Return what this rank has seen before a comparison out of sync: the fields of `_Told`."""
        # Each set of replicas is judged by its first rank.
        findings = self._causes.list_findings(parts, after_step=self.after_step)
        unseen = find_unseen(self._watcher, ranks)
        unseen_names = _name_all(unseen.parameters, parts)
        differing = chain.from_iterable(map(attrgetter("tensors"), group.findings))
        return (
            findings,
            self._numbers_all_steps(ranks),
            self._count_further(ranks),
            not unseen_names.isdisjoint(differing),
            unseen.has_own_step,
            self._were_equal(ranks),
        )

    def _find_impossible(
        self, told: _Told, codes: set[str], allow: frozenset[str]
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Return the causes that a diagnosis cannot have, and those that it must not name as possible.

        codes: of the findings of the witnesses.
        """
        are_all_seen = not any(told.are_unseen)
        has_seen_gradients = (
            "gradients" in self._watcher.witnesses,
            any(told.were_equal),
            are_all_seen,
        )
        excluded = _SEEN.difference(codes) if all(has_seen_gradients) else frozenset()
        numbers_all_steps = (
            all(told.numbers_all_steps),
            # The judge learns of further steps with the next step.
            len(set(told.further_steps)) == 1,
            are_all_seen,
            # An allowed finding is not remembered.
            _UNEQUAL_STEPS.isdisjoint(codes | allow),
        )
        impossible = frozenset({"SYN214"} if all(numbers_all_steps) else ())
        excluded |= impossible
        saw_no_fault = (
            impossible,
            "settings" in self._watcher.witnesses,
            _CAUSES.isdisjoint(codes | allow),
        )
        return excluded if all(saw_no_fault) else impossible, excluded

    def _numbers_all_steps(self, ranks: Iterable[int]) -> bool:
        """Whether the judge has seen each step of the optimizers of some ranks, as far as this rank knows."""
        conditions = []
        for clock in self._watcher.clocks:
            # Forward passes are no steps.
            if clock.counts_steps and not set(clock.ranks).isdisjoint(ranks):
                # Without a wrapper, a rank that skips a step only falls behind.
                conditions += [clock.reduces, clock.numbers_all_steps()]
        has_seen_all = (
            self._watcher.is_on,
            self._causes.is_complete,
            conditions,
        )
        return all((*has_seen_all, *conditions))

    def _count_further(self, ranks: tuple[int, ...]) -> int:
        """Return how many steps the optimizers of some ranks took beside one for each last reduction."""
        return sum(layout.repeated for layout in self._list_layouts(ranks))

    def _list_layouts(self, ranks: tuple[int, ...]) -> list[Layout]:
        """Return what the optimizers of some ranks train."""
        layouts: list[Layout] = []
        for optimizer in self._watcher.list_optimizers(ranks):
            layouts += self._watcher.list_layouts_of(optimizer)
        return layouts

    def _were_equal(self, ranks: tuple[int, ...]) -> bool:
        """Whether this rank knows of equal parameters of some ranks: in a comparison, or before the first step."""
        parameters: Any = self._watcher.witnesses.get("parameters")
        began_equal = parameters is not None and parameters.began_equal(self._list_layouts(ranks))
        return began_equal or self._causes.was_in_sync(self._watcher, ranks)
