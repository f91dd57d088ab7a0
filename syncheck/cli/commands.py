"""The commands: each calls the library, prints, and returns the exit code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncheck.cli import output
from syncheck.errors import COMMAND_LINE, TOML, CheckpointError, OptionError, UsageError
from syncheck.readers import outputs
from syncheck.report import formats
from syncheck.text import logged, one_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from syncheck.config import Config
    from syncheck.options import Options, RunOptions
    from syncheck.records import Report


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the command line and of pyproject.toml together.

    output_name: the spelling of `output` in errors: that of the command line or of pyproject.toml.
    """

    paths: Sequence[str]
    options: Options
    run: RunOptions
    output_name: str


def compare(arguments: argparse.Namespace) -> int:
    """`syncheck compare`."""
    if any("{" in path for path in arguments.paths):
        from syncheck.cli import ranks

        if ranks.names_rank(arguments.paths):
            return _compare_across_ranks(arguments)
    return _compare(arguments, _load_project(arguments), "comparison")


def diff(arguments: argparse.Namespace) -> int:
    """`syncheck diff`."""
    from syncheck import options
    from syncheck.conversion.diff import diff as compare_models

    arguments.paths = (arguments.a, arguments.b)
    project = _load_project(arguments)
    applicable = {name: value for name, value in project.comparison.items() if name not in options.NOT_IN_DIFF}
    settings = _read_settings(arguments, replace(project, comparison=applicable), options.DiffOptions)
    _check_baseline(settings.options, settings.run)
    compared: Any = settings.options  # DiffOptions
    histograms = formats.needs_histograms(settings.run.output)
    report = compare_models(arguments.a, arguments.b, options=compared, histograms=histograms)
    return _print_errors_and_report(settings, report, "comparison")


def _compare_across_ranks(arguments: argparse.Namespace) -> int:
    """`syncheck compare` as one of several processes, each with its own file. Does not return."""
    from syncheck.cli import ranks

    if not ranks.is_first():
        arguments.quiet = True

    def prepare() -> ranks.Task:
        settings = _read_settings(arguments, _load_project(arguments))
        # Only the first process needs the baseline, whose path may not exist on other machines.
        if ranks.is_first():
            _check_baseline(settings.options, settings.run)
        return ranks.Task(
            settings.options,
            formats.needs_histograms(settings.run.output),
            lambda report: write_report(settings, report, "comparison"),
        )

    ranks.run(arguments.paths, prepare)


def report(arguments: argparse.Namespace) -> int:
    """`syncheck report`."""
    from pathlib import Path

    from syncheck.report import events

    project = _load_project(arguments)
    if events.are_events(arguments.paths):
        _refuse_comparison_options(arguments)
        settings = _read_settings(arguments, replace(project, comparison={}))
        _check_baseline(settings.options, settings.run)
        return write_report(settings, events.read_events(settings.paths), "overview")
    if not arguments.paths and not project.checkpoints and not Path("ckpts").exists():
        raise UsageError("ckpts: no such folder; train with --save-per-rank, or pass the paths of checkpoints")
    return _compare(arguments, project, "overview")


def _refuse_comparison_options(arguments: argparse.Namespace) -> None:
    """Raise OptionError for options of a comparison, which the checks of a monitor have made already."""
    from syncheck import options

    for name in options.list_options(COMMAND_LINE, options.Options):
        value = getattr(arguments, name, None)
        if value not in (None, [], ()) and name != "baseline":
            shown = value[0] if isinstance(value, list) else value
            raise OptionError("does not apply to events, which were compared in the run; remove it", **{name: shown})


def _load_project(arguments: argparse.Namespace) -> Config:
    from syncheck import config

    return config.Config() if arguments.no_config else config.load()


