"""What a watched run has shown on the rank that judges: the findings as they come, and the summary at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.errors import UsageError
from syncheck.live.watching.allowances import excuse_effects, has_ignored_differences, list_allowed
from syncheck.live.watching.causes import Causes
from syncheck.live.watching.extent import Extent
from syncheck.live.watching.settings import name_file_of_judge
from syncheck.live.witnesses.rules import (
    CHANGED_AT_THE_END,
    DATA_CODES,
    PARAMETERS_DIFFER,
    SETTINGS_DIFFER,
    Seen,
)
from syncheck.report.events import add_witnessed, describe_finding
from syncheck.report.selections import find_failing, list_codes
from syncheck.report.words import Headline
from syncheck.text import names_text, option_usage, ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.live.reporter import Reporter
    from syncheck.live.watching.judge import Judgement
    from syncheck.live.watching.settings import WatchSettings
    from syncheck.records import Finding, Report


# The verdicts of a run with findings that count.
_OUT_OF_SYNC = "OUT OF SYNC"
_AGAIN = "in sync again"
_WITH_FINDINGS = "in sync, with findings"
_EMPTY = Extent()
# The options that leave tensors out of the comparisons.
_FILTERS = ("only", "include", "exclude")


_NO_COPIES = "; no rank was found to hold copies of another rank's tensors"
# The most frequent reason is a model without its wrapper.
_SEPARATE = (
    ", and between most steps the ranks exchanged nothing: each trains a model of its own; to train one model, use "
    "DistributedDataParallel"
)


class Ending(NamedTuple):
    """How the watching of a run ended."""

    judged: Counter[str]
    """Numbers of steps, as the judge counts them."""
    uncompared: tuple[str, ...] = ()
    """The names of parameters of which no rank was found to hold a copy."""
    unjudged: tuple[str, ...] = ()
    """The steps that were not judged, because records of other ranks came too late, or never."""
    telling: tuple[int, ...] = ()
    """The ranks with records of these steps."""
    is_complete: bool = True
    """Whether watching went on to the end of the script; what came after its end is unknown."""
    normally: bool = True
    """Whether the script ended by itself, without an error."""
    is_compared: bool = False
    """Whether all replicas were compared at the end."""
    is_separate: bool = False
    """Whether the script was seen to exchange nothing between most of its first steps."""
    last_comparison: int = 0
    """The step of the last comparison of all replicas; 0 without one."""
    ranks: tuple[int, ...] = ()
    """The ranks that were judged."""
    world_size: int = 0
    """The number of all ranks."""
    sees_steps: bool = True
    """Whether the steps were seen; steps of an optimizer that is not torch's are not."""
    extent: Extent = _EMPTY
    """How many steps were judged."""

    @property
    def has_other_steps(self) -> bool:
        """Whether nothing was judged because only some ranks stepped."""
        conditions = (
            0 < len(self.telling) < len(self.ranks),
            self.is_complete,
            self.normally,
            self.judged["steps"] == 0,
        )
        return all(conditions)

    @property
    def has_passes_only(self) -> bool:
        """Whether only the inputs of forward passes were judged here: another rank judges the steps of the model."""
        return self.judged["steps"] == 0 < self.judged["passes"]


