"""The section `syncheck` at the end of a run: one line per group, what was excused, files written.

It is made of the reports' properties, which reach the controlling process of pytest-xdist from all others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from syncheck.errors import PYTHON
from syncheck.options import list_options
from syncheck.pytest_plugin.checkpoints.plan import seen_from
from syncheck.pytest_plugin.options import format_value
from syncheck.report import words
from syncheck.report.items import ALONE, NOTHING, READABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pytest

    from syncheck.options import Options
    from syncheck.pytest_plugin.checkpoints import CheckpointPlugin

    Groups = dict[str, dict[str, Mapping[str, str]]]
    """The properties of the items that ran, by group and item."""

_MOST_GROUPS = 20
_MOST_NOTES = 5
# Of the items of a group, the one that says most of it.
_ORDER = ("out_of_sync", "undecided", "in_sync")
_SAID = {"out_of_sync": "differ", "undecided": "could not tell", "in_sync": "agree"}
# Items that stand for a file or a group as a whole, and have one thing to say.
_WHOLE = {
    READABLE: "cannot be read",
    ALONE: "one file, nothing to compare it with",
    NOTHING: "no tensor left to compare",
}
_COLORS = {"out_of_sync": "red", "undecided": "yellow", "in_sync": "green"}


def write(reporter: pytest.TerminalReporter, plugin: CheckpointPlugin) -> None:
    """Print the section."""
    order = {one.nodeid: number for number, one in enumerate(plugin.planned)}
    groups = _groups(reporter, order)
    if not groups and not plugin.errors and not plugin.written:
        return
    reporter.write_sep("=", "syncheck")
    _write_groups(reporter, groups)
    _write_notes(reporter, groups)
    how = in_force(plugin.judge.options)
    if how:
        reporter.line(f"options in force: {how}")
    if plugin.updated:
        reporter.line(f"baseline written: {plugin.updated}")
    for path in plugin.written:
        reporter.line(f"report written: {path}")
    for error in plugin.errors:
        reporter.line(f"ERROR: {error}", red=True, bold=True)


def _write_groups(reporter: pytest.TerminalReporter, groups: Groups) -> None:
    """Print a line for each group, those that say most first."""
    ranked = sorted(groups.items(), key=lambda of: _ORDER.index(_verdict(of[1])))
    for owner, items in ranked[:_MOST_GROUPS]:
        verdict = _verdict(items)
        reporter.write(words.VERDICTS[verdict], **{_COLORS[verdict]: True})
        shown = seen_from(reporter.config.invocation_params.dir, reporter.config.rootpath, owner)
        parts = [_item(item, told) for item, told in items.items()]
        parts += filter(None, [_first(items, "not_judged")])
        reporter.line(f"  {shown}: {'; '.join(parts)}")
        if values := _first(items, "values_that_differ"):
            reporter.line(f"    values that differ: {values}")
    if len(ranked) > _MOST_GROUPS:
        rest = [_verdict(items) for _, items in ranked[_MOST_GROUPS:]]
        told = ", ".join(
            f"{rest.count(verdict)} {words.VERDICTS[verdict].lower()}" for verdict in _ORDER if verdict in rest
        )
        reporter.line(f"... and {len(rest)} more groups: {told}")


def _write_notes(reporter: pytest.TerminalReporter, groups: Groups) -> None:
    """Print what is odd about groups, and what of the baseline is not found any more; what several say, once."""
    notes = Counter(_first(items, "notes") for items in groups.values())
    notes.pop("", None)
    for note, count in notes.most_common(_MOST_NOTES):
        on = f" on {count} of {len(groups)} groups" if len(groups) > 1 else ""
        reporter.line(f"note{on}: {note}")
    for fixed in dict.fromkeys(_first(items, "fixed") for items in groups.values()):
        if fixed:
            reporter.line(fixed, green=True)


def in_force(options: Options) -> str:
    """Return the options that can hide a difference, those of the project included."""
    parts = []
    for name, declaration in list_options(PYTHON, type(options)).items():
        value = getattr(options, name)
        if declaration.in_summary and value is not False and value not in (None, (), {}):
            parts.append(name if value is True else f"{name} {format_value(value)}")
    return "; ".join(parts)


def _groups(reporter: pytest.TerminalReporter, order: Mapping[str, int]) -> Groups:
    """Collect the properties of the items that ran, by group and item, in the order of collection."""
    found: dict[str, Mapping[str, str]] = {}
    for reports in reporter.stats.values():
        for report in reports:
            # Warnings and deselected items are in `stats` too, and have other attributes.
            told = {
                name.removeprefix("syncheck_"): str(value)
                for name, value in getattr(report, "user_properties", ())
                if str(name).startswith("syncheck_")
            }
            if "verdict" in told and getattr(report, "when", "") == "call":
                found[report.nodeid] = told
    groups: Groups = {}
    for nodeid in sorted(found, key=lambda nodeid: order.get(nodeid, len(order))):
        owner, _, item = nodeid.rpartition("::")
        groups.setdefault(owner, {})[item] = found[nodeid]
    return groups


def _first(items: Mapping[str, Mapping[str, str]], name: str) -> str:
    """Return what is told of the group as a whole; each of its items that was judged tells it."""
    return next((told[name] for told in items.values() if name in told), "")


def _verdict(items: Mapping[str, Mapping[str, str]]) -> str:
    """Return the group's: a kind of which nothing was comparable, such as shards, leaves it to those that were."""
    told = {item["verdict"] for item in items.values()}
    return "in_sync" if "in_sync" in told and "out_of_sync" not in told else min(told, key=_ORDER.index)


def _item(item: str, told: Mapping[str, str]) -> str:
    """Say how one kind of tensor of a group stands: 'bn-stats 14/21 differ (SYN201)'."""
    if item in _WHOLE:
        return _WHOLE[item]
    parts = []
    tensors = int(told.get("tensors", 0))
    for name, said in (("different", "differ"), ("not_compared", "not compared"), ("close", "close")):
        if int(told.get(name, 0)):
            parts.append(f"{told[name]}/{tensors} {said}")
    stands = ", ".join(parts) or (f"{tensors} " if tensors else "") + _SAID[told["verdict"]]
    excused = {code: how for how in ("allowed", "accepted") for code in _codes(told, how)}
    codes = [f"{code} {excused[code]}" if code in excused else code for code in _codes(told, "findings")]
    return f"{item} {stands}" + (f" ({', '.join(codes)})" if codes else "")


def _codes(told: Mapping[str, str], name: str) -> Iterable[str]:
    return told[name].split(",") if name in told else ()
