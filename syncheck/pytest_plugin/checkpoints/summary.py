"""The section `syncheck` at the end of a run: one line per group, options in effect, files written.

The data are properties of test reports, which pytest-xdist sends from its workers.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from syncheck.options import PYTHON, list_options
from syncheck.pytest_plugin.checkpoints.plan import relative_id
from syncheck.pytest_plugin.options import format_value
from syncheck.report import words
from syncheck.report.items import ALONE, NOTHING, READABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from syncheck.options import Options

    Groups = dict[str, dict[str, Mapping[str, str]]]
    """Properties of items by group and item."""

_MOST_GROUPS = 20
_MOST_NOTES = 5
# From the most to the least important.
_ORDER = ("out_of_sync", "undecided", "in_sync")
# The first verdict of an item in this order is the verdict of its group.
_PRECEDENCE = ("out_of_sync", "in_sync", "undecided")
_VERBS = {"out_of_sync": "differ", "undecided": "could not tell", "in_sync": "agree"}
# Text of items without tensors.
_WITHOUT_TENSORS = {
    READABLE: "unreadable",
    ALONE: "no replica to compare with",
    NOTHING: "no tensors to compare",
}
# Properties with numbers of tensors, and their labels.
_COUNTS = {"different": "differ", "not_compared": "not compared", "close": "close"}
_COLORS = {"out_of_sync": "red", "undecided": "yellow", "in_sync": "green"}


def write_groups(reporter: pytest.TerminalReporter, groups: Groups) -> None:
    """Print a line for each group, the most important first."""

    def find_rank(entry: tuple[str, Mapping[str, Mapping[str, str]]]) -> int:
        _, items = entry
        return _ORDER.index(_verdict(items))

    ranked = sorted(groups.items(), key=find_rank)
    for owner, items in ranked[:_MOST_GROUPS]:
        _write_group(reporter, owner, items)

    hidden = Counter(_verdict(items) for _, items in ranked[_MOST_GROUPS:])
    if hidden:
        counts = []
        for verdict in sorted(hidden, key=_ORDER.index):
            counts.append(f"{hidden[verdict]} {words.VERDICTS[verdict].lower()}")

        reporter.line(f"... and {hidden.total()} more groups: {', '.join(counts)}")


def _write_group(reporter: pytest.TerminalReporter, owner: str, items: Mapping[str, Mapping[str, str]]) -> None:
    """Print the verdict of a group, the results of its items, and the values that differ."""
    verdict = _verdict(items)
    reporter.write(words.VERDICTS[verdict], **{_COLORS[verdict]: True})
    name = relative_id(reporter.config.invocation_params.dir, reporter.config.rootpath, owner)
    parts = [_item_text(item, properties) for item, properties in items.items()]
    not_judged = _group_property(items, "not_judged")
    if not_judged:
        parts.append(not_judged)

    reporter.line(f"  {name}: {'; '.join(parts)}")
    values = _group_property(items, "values_that_differ")
    if values:
        reporter.line(f"    values that differ: {values}")


def write_notes(reporter: pytest.TerminalReporter, groups: Groups) -> None:
    """Print the notes of groups and the fixed findings of the baseline, without repetitions."""
    notes = _count_property(groups, "notes")
    for note, count in notes.most_common(_MOST_NOTES):
        scope = f" on {count} of {len(groups)} groups" if len(groups) > 1 else ""
        reporter.line(f"note{scope}: {note}")

    for finding in _count_property(groups, "fixed"):
        reporter.line(finding, green=True)


def _count_property(groups: Groups, name: str) -> Counter[str]:
    """Return the texts of a property and their numbers of groups, in the order of the groups."""
    texts = Counter(_group_property(items, name) for items in groups.values())
    # Groups without the property have an empty text.
    texts.pop("", None)
    return texts


def describe_options(options: Options) -> str:
    """Return the options with an influence on the verdict, including the project's options."""
    parts = []
    for name, declaration in list_options(PYTHON, type(options)).items():
        value = getattr(options, name)
        # 0 is a value that a user has set.
        is_default = value is False or value in (None, (), {})
        if not declaration.in_summary or is_default:
            continue

        parts.append(name if value is True else f"{name} {format_value(value)}")

    return "; ".join(parts)


def collect_groups(reporter: pytest.TerminalReporter, order: Mapping[str, int]) -> Groups:
    """Return the properties of finished items by group and item, in the order of collection."""
    by_id: dict[str, Mapping[str, str]] = {}
    for report in chain.from_iterable(reporter.stats.values()):
        # `stats` also contains warnings and deselected items, which have no phase.
        if getattr(report, "when", "") != "call":
            continue

        properties = _list_properties(report)
        if "verdict" in properties:
            by_id[report.nodeid] = properties

    def find_position(nodeid: str) -> int:
        return order.get(nodeid, len(order))

    groups: Groups = {}
    for nodeid in sorted(by_id, key=find_position):
        owner, _, item = nodeid.rpartition("::")
        groups.setdefault(owner, {})[item] = by_id[nodeid]

    return groups


def _list_properties(report: Any) -> dict[str, str]:
    """Return the properties of a report that this plugin added, without their prefix."""
    properties = {}
    for name, value in getattr(report, "user_properties", ()):
        # Other plugins may add properties of any type.
        if str(name).startswith("syncheck_"):
            properties[name.removeprefix("syncheck_")] = str(value)

    return properties


def _group_property(items: Mapping[str, Mapping[str, str]], name: str) -> str:
    """Return a property of a group, which each of its judged items has, or an empty text."""
    for properties in items.values():
        if name in properties:
            return properties[name]

    return ""


def _verdict(items: Mapping[str, Mapping[str, str]]) -> str:
    """Return the verdict of a group. An undecided item, for example shards, does not prevent IN SYNC."""
    verdicts = {properties["verdict"] for properties in items.values()}
    return min(verdicts, key=_PRECEDENCE.index)


def _item_text(item: str, properties: Mapping[str, str]) -> str:
    """Return the result of one item: 'bn-stats 14/21 differ (SYN201)'."""
    if item in _WITHOUT_TENSORS:
        return _WITHOUT_TENSORS[item]

    tensors = int(properties.get("tensors", 0))
    counts = []
    for name, label in _COUNTS.items():
        if int(properties.get(name, 0)):
            counts.append(f"{properties[name]}/{tensors} {label}")

    if not counts:
        verb = _VERBS[properties["verdict"]]
        counts.append(f"{tensors} {verb}" if tensors else verb)

    text = f"{item} {', '.join(counts)}"
    codes = _describe_codes(properties)
    return f"{text} ({', '.join(codes)})" if codes else text


def _describe_codes(properties: Mapping[str, str]) -> list[str]:
    """Return the codes of the findings, with the reason why a finding does not fail."""
    ignored: dict[str, str] = {}
    # A finding that is allowed and accepted is accepted.
    for label in ("allowed", "accepted"):
        ignored |= dict.fromkeys(_list_codes(properties, label), f" {label}")

    return [f"{code}{ignored.get(code, '')}" for code in _list_codes(properties, "findings")]


def _list_codes(properties: Mapping[str, str], name: str) -> list[str]:
    return properties[name].split(",") if name in properties else []