def _read_settings(arguments: argparse.Namespace, project: Config, kind: type[Options] | None = None) -> Settings:
    """Merge the command line and pyproject.toml, and check that the output files can be written.

    kind: the class of the options for the comparison; default: `Options`.
    """
    from syncheck import config, options
    from syncheck.cli import ranks

    def given(cls: type) -> dict[str, Any]:
        return {name: getattr(arguments, name, None) for name in options.list_options(COMMAND_LINE, cls)}

    comparison = given(kind or options.Options)
    merged = config.merge_options(project, kind, **comparison)
    run = config.merge_run_options(project, **given(options.RunOptions))
    from_file = [*config.list_applied_keys(project, **comparison)]
    if not arguments.paths and project.checkpoints:
        from_file.insert(0, "checkpoints")
    if arguments.exit_zero is None and run.exit_zero:
        from_file.append("exit-zero")
    output_name = "-o" if arguments.output else f"{project.path}: {TOML.name('output')}"
    formats.check_extensions(run.output, output_name)
    paths = arguments.paths or project.checkpoints or ["ckpts"]
    if ranks.is_first():
        _check_outputs(merged, run, output_name, [*_list_inputs(paths, merged), *filter(None, [project.path])])
    if from_file and not run.quiet:
        # Options that accept differences are shown, because the user may have forgotten the file.
        output.print_message(f"options from {project.path}: {', '.join(from_file)}")
    return Settings(paths, merged, run, output_name)


def _check_outputs(comparison: Options, run: RunOptions, output_name: str, inputs: list[str]) -> None:
    """Check all outputs of a run before the comparison. Raises OptionError."""
    named = [(output_name, path) for path in run.output]
    map_path = getattr(comparison, "write_map", None)  # of `diff` only
    if map_path is not None:
        named.append((outputs.MAP, map_path))
    if comparison.baseline is not None and run.update_baseline:
        from syncheck import api

        api.check_baseline(comparison, update=True)
        named.append(("{baseline}", comparison.baseline))
    elif comparison.baseline is not None:
        inputs = [*inputs, comparison.baseline]
    for option, path in named:
        outputs.check(path, option)
    outputs.protect_all(named, inputs)


def _list_inputs(paths: Sequence[str], comparison: Options) -> list[str]:
    """Return the files, folders and globs that a comparison reads, without the baseline."""
    from syncheck import options

    if isinstance(comparison, options.DiffOptions):
        from syncheck.conversion.sides import list_inputs

        return list_inputs(paths, comparison)
    reference = comparison.reference
    return [*paths, reference] if isinstance(reference, str) else [*paths]


def _check_baseline(options: Options, run: RunOptions) -> None:
    """Check the baseline before anything is compared. Raises UsageError if it cannot be used."""
    if options.baseline is None and run.update_baseline:
        raise OptionError(
            "requires {baseline} FILE, or baseline in the table tool.syncheck", "baseline", update_baseline=True
        )
    from syncheck import api

    api.check_baseline(options, update=run.update_baseline)


def _compare(arguments: argparse.Namespace, project: Config, layout: str) -> int:
    from syncheck import api

    settings = _read_settings(arguments, project)
    _check_baseline(settings.options, settings.run)
    checkpoints = api.find(*settings.paths, options=settings.options)
    histograms = formats.needs_histograms(settings.run.output)
    report = api.judge(checkpoints, settings.options, histograms=histograms)
    return _print_errors_and_report(settings, report, layout)


def _print_errors_and_report(settings: Settings, report: Report, layout: str) -> int:
    for broken in report.unreadable:
        output.print_message(f"error: {broken.path}: {broken.reason}")
    return write_report(settings, report, layout)


