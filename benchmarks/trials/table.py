"""The tables of the trials: in total, per fault and per rule."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.trials.faults import FAULTS
from benchmarks.trials.trial import SAVED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.trials.trial import Outcome

SAVED_TITLES = {
    "model": "the model",
    "optimizer": "model and optimizer",
    "metadata": "model, optimizer and metadata",
    "steps": "model and optimizer at several steps",
}


def describe_total(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all comparisons, by the saved content."""
    lines = ["| saved | comparisons | right | open | false |", "|---|---|---|---|---|"]
    for saved in SAVED:
        chosen = [outcome for outcome in outcomes if outcome.saved == saved]
        lines.append(_make_row(SAVED_TITLES[saved], chosen))
    lines.append(_make_row("total", outcomes))
    return "\n".join(lines)


def describe_faults(outcomes: Sequence[Outcome]) -> str:
    """Return the table of faults, with the findings that were reported most often."""
    lines = [
        "| fault | named by | comparisons | right | open | false | findings |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        chosen = [outcome for outcome in outcomes if outcome.trajectory.fault is fault]
        codes = ", ".join(sorted(fault.codes)) or "-"
        row = _make_row(f"{fault.name} | {codes}", chosen)
        lines.append(f"{row} {_describe_findings(chosen)} |")
    return "\n".join(lines)


def describe_rules(outcomes: Sequence[Outcome]) -> str:
    """Return the table of rules: how often a stated cause is right, and how often a fault of the rule is named."""
    stated: Counter[str] = Counter()
    right: Counter[str] = Counter()
    possible: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.kind == "equal":
            continue
        for code in set(outcome.stated):
            stated[code] += 1
            right[code] += code in outcome.accepted
        for code in outcome.trajectory.fault.codes:
            if outcome.decidable:
                possible[code] += 1
                named[code] += code in outcome.stated or any(code in codes for codes in outcome.hedged)
    lines = ["| finding | stated | precision | faults | recall |", "|---|---|---|---|---|"]
    for code in sorted(stated.keys() | possible.keys()):
        precision, recall = _format_share(right[code], stated[code]), _format_share(named[code], possible[code])
        lines.append(f"| {code} | {stated[code]} | {precision} | {possible[code]} | {recall} |")
    return "\n".join(lines)


def count_likely(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Return how often each code states a likely cause, and how often another cause is true."""
    counts: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        if outcome.kind == "equal":
            continue
        for code in set(outcome.likely):
            count = counts.setdefault(code, {"stated": 0, "wrong": 0})
            count["stated"] += 1
            count["wrong"] += code not in outcome.accepted
    return dict(sorted(counts.items()))


def describe_certainty(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of likely causes in the part that grants certainty, with the lower bound of their precision."""
    lines = ["| finding | stated as likely | wrong | lower bound |", "|---|---|---|---|"]
    for code, count in counts.items():
        bound = find_lower_bound(count["stated"] - count["wrong"], count["stated"])
        lines.append(f"| {code} | {count['stated']} | {count['wrong']} | {bound:.3f} |")
    return "\n".join(lines)


def find_lower_bound(right: int, total: int, level: float = 0.05) -> float:
    """Return the exact lower 95 % bound of a share (Clopper and Pearson 1934), by bisection."""
    low, high = 0.0, right / total
    for _ in range(50):
        middle = (low + high) / 2
        # The probability of at least so many right cases if the true share is `middle`.
        tail = sum(
            math.comb(total, count) * middle**count * (1 - middle) ** (total - count)
            for count in range(right, total + 1)
        )
        if tail < level:
            low = middle
        else:
            high = middle
    return low


def _make_row(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return a row with the number of comparisons, and the shares of their kinds."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    # Comparisons of equal files say nothing about causes, except for a run without a fault.
    kinds["right"] += sum(outcome.kind == "equal" for outcome in outcomes if not outcome.trajectory.fault.codes)
    count = kinds["right"] + kinds["open"] + kinds["false"]
    shares = " | ".join(_format_share(kinds[kind], count) for kind in ("right", "open", "false"))
    return f"| {title} | {count} | {shares} |"


def _describe_findings(outcomes: Sequence[Outcome], most: int = 4) -> str:
    """Return the most frequent findings, with a question mark if the finding was only consistent with the evidence."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.stated)
        counts.update(f"{codes[0]}?" for codes in outcome.hedged)
    return ", ".join(f"{code} {count}" for code, count in counts.most_common(most))


def _format_share(part: int, total: int) -> str:
    """Return a share in percent; a dash without cases."""
    return f"{100 * part / total:.1f} %" if total else "-"
