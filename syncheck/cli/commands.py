"""The commands: each calls the library, prints, and returns the exit code."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

from syncheck.cli import output
from syncheck.errors import CheckpointError, OptionError, UsageError
from syncheck.options import COMMAND_LINE, DiffOptions, Options, RunOptions, list_fields, list_options
from syncheck.report import formats
from syncheck.suggestions import suggest
from syncheck.text import options_as_typed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from syncheck.records import Report

_Kind = TypeVar("_Kind", Options, DiffOptions)
# Letters that look like the digits of a code.
_DIGITS = str.maketrans("oil", "011")


def compare(arguments: argparse.Namespace) -> int:
    """`syncheck compare`."""
    # Under torchrun, each process reads its own file.
    if any("{" in path for path in arguments.paths):
        from syncheck.cli import ranks

        if ranks.names_rank(arguments.paths):
            return _compare_across_ranks(arguments)
    options, run = _read_options(arguments, Options, *_load_project(arguments))
    return _compare(options, run)


def diff(arguments: argparse.Namespace) -> int:
    """`syncheck diff`."""
    from syncheck.cli.progress import show_progress
    from syncheck.conversion.diff import diff as compare_models

    # Both models are inputs, which no output may replace.
    arguments.paths = [arguments.a, arguments.b]
    options, run = _read_options(arguments, DiffOptions, *_load_project(arguments))
    _check_baseline(options, run)
    histograms = formats.needs_histograms(run.output)
    with show_progress(quiet=run.quiet):
        report = compare_models(arguments.a, arguments.b, options=options, histograms=histograms)
    if options.write_map is not None and not _lacks_map(report):
        output.confirm_file(options.write_map, quiet=run.quiet)
    return _print_errors_and_report(report, options, run)


def _lacks_map(report: Report) -> bool:
    """Whether a note explains why no map was written."""
    from syncheck.messages import Note

    pair = report.groups[-1]
    return any(note.code is Note.NO_MAP for note in pair.notes)


def _compare_across_ranks(arguments: argparse.Namespace) -> int:
    """`syncheck compare` as one of several processes, each with its own file. Does not return."""
    from syncheck.cli import ranks

    if not output.is_first_process():
        arguments.quiet = True

    def prepare() -> ranks.Task:
        options, run = _read_options(arguments, Options, *_load_project(arguments))
        # Only the first process needs the baseline, whose path may not exist on other machines.
        if output.is_first_process():
            _check_baseline(options, run)
        histograms = formats.needs_histograms(run.output)
        return ranks.Task(options, histograms, lambda report: write_report(report, options, run))

    ranks.run(arguments.paths, prepare)


def report(arguments: argparse.Namespace) -> int:
    """`syncheck report`."""
    from syncheck.report import events

    project, values = _load_project(arguments)
    if events.are_events(arguments.paths):
        _refuse_comparison_options(arguments)
        # The project's options of a comparison do not apply either, and need not be an error.
        values = {name: value for name, value in values.items() if name in list_fields(RunOptions)}
        options, run = _read_options(arguments, Options, project, values)
        _check_baseline(options, run)
        return write_report(events.read_events(run.checkpoints), options, run, is_overview=True)
    if not arguments.paths and "checkpoints" not in values and not os.path.exists("ckpts"):
        raise UsageError("ckpts: no such folder; train with --save-per-rank, or pass the paths of checkpoints")
    options, run = _read_options(arguments, Options, project, values)
    return _compare(options, run, is_overview=True)


def _refuse_comparison_options(arguments: argparse.Namespace) -> None:
    """Raise OptionError for options of a comparison, which the checks of a monitor have made already."""
    for name in list_options(COMMAND_LINE, Options):
        value = getattr(arguments, name, None)
        if value not in (None, [], ()) and name != "baseline":
            first = value[0] if isinstance(value, list) else value
            raise OptionError("does not apply to events, which were compared in the run; remove it", **{name: first})


def _load_project(arguments: argparse.Namespace) -> tuple[str | None, dict[str, Any]]:
    """Return the path of pyproject.toml, or None, and its options by field name."""
    from syncheck import config

    return (None, {}) if arguments.no_config else config.load()


def _read_options(
    arguments: argparse.Namespace, kind: type[_Kind], project: str | None, values: Mapping[str, Any]
) -> tuple[_Kind, RunOptions]:
    """Merge the command line and pyproject.toml, and check that the output files can be written.

    kind: the class of the options for the comparison. project, values: the path and the options of pyproject.toml.
    The paths to compare are the `checkpoints` of the result.
    """
    from syncheck import config

    typed = vars(arguments)
    paths = arguments.paths or values.get("checkpoints") or ["ckpts"]
    options = config.merge_options(values, kind, typed)
    run = config.merge_options(values, RunOptions, typed | {"checkpoints": list(paths)})
    try:
        formats.check_extensions(run.output)
        if output.is_first_process():
            inputs: list[str] = _list_inputs(paths, options)
            if project is not None:
                inputs.append(project)
            check_outputs(options, run, inputs)
    except UsageError as error:
        # Errors about files name no option; these files are the outputs.
        names = getattr(error, "values", None) or ["output"]
        is_typed = any(typed.get(name) for name in names)
        if project is None or is_typed or not values.keys() >= set(names):
            raise
        # The keys of the file are the names of fields.
        with options_as_typed(""):
            raise UsageError(f"{project}: {error}") from None
    # Options that accept differences are shown, because the user may have forgotten the file.
    applied = config.list_applied(values, kind, typed)
    if "checkpoints" in values and not arguments.paths:
        applied.insert(0, "checkpoints")
    if arguments.exit_zero is None and run.exit_zero:
        applied.append("exit_zero")
    if applied and not run.quiet:
        output.print_message(f"options from {project}: {', '.join(applied)}")
    return options, run


def check_outputs(options: Options, run: RunOptions, inputs: list[str]) -> None:
    """Check all outputs of a run before the comparison. Raises OptionError."""
    named = [("output", path) for path in run.output]
    if isinstance(options, DiffOptions) and options.write_map is not None:
        named.append(("write_map", options.write_map))
    if options.baseline is not None and run.update_baseline:
        from syncheck import api

        api.check_baseline(options, update=True)
        named.append(("baseline", options.baseline))
    elif options.baseline is not None:
        inputs = [*inputs, options.baseline]
    if named:
        # Most runs only print.
        from syncheck.readers import outputs

        for option, path in named:
            outputs.check(path, option)
        outputs.protect_all(named, inputs)


def _list_inputs(paths: Sequence[str], options: Options) -> list[str]:
    """Return the files, folders and globs that a comparison reads, without the baseline."""
    if isinstance(options, DiffOptions):
        from syncheck.conversion.sides import list_inputs

        return list_inputs(paths, options)
    inputs = list(paths)
    if isinstance(options.reference, str):
        inputs.append(options.reference)
    return inputs


def _check_baseline(options: Options, run: RunOptions) -> None:
    """Check the baseline before anything is compared. Raises UsageError if it cannot be used."""
    if options.baseline is None and run.update_baseline:
        from syncheck.messages import Usage

        raise OptionError(Usage.UPDATE_NEEDS_BASELINE(), update_baseline=True)
    from syncheck import api

    api.check_baseline(options, update=run.update_baseline)


def _compare(options: Options, run: RunOptions, *, is_overview: bool = False) -> int:
    from syncheck import api
    from syncheck.cli.progress import show_progress

    _check_baseline(options, run)
    with show_progress(quiet=run.quiet):
        checkpoints = api.find(*run.checkpoints, options=options)
        report = api.judge(checkpoints, options, histograms=formats.needs_histograms(run.output))
    return _print_errors_and_report(report, options, run, is_overview=is_overview)


def _print_errors_and_report(report: Report, options: Options, run: RunOptions, *, is_overview: bool = False) -> int:
    for broken in report.unreadable:
        output.print_message(f"error: {broken.path}: {broken.reason}")
    return write_report(report, options, run, is_overview=is_overview)


def write_report(report: Report, options: Options, run: RunOptions, *, is_overview: bool = False) -> int:
    """Apply the baseline, print the report and write it to the output files; return the exit code.

    A file that cannot be written is reported and makes the exit code 2; all other output is still written.
    """
    from syncheck import api

    exit_codes = []
    if run.update_baseline:
        exit_codes.append(_update_baseline(report, options, run))
    report = api.finish(report, options, may_be_missing=run.update_baseline)
    for path in run.output:
        try:
            formats.write_file(path, report, options)
            output.confirm_file(path, quiet=run.quiet)
        except UsageError as error:
            exit_codes.append(error.exit_code)
            output.print_error(error)
    if not run.quiet:
        _print_report(report, run, is_overview=is_overview)
    if any(exit_codes):
        return max(exit_codes)
    if run.exit_zero and report.exit_code == 1:
        return 0
    return report.exit_code


def _update_baseline(report: Report, options: Options, run: RunOptions) -> int:
    """Update the baseline and print the change. Return the exit code of an error, for which the file is unchanged."""
    from syncheck import api

    path = options.baseline
    assert path is not None
    try:
        change = api.update_baseline(report, path)
    except UsageError as error:
        output.print_error(error, path)
        return error.exit_code
    if not run.quiet:
        output.print_message(change)
    return 0


def _print_report(report: Report, run: RunOptions, *, is_overview: bool) -> None:
    """Print a report on stdout. is_overview: of all runs and steps, instead of each comparison."""
    if run.format != "text":
        output.print_text(formats.render_format(run.format, report))
    elif report.groups:
        from syncheck.report import summary, text

        width = max(output.terminal_width() or 0, summary.WIDTH)
        draw = text.draw_overview if is_overview else text.draw_comparison
        parts = draw(report, run.limit, width=width, verbose=run.verbose)
        output.print_parts(parts, run.color)


def show(arguments: argparse.Namespace) -> int:
    """`syncheck show`."""
    # Raises OptionError for a number below 0.
    limit = RunOptions(limit=arguments.limit).limit
    if arguments.shards:
        from syncheck.conversion.sides import list_shards

        content = list_shards(arguments.path)
    else:
        from syncheck.readers import contents

        content = contents.describe(arguments.path)
    if arguments.format == "json":
        from syncheck.report import json_document

        output.print_text(json_document.to_json(content))
    else:
        from syncheck.report import text

        parts = text.list_shards(content, limit) if arguments.shards else text.list_contents(content, limit)
        output.print_parts(parts, arguments.color)
    return 0


def fingerprint(arguments: argparse.Namespace) -> int:
    """`syncheck fingerprint`."""
    from syncheck.cli.progress import show_progress
    from syncheck.readers import find, fingerprints
    from syncheck.report.words import bytes_text
    from syncheck.tensors.traffic import TRAFFIC

    opened = find.open_checkpoints(arguments.paths)
    unreadable = [f"{broken.path}: {broken.reason}" for broken in opened.unreadable]
    targets = fingerprints.choose_output_paths(opened.snapshots, arguments.output)
    TRAFFIC.expect(opened.snapshots)
    for snapshot, path in targets:
        try:
            with show_progress(quiet=arguments.quiet):
                text = fingerprints.fingerprint(snapshot)
        except CheckpointError as error:
            unreadable.append(str(error))
            continue
        fingerprints.write(path, text)
        content = f"fingerprint of {snapshot.path}, {len(snapshot.tensors)} tensors, {bytes_text(snapshot.bytes)}"
        output.confirm_file(path, quiet=arguments.quiet, content=content)
    for line in unreadable:
        output.print_message(f"error: {line}")
    return 2 if unreadable else 0


def explain(arguments: argparse.Namespace) -> int:
    """`syncheck explain`."""
    from syncheck.diagnose.rules import list_rules
    from syncheck.live.witnesses.rules import WITNESS_RULES
    from syncheck.parity.causes import PARITY_RULES
    from syncheck.report import explanation

    if not list_rules()[0].explanation:
        raise UsageError("explain: `python -OO` removes the docstrings that explain prints; run Python without -OO")
    rules = sorted((*list_rules(), *WITNESS_RULES, *PARITY_RULES), key=lambda rule: rule.code)
    if arguments.code is None:
        output.print_parts(explanation.list_rules(rules), arguments.color)
        return 0
    # People write SYN-201, syn_201 and SYN 201, too.
    code = "-".join(re.findall("[a-z0-9]+", arguments.code.lower())).replace("syn-", "syn")
    for rule in rules:
        if code in (rule.code.lower(), rule.code[3:], rule.slug):
            output.print_parts(explanation.explain_rule(rule), arguments.color)
            return 0
    names = [rule.code.lower() for rule in rules] + [rule.slug for rule in rules]
    # Digits that were typed as letters: SYN2O1 is SYN201.
    typed = code.translate(_DIGITS) if code.startswith("syn") else code
    # An unknown number of three digits is no misspelling of another one.
    is_other_number = re.fullmatch(r"(?:syn)?\d{3}", typed) is not None and typed not in names
    suggestion = "" if is_other_number else suggest(typed, names).replace(" syn", " SYN")
    raise UsageError(f"{arguments.code}: no such finding; `syncheck explain` without a code lists all{suggestion}")


def demo(arguments: argparse.Namespace) -> int:
    """`syncheck demo`."""
    from syncheck.cli import demo as steps

    return steps.run(arguments.color)