def write_report(settings: Settings, report: Report, layout: str) -> int:
    """Apply the baseline, print the report and write it to the output files; return the exit code.

    A file that cannot be written is reported and makes the exit code 2; all other output is still written.
    """
    from syncheck import api

    run = settings.run
    exit_codes = []
    if run.update_baseline:
        exit_codes.append(_update_baseline(settings, report))
    report = api.finish(report, settings.options, may_be_missing=run.update_baseline)
    for path in run.output:
        try:
            formats.write_file(path, report, settings.output_name, settings.options)
        except UsageError as error:
            exit_codes.append(error.exit_code)
            output.print_message(f"error: {error}")
    if not run.quiet:
        _print_report(run, report, layout)
    if any(exit_codes):
        return max(exit_codes)
    return 0 if run.exit_zero and report.exit_code == 1 else report.exit_code


def _update_baseline(settings: Settings, report: Report) -> int:
    """Update the baseline and print the change. Return the exit code of an error, for which the file is unchanged."""
    from syncheck import api

    path = settings.options.baseline
    assert path is not None
    try:
        change = api.update_baseline(report, path)
    except UsageError as error:
        output.print_message(f"error: {path}: {error}")
        return error.exit_code
    if not settings.run.quiet:
        output.print_message(change)
    return 0


def _print_report(run: RunOptions, report: Report, layout: str) -> None:
    """Print a report on stdout. layout: the function of `report.text`, `comparison` or `overview`."""
    if run.format != "text":
        output.print_text(formats.render_format(run.format, report))
    elif report.groups:
        from syncheck.report import text

        output.print_parts(getattr(text, layout)(report, run.limit), run.color)


def show(arguments: argparse.Namespace) -> int:
    """`syncheck show`."""
    if arguments.shards:
        from syncheck.conversion.sides import list_shards

        listed = list_shards(arguments.path)
    else:
        from syncheck.readers import contents

        listed = contents.describe(arguments.path)
    if arguments.format == "json":
        from syncheck.report import json_document

        output.print_text(json_document.to_json(listed))
    else:
        from syncheck.report import text

        parts = text.list_shards(listed) if arguments.shards else text.list_contents(listed)
        output.print_parts(parts, arguments.color)
    return 0


def fingerprint(arguments: argparse.Namespace) -> int:
    """`syncheck fingerprint`."""
    from syncheck.readers import find, fingerprints
    from syncheck.report.words import bytes_text

    opened = find.open_checkpoints(arguments.paths)
    unreadable = [f"{broken.path}: {broken.reason}" for broken in opened.unreadable]
    for snapshot, path in fingerprints.choose_output_paths(opened.snapshots, arguments.output):
        try:
            text = fingerprints.fingerprint(snapshot)
        except CheckpointError as error:
            unreadable.append(str(error))
            continue
        fingerprints.write(path, text)
        if not arguments.quiet:
            size = f"{len(snapshot.tensors)} tensors, {bytes_text(snapshot.bytes)} in {bytes_text(len(text))}"
            line = f"{one_line(path)}: fingerprint of {one_line(snapshot.path)}, {size}"
            output.print_text(f"{logged(line)}\n")
    for line in unreadable:
        output.print_message(f"error: {line}")
    return 2 if unreadable else 0


def explain(arguments: argparse.Namespace) -> int:
    """`syncheck explain`."""
    from syncheck.diagnose.rules import RULES
    from syncheck.report import text

    if not RULES[0].explanation:
        raise UsageError("explain: `python -OO` removes the docstrings that explain prints; run Python without -OO")
    rules = sorted(RULES, key=lambda rule: rule.code)
    if arguments.code is None:
        output.print_parts(text.list_rules(rules), arguments.color)
        return 0
    asked = arguments.code.lower()
    found = next((rule for rule in rules if asked in (rule.code.lower(), rule.code[3:], rule.slug)), None)
    if found is None:
        raise UsageError(f"{arguments.code}: no such finding; `syncheck explain` without a code lists all")
    output.print_parts(text.explain_rule(found), arguments.color)
    return 0


def demo(arguments: argparse.Namespace) -> int:
    """`syncheck demo`."""
    from syncheck.cli import demo as steps

    return steps.run(arguments.color)
