"""What each command does: call the library, print, return the exit code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncheck.cli import output
from syncheck.errors import CheckpointError, UsageError, logged, one_line
from syncheck.messages import Problem
from syncheck.report import files

if TYPE_CHECKING:
    import argparse

    from syncheck.api import Options
    from syncheck.baseline import Known
    from syncheck.config import Config
    from syncheck.records import Report


@dataclass(frozen=True, slots=True)
class Baseline:
    """The file that a run goes by. path: None where it goes by none. known: what the file has had at the start."""

    path: str | None = None
    known: Known = frozenset()
    update: bool = False
    quiet: bool = False

    def judged(self, found: Report) -> tuple[Report, UsageError | None]:
        """Return a report as the baseline has it, which is brought up to date first where that was asked for.

        Returns also why it was not: what could not be told cannot be accepted, and the file stays as it was.
        """
        if self.path is None:
            return found, None
        from syncheck import baseline

        known, failed = self.known, None
        if self.update:
            try:
                made = baseline.updated(found, known)
                baseline.write(self.path, made)
            except UsageError as error:
                failed = error
                output.tell(f"error: {self.path}: {error}")
            else:
                if not self.quiet:
                    output.tell(f"{self.path}: {baseline.change(known, made)}")
                known = made
        return baseline.accepted(found, known), failed


def _baseline(arguments: argparse.Namespace, options: Options) -> Baseline:
    """Read the baseline before anything is compared. Raises UsageError if it cannot be used."""
    path, update = options.baseline, arguments.update_baseline
    if path is None:
        if update:
            raise UsageError(Problem.UPDATE_NEEDS_BASELINE())
        return Baseline()
    from syncheck import baseline

    known = baseline.read_for_update(path) if update else baseline.read(path)
    return Baseline(path, known, update, arguments.quiet)


# What holds where neither the command line nor pyproject.toml says anything.
_PRINTING: dict[str, Any] = {
    "exit_zero": False,
    "format": "text",
    "output": (),
    "limit": 10,
    "quiet": False,
    "color": "auto",
}


def compare(arguments: argparse.Namespace) -> int:
    """`syncheck compare`."""
    if any("{" in path for path in arguments.paths):
        from syncheck.cli import ranks

        if ranks.asked_for(arguments.paths):
            return _across_ranks(arguments)
    return _answer(arguments, "comparison")


def _across_ranks(arguments: argparse.Namespace) -> int:
    """`syncheck compare` as one of several processes, each with a file of its own. Does not return."""
    from syncheck.cli import ranks

    if not ranks.leads():
        arguments.quiet = True

    def prepare() -> ranks.Task:
        options, option = _chosen(arguments, _project(arguments))
        # The first process alone needs the file; that of a project has another path on each machine.
        baseline = _baseline(arguments, options) if ranks.leads() else Baseline()
        return ranks.Task(
            replace(options, baseline=None),
            files.needs_histograms(arguments.output),
            lambda found: told(arguments, found, "comparison", option, baseline),
        )

    ranks.run(arguments.paths, prepare)


def report(arguments: argparse.Namespace) -> int:
    """`syncheck report`."""
    from pathlib import Path

    project = _project(arguments)
    if not arguments.paths and not project.checkpoints and not Path("ckpts").exists():
        raise UsageError(
            "ckpts: no such folder here, and no path was given. Train with --save-per-rank, or name the checkpoints."
        )
    return _answer(arguments, "overview")


def _project(arguments: argparse.Namespace) -> Config:
    from syncheck import config

    return config.Config() if arguments.no_config else config.load()


def _chosen(arguments: argparse.Namespace, project: Config) -> tuple[Options, str]:
    """Return how to compare, and how the option for files is called; fill in what the project says of printing."""
    from syncheck import api, config, readers
    from syncheck.cli import ranks

    given = {field: getattr(arguments, field, None) for field in api.Options.__slots__}
    options = config.options(project, **given)
    from_file = [*config.applied(project, **given)]
    if not arguments.paths and project.checkpoints:
        from_file.insert(0, "checkpoints")
    if arguments.exit_zero is None and project.printing.get("exit_zero"):
        from_file.append("exit-zero")
    option = "-o" if arguments.output else f"{project.path}: tool.syncheck.output"
    for name, default in _PRINTING.items():
        if getattr(arguments, name) in (None, []):
            setattr(arguments, name, project.printing.get(name, default))
    files.check_extensions(arguments.output, option)
    if ranks.leads():
        for path in arguments.output:
            files.check_writable(path, option)
            readers.keep(path, option)
    if from_file and not arguments.quiet:
        # What excuses a difference is said, even where nobody remembers that file.
        output.tell(f"options from {project.path}: {', '.join(from_file)}")
    return options, option


def _answer(arguments: argparse.Namespace, layout: str) -> int:
    from syncheck import api

    project = _project(arguments)
    options, option = _chosen(arguments, project)
    baseline = _baseline(arguments, options)
    paths = arguments.paths or project.checkpoints or ["ckpts"]
    options = replace(options, baseline=None)
    found = api.compare(*paths, options=options, histograms=files.needs_histograms(arguments.output))
    for broken in found.unreadable:
        output.tell(f"error: {broken.path}: {broken.reason}")
    return told(arguments, found, layout, option, baseline)


def told(arguments: argparse.Namespace, found: Report, layout: str, option: str, baseline: Baseline) -> int:
    """Write and print a report as the arguments ask for; return the exit code.

    A file that cannot be written is told of, and makes it 2; the others and what is printed come out all the same.
    """
    found, unwritten = baseline.judged(found)
    for path in arguments.output:
        try:
            files.write_file(path, found, option)
        except UsageError as error:
            unwritten = error
            output.tell(f"error: {error}")
    if not arguments.quiet:
        _print(arguments, found, layout)
    if unwritten is not None:
        return unwritten.exit_code
    return 0 if arguments.exit_zero and found.exit_code == 1 else found.exit_code


def _print(arguments: argparse.Namespace, found: Report, layout: str) -> None:
    if arguments.format != "text":
        output.write_text(files.render_format(arguments.format, found))
    elif found.groups:
        from syncheck.report import text

        output.write(getattr(text, layout)(found, arguments.limit), arguments.color)


def show(arguments: argparse.Namespace) -> int:
    """`syncheck show`."""
    from syncheck import contents

    listed = contents.describe(arguments.path)
    if arguments.format == "json":
        from syncheck.report import json_document

        output.write_text(json_document.to_json(listed))
    else:
        from syncheck.report import listing

        output.write(listing.list_contents(listed), arguments.color)
    return 0


def fingerprint(arguments: argparse.Namespace) -> int:
    """`syncheck fingerprint`."""
    from syncheck import fingerprint as made
    from syncheck import paths
    from syncheck.report.words import bytes_text

    opened = paths.open_all(arguments.paths)
    unreadable = [f"{broken.path}: {broken.reason}" for broken in opened.unreadable]
    for snapshot, place in made.places(opened.snapshots, arguments.output):
        try:
            text = made.fingerprint(snapshot)
        except CheckpointError as error:
            unreadable.append(str(error))
            continue
        made.write(place, text)
        if not arguments.quiet:
            size = f"{len(snapshot.tensors)} tensors, {bytes_text(snapshot.bytes)} in {bytes_text(len(text))}"
            told = f"{one_line(place)}: fingerprint of {one_line(snapshot.path)}, {size}"
            output.write_text(f"{logged(told)}\n")
    for line in unreadable:
        output.tell(f"error: {line}")
    return 2 if unreadable else 0


def explain(arguments: argparse.Namespace) -> int:
    """`syncheck explain`."""
    from syncheck.diagnose import RULES
    from syncheck.report import listing

    if RULES[0].__doc__ is None:
        raise UsageError("explain: `python -OO` leaves out the texts that it prints; run it without -OO")
    rules = sorted(RULES, key=lambda rule: rule.CODE)
    if arguments.code is None:
        output.write(listing.list_rules(rules), arguments.color)
        return 0
    asked = arguments.code.lower()
    found = next((rule for rule in rules if asked in (rule.CODE.lower(), rule.CODE[3:], rule.SLUG)), None)
    if found is None:
        raise UsageError(f"{arguments.code}: no such finding; syncheck explain, without a code, lists all")
    output.write(listing.explain_rule(found), arguments.color)
    return 0


def demo(arguments: argparse.Namespace) -> int:
    """`syncheck demo`."""
    from syncheck.cli import demo as steps

    return steps.run(arguments.color)