class Summary:
    """The findings of one rank.

    reports: of the comparisons of all replicas so far.
    """

    def __init__(self, reporter: Reporter, settings: WatchSettings) -> None:
        self._reporter, self._settings = reporter, settings
        self._allow = frozenset(settings.allow)
        self.reports: list[Report] = []
        self.monitor_checks = 0
        """The number of comparisons by a monitor of the script."""
        self.causes = Causes()
        """What the findings explain."""
        self.findings: dict[tuple[str, tuple[int, ...], str], Finding] = {}
        """By code, ranks and kind of setting."""
        # Where the witnesses found them first and last, by code and ranks.
        self._places: dict[tuple[str, tuple[int, ...]], str] = {}
        self._last_places: dict[tuple[str, tuple[int, ...]], str] = {}
        self.compared: Mapping[str, float] = {}
        """By clock, the number of the first step after the last comparison of all replicas."""
        # By clock, the number of the last step with a finding of a witness about the model that counts.
        self._last_faults: dict[str, int] = {}
        # Whether a witness saw different parameters.
        self._has_differed = False
        # At how many steps, by code and ranks.
        self._counts: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def add(self, judgement: Judgement) -> Finding | None:
        """Write a finding as an event, and print it unless the same ranks had it before; return a new one."""
        finding = self.causes.make_finding(judgement, self._allow)
        place = Seen.PLACE(unit=judgement.unit, number=judgement.number)
        # The line on the console begins with the place.
        placed = replace(finding, facts=(place, *finding.facts))
        effect_of = self._find_cause(judgement)
        self._reporter.write_event(
            "witness",
            step=judgement.number,
            effect_of=effect_of,
            **describe_finding(placed, {}),
        )
        self.causes.add(judgement, placed)
        if finding.fails:
            self._note_fault(judgement)
        if effect_of:
            return None
        key = finding.code, finding.ranks
        is_other_place = self._last_places.get(key) != str(place)
        self._counts[key] += is_other_place
        self._last_places[key] = str(place)
        # Each kind of setting has a cause of its own. Other findings may only look different at later steps.
        kind = judgement.suspicion.variant if finding.code == SETTINGS_DIFFER else ""
        if (*key, kind) in self.findings:
            return None
        self.findings[*key, kind] = placed
        self._places.setdefault(key, f", first {place}")
        self._reporter.print_finding(finding, f"{judgement.unit} {judgement.number}")
        return finding

    def _note_fault(self, judgement: Judgement) -> None:
        """Remember the last step with a finding that counts, unless it leaves the replicas in sync."""
        code = judgement.suspicion.code
        self._has_differed |= code == PARAMETERS_DIFFER
        if code not in DATA_CODES:
            clock = "" if judgement.layout is None else judgement.layout.clock.name
            self._last_faults[clock] = max(judgement.number, self._last_faults.get(clock, 0))

    def _find_cause(self, judgement: Judgement) -> str:
        """Return the code of an earlier finding that explains parameters that differ; empty without one."""
        suspicion = judgement.suspicion
        if suspicion.code != PARAMETERS_DIFFER:
            return ""
        compared = chain.from_iterable(report.findings for report in self.reports)
        for finding in find_failing(compared):
            # Their tensors have the same names, unless several models are compared.
            has_names = set(finding.tensors).issuperset(suspicion.names)
            if has_names and suspicion.agrees_beside(finding.ranks):
                return finding.code
        return self.causes.find(judgement)

    @property
    def has_failed(self) -> bool:
        """Whether a witness or a comparison has a finding that counts."""
        if any(report.verdict == "out_of_sync" for report in self.reports):
            return True
        return bool(find_failing(self._list_witnessed()))

    def _list_witnessed(self) -> list[Finding]:
        """Return the findings of the witnesses, with effects of allowed causes as allowed ones."""
        return excuse_effects(self.findings.values(), self._list_compared())

    def _list_allowed_codes(self) -> tuple[str, ...]:
        """Return the codes of what the user allows, in the run or in the last comparison."""
        allowed = list_allowed(chain(self._list_witnessed(), self._list_compared()))
        return tuple(sorted(self._allow.intersection(list_codes(allowed))))

    def _list_compared(self) -> tuple[Finding, ...]:
        """Return the findings of the last comparison of all replicas."""
        return tuple(self.reports[-1].findings) if self.reports else ()

    def _has_last(self, verdict: str) -> bool:
        """Whether the last comparison of all replicas has a verdict."""
        return bool(self.reports) and self.reports[-1].verdict == verdict

    def _has_equal_end(self, ending: Ending) -> bool:
        """Whether all trained parameters, as far as the options select them, were compared equal at the end."""
        conditions = (
            ending.is_compared,
            self._has_last("in_sync"),
            not self._settings.only,
        )
        if not all(conditions):
            return bool(ending.judged["ends"])
        return not has_ignored_differences(self.reports[-1])

    def _describe_sync(self, ending: Ending, watched: str) -> tuple[str, str]:
        """Return the text and the style of the last line without a finding that counts."""
        judged = ending.judged
        is_changed = CHANGED_AT_THE_END in {code for code, _, _ in self.findings}
        names = names_text(ending.uncompared)
        unjudged = names_text(ending.unjudged)
        allowed = self._list_allowed_codes()
        is_undecided = self._has_last("undecided")
        is_compared_at_end = ending.is_compared and not is_undecided
        # With `--every 0`, the user has asked for witnesses only.
        is_compared = any((is_compared_at_end, self._has_last("in_sync"), not self._settings.every))
        moment = "so far" if judged["ends"] else "when last compared"
        # A rank may have skipped a step that is not seen.
        last_moment = "up to the last step" if ending.sees_steps else "when last compared"
        # Conditions that limit the verdict, each with the verdict and its end; the first one counts.
        limits = (
            (
                ending.has_other_steps,
                "could not tell",
                f"; only {ranks_text(ending.telling)} stepped with an optimizer",
            ),
            (not (ending.is_complete and judged["steps"]), "could not tell", ", not the whole run"),
            # Shards of FSDP, or ranks that train apart between two averages.
            (
                not (judged["comparisons"] or "in_sync" in map(attrgetter("verdict"), self.reports)),
                "could not tell",
                _NO_COPIES + _SEPARATE * ending.is_separate,
            ),
            (not ending.normally, f"in sync {moment}", "; the run was ended"),
            # A fault in these steps would be unknown.
            (
                bool(ending.unjudged),
                f"could not tell for {unjudged}, whose records did not come in time; the rest is in sync",
                "",
            ),
            (is_changed, f"in sync {last_moment}", f"; then {CHANGED_AT_THE_END}, see above"),
            (
                bool(ending.uncompared),
                f"could not tell for {names}, which no two ranks hold copies of; the rest is in sync",
                "",
            ),
            (not (judged["ends"] or is_compared_at_end), "in sync when last compared", ""),
            (not is_compared, "trained parameters in sync", "; could not tell for buffers and optimizer states"),
            (
                bool(self._settings.every) and not is_compared_at_end,
                "trained parameters in sync",
                f"; buffers and optimizer states last compared at step {ending.last_comparison}",
            ),
            (any((self._is_not_finite(), allowed)), "in sync", ""),
        )
        for is_limited, verdict, end in limits:
            if is_limited:
                line = f"{Headline.ALLOWED(line=verdict, allowed=allowed)}" if allowed else verdict
                return f"{self._qualify(line)}: {watched}{end}", "yellow"
        return f"in sync: {watched}", "green"

    def _is_not_finite(self) -> bool:
        """Whether the replicas held NaN or infinity when they were last compared."""
        for report in self.reports[-1:]:
            (group,) = report.groups
            return group.not_finite is not None
        return False

    def _qualify(self, verdict: str) -> str:
        """Return a verdict; equal replicas that are not finite are of no use."""
        return f"{Headline.NOT_FINITE(line=verdict)}" if self._is_not_finite() else verdict

    def _list_filters(self) -> tuple[str, ...]:
        """Return the given options that leave tensors out of the comparisons, as the user types them."""
        are_given = (self._settings.only, self._settings.include, self._settings.exclude)
        return tuple(map(option_usage, compress(_FILTERS, are_given)))

    def _describe_extent(self, ending: Ending) -> str:
        """Return how many steps, or forward passes, and comparisons the verdict is of."""
        judged = ending.judged
        checks = max(len(self.reports), self.monitor_checks)
        if ending.has_passes_only:
            return f"{Seen.WATCHED_PASSES(passes=judged['passes'], checks=checks)}"
        return f"{ending.extent.describe(checks)}"

    def print_end(self, ending: Ending) -> None:
        """Print the last line."""
        judged = ending.judged
        # Each set of replicas has a line of its own.
        prefix = ""
        if 0 < len(ending.ranks) < ending.world_size:
            prefix = f"{ranks_text(ending.ranks)}: "
        watched = self._describe_extent(ending)
        # With a finding, and after an error, the verdict has no room for them.
        if ending.unjudged and (self.has_failed or not ending.normally):
            watched += f", not judged: {names_text(ending.unjudged)}"
        if self.has_failed:
            self._print_findings(prefix, watched)
            return
        # Other ranks judge the steps, and print the verdict.
        if ending.has_passes_only:
            return
        if self._has_equal_end(ending):
            watched += f", {Seen.EQUAL_AT_END()}"
        elif judged["compared"]:
            watched += f", {Seen.EQUAL_BEFORE(step=judged['compared'])}"
        elif ending.last_comparison:
            watched += f", {Seen.COMPARED_AT(step=ending.last_comparison)}"
        options = self._list_filters()
        if options:
            watched += f", {Seen.SELECTED(options=options)}"
        text, style = self._describe_sync(ending, watched)
        self._reporter.print_text(f"{prefix}{text}", style)

    def _print_findings(self, prefix: str, watched: str) -> None:
        """Print the last line of a run with findings that count."""
        failing = find_failing(self._list_witnessed())
        verdict = self._choose_verdict()
        # What was found before the replicas were in sync is named, too.
        named = self.reports[-1:] if verdict == _OUT_OF_SYNC else self.reports
        failing += find_failing(chain.from_iterable(report.findings for report in named))
        texts: dict[str, None] = {}
        for finding in failing:
            repeated = self._describe_repetition(finding)
            texts[f"{finding.code} {finding.slug} on {ranks_text(finding.ranks)}{repeated}"] = None
        text = f"{prefix}{self._qualify(verdict)}: {watched}: {'; '.join(texts)}"
        self._reporter.print_text(text, "bold red")

    def _choose_verdict(self) -> str:
        """Return the verdict of a run with findings that count."""
        verdicts = [report.verdict for report in self.reports]
        has_differed = self._has_differed or "out_of_sync" in verdicts
        if not (self._last_faults or has_differed):
            return _WITH_FINDINGS
        if not self._covers_faults():
            return _OUT_OF_SYNC
        if verdicts[-1] == "out_of_sync":
            # Different settings without any effect on the replicas are no difference of the replicas.
            return _WITH_FINDINGS if self._has_settings_only(self.reports[-1]) else _OUT_OF_SYNC
        if verdicts[-1] != "in_sync":
            return _OUT_OF_SYNC
        if has_ignored_differences(self.reports[-1]):
            return _OUT_OF_SYNC
        # NaN that spreads to all ranks makes them equal, and repairs nothing.
        if self._is_not_finite():
            return _WITH_FINDINGS
        return _AGAIN if has_differed else _WITH_FINDINGS

    def _covers_faults(self) -> bool:
        """Whether the last comparison of all replicas came after all steps with findings of witnesses."""
        covers_all = True
        for clock, number in self._last_faults.items():
            covers_all &= number < self.compared.get(clock, 0)
        return covers_all

    def _has_settings_only(self, report: Report) -> bool:
        """Whether a comparison found different settings and equal tensors, after steps with these settings.

        For example, ZeroRedundancyOptimizer sends each parameter from the only rank that steps with it. Settings that
        no witness saw at a step may have had no effect yet.
        """
        witnessed_ranks = {ranks for code, ranks, _ in self.findings if code == SETTINGS_DIFFER}
        has_settings_only = True
        for finding in find_failing(report.findings):
            has_settings_only &= finding.code == SETTINGS_DIFFER
            has_settings_only &= finding.ranks in witnessed_ranks
        for diff in report.tensors:
            has_settings_only &= not diff.out_of_sync
        return has_settings_only

    def _describe_repetition(self, finding: Finding) -> str:
        """Return where a finding was first, at how many steps, and in how many comparisons of all replicas."""
        key = finding.code, finding.ranks
        compared = Counter(
            (similar.code, similar.ranks) for similar in chain.from_iterable(report.findings for report in self.reports)
        )
        text = self._places.get(key, "")
        if self._counts[key] > 1:
            text += f", {Seen.AT_STEPS(count=self._counts[key])}"
        if compared[key] > 1 or not text:
            text += f", {Seen.IN_COMPARISONS(count=compared[key])}"
        return text

    def write_outputs(self, rank: int) -> None:
        """Write the files of `--output`: the last comparison, with the findings of the witnesses.

        rank: of this judge.
        """
        events = self._settings.events
        # The comparisons of another judge than the first rank have a file of their own.
        for path in dict.fromkeys([events, name_file_of_judge(events, rank)] if events else []):
            self._confirm(path)
        if not self.reports:
            if self._settings.outputs:
                paths = names_text(self._settings.outputs)
                self._reporter.print_text(f"{paths}: not written, because no replicas were compared", "yellow")
            return
        from syncheck.report.formats import write_file  # most runs only print

        report = self.reports[-1]
        (check,) = report.groups
        merged = replace(report, groups=(add_witnessed(check, self._list_witnessed()),))
        if self.has_failed:
            merged = replace(merged, verdict="out_of_sync")
        for path in [name_file_of_judge(output, rank) for output in self._settings.outputs]:
            try:
                write_file(path, merged)
                self._confirm(path)
            except UsageError as error:
                # The exit code stays that of the script.
                self._reporter.print_text(f"error: {error}", "bold red")

    def _confirm(self, path: str) -> None:
        """Print a line about a written file. Without an event, there is no file of events."""
        from syncheck.report.formats import describe_file  # most runs only print

        text = describe_file(path)
        if text:
            self._reporter.print_text(text)
