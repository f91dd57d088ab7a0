"""The section `syncheck` at the end of a run: one line per group, options in effect, files written.

The data are properties of test reports, which pytest-xdist sends from its workers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from syncheck.options import PYTHON, list_options
from syncheck.pytest_plugin.checkpoints.plan import relative_id
from syncheck.pytest_plugin.options import format_value
from syncheck.report import words
from syncheck.report.items import ALONE, NOTHING, READABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pytest

    from syncheck.options import Options

    Groups = dict[str, dict[str, Mapping[str, str]]]
    """Properties of items by group and item."""

_MOST_GROUPS = 20
_MOST_NOTES = 5
# From the most to the least important.
_ORDER = ("out_of_sync", "undecided", "in_sync")
_VERBS = {"out_of_sync": "differ", "undecided": "could not tell", "in_sync": "agree"}
# Text of items without tensors.
_WITHOUT_TENSORS = {
    READABLE: "unreadable",
    ALONE: "no replica to compare with",
    NOTHING: "no tensors to compare",
}
_COLORS = {"out_of_sync": "red", "undecided": "yellow", "in_sync": "green"}


def write_groups(reporter: pytest.TerminalReporter, groups: Groups) -> None:
    """Print a line for each group, the most important first."""
    ranked = sorted(groups.items(), key=lambda entry: _ORDER.index(_verdict(entry[1])))
    for owner, items in ranked[:_MOST_GROUPS]:
        verdict = _verdict(items)
        reporter.write(words.VERDICTS[verdict], **{_COLORS[verdict]: True})
        name = relative_id(reporter.config.invocation_params.dir, reporter.config.rootpath, owner)
        parts = [_item_text(item, properties) for item, properties in items.items()]
        parts += filter(None, [_group_property(items, "not_judged")])
        reporter.line(f"  {name}: {'; '.join(parts)}")
        if values := _group_property(items, "values_that_differ"):
            reporter.line(f"    values that differ: {values}")
    if len(ranked) > _MOST_GROUPS:
        rest = [_verdict(items) for _, items in ranked[_MOST_GROUPS:]]
        counts = ", ".join(
            f"{rest.count(verdict)} {words.VERDICTS[verdict].lower()}" for verdict in _ORDER if verdict in rest
        )
        reporter.line(f"... and {len(rest)} more groups: {counts}")


def write_notes(reporter: pytest.TerminalReporter, groups: Groups) -> None:
    """Print the notes of groups and the fixed findings of the baseline, without repetitions."""
    notes = Counter(_group_property(items, "notes") for items in groups.values())
    notes.pop("", None)
    for note, count in notes.most_common(_MOST_NOTES):
        on = f" on {count} of {len(groups)} groups" if len(groups) > 1 else ""
        reporter.line(f"note{on}: {note}")
    for fixed in dict.fromkeys(_group_property(items, "fixed") for items in groups.values()):
        if fixed:
            reporter.line(fixed, green=True)


def describe_options(options: Options) -> str:
    """Return the options with an influence on the verdict, including the project's options."""
    parts = []
    for name, declaration in list_options(PYTHON, type(options)).items():
        value = getattr(options, name)
        if declaration.in_summary and value is not False and value not in (None, (), {}):
            parts.append(name if value is True else f"{name} {format_value(value)}")
    return "; ".join(parts)


def collect_groups(reporter: pytest.TerminalReporter, order: Mapping[str, int]) -> Groups:
    """Return the properties of finished items by group and item, in the order of collection."""
    by_id: dict[str, Mapping[str, str]] = {}
    for reports in reporter.stats.values():
        for report in reports:
            # `stats` also contains warnings and deselected items, which have no properties.
            properties = {
                name.removeprefix("syncheck_"): str(value)
                for name, value in getattr(report, "user_properties", ())
                if str(name).startswith("syncheck_")
            }
            if "verdict" in properties and getattr(report, "when", "") == "call":
                by_id[report.nodeid] = properties
    groups: Groups = {}
    for nodeid in sorted(by_id, key=lambda nodeid: order.get(nodeid, len(order))):
        owner, _, item = nodeid.rpartition("::")
        groups.setdefault(owner, {})[item] = by_id[nodeid]
    return groups


def _group_property(items: Mapping[str, Mapping[str, str]], name: str) -> str:
    """Return a property of a group, which each of its judged items has, or an empty text."""
    return next((properties[name] for properties in items.values() if name in properties), "")


def _verdict(items: Mapping[str, Mapping[str, str]]) -> str:
    """Return the verdict of a group. An undecided item, such as shards, does not prevent IN SYNC."""
    verdicts = {properties["verdict"] for properties in items.values()}
    return "in_sync" if "in_sync" in verdicts and "out_of_sync" not in verdicts else min(verdicts, key=_ORDER.index)


def _item_text(item: str, properties: Mapping[str, str]) -> str:
    """Return the result of one item: 'bn-stats 14/21 differ (SYN201)'."""
    if item in _WITHOUT_TENSORS:
        return _WITHOUT_TENSORS[item]
    parts = []
    tensors = int(properties.get("tensors", 0))
    for name, label in (("different", "differ"), ("not_compared", "not compared"), ("close", "close")):
        if int(properties.get(name, 0)):
            parts.append(f"{properties[name]}/{tensors} {label}")
    result = ", ".join(parts) or (f"{tensors} " if tensors else "") + _VERBS[properties["verdict"]]
    ignored = {code: label for label in ("allowed", "accepted") for code in _codes(properties, label)}
    codes = [f"{code} {ignored[code]}" if code in ignored else code for code in _codes(properties, "findings")]
    return f"{item} {result}" + (f" ({', '.join(codes)})" if codes else "")


def _codes(properties: Mapping[str, str], name: str) -> Iterable[str]:
    return properties[name].split(",") if name in properties else ()
