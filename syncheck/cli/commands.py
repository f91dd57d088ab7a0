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
    from syncheck.diagnose.baseline import Known
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
    known = _read_baseline(settings)
    compared = replace(settings.options, baseline=None)
    page = formats.needs_histograms(settings.run.output)
    found = compare_models(arguments.a, arguments.b, options=compared, histograms=page)  # type: ignore[arg-type]  # of the kind above
    return _print_errors_and_report(settings, found, "comparison", known)


def _compare_across_ranks(arguments: argparse.Namespace) -> int:
    """`syncheck compare` as one of several processes, each with its own file. Does not return."""
    from syncheck.cli import ranks

    if not ranks.is_first():
        arguments.quiet = True

    def prepare() -> ranks.Task:
        settings = _read_settings(arguments, _load_project(arguments))
        # Only the first process needs the file, whose path may not exist on other machines.
        known = _read_baseline(settings) if ranks.is_first() else frozenset()
        return ranks.Task(
            replace(settings.options, baseline=None),
            formats.needs_histograms(settings.run.output),
            lambda found: write_report(settings, found, "comparison", known),
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
        known = _read_baseline(settings)
        return write_report(settings, events.read_events(settings.paths), "overview", known)
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
        from syncheck.diagnose import baseline

        baseline.read(comparison.baseline, may_be_missing=True)  # a file that is no baseline has its own error
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


def _read_baseline(settings: Settings) -> Known:
    """Read the baseline before anything is compared; empty without one. Raises UsageError if it cannot be used."""
    path, update = settings.options.baseline, settings.run.update_baseline
    if path is None:
        if update:
            raise OptionError(
                "requires {baseline} FILE, or baseline in the table tool.syncheck", "baseline", update_baseline=True
            )
        return frozenset()
    from syncheck import api
    from syncheck.diagnose import baseline

    return api.read_baseline_for_update(path) if update else baseline.read(path)


def _apply_baseline(settings: Settings, found: Report, known: Known) -> tuple[Report, UsageError | None]:
    """Return the report with known findings accepted, after an update of the file if one was requested.

    known: the content of the file. Also returns the error of a failed update, for example after an undecided report;
    the file is then unchanged.
    """
    path, failed = settings.options.baseline, None
    if path is None:
        return found, None
    from syncheck import api
    from syncheck.diagnose import baseline

    if settings.run.update_baseline:
        try:
            updated = baseline.update_baseline(found, known)
            api.write_baseline(path, updated)
        except UsageError as error:
            failed = error
            output.print_message(f"error: {path}: {error}")
        else:
            if not settings.run.quiet:
                output.print_message(f"{path}: {baseline.describe_change(known, updated)}")
            known = updated
    return baseline.apply_baseline(found, known), failed


def _compare(arguments: argparse.Namespace, project: Config, layout: str) -> int:
    from syncheck import api

    settings = _read_settings(arguments, project)
    known = _read_baseline(settings)
    options = replace(settings.options, baseline=None)
    histograms = formats.needs_histograms(settings.run.output)
    found = api.compare(*settings.paths, options=options, histograms=histograms)
    return _print_errors_and_report(settings, found, layout, known)


def _print_errors_and_report(settings: Settings, found: Report, layout: str, known: Known) -> int:
    for broken in found.unreadable:
        output.print_message(f"error: {broken.path}: {broken.reason}")
    return write_report(settings, found, layout, known)


def write_report(settings: Settings, found: Report, layout: str, known: Known) -> int:
    """Print a report and write it to the output files; return the exit code.

    A file that cannot be written is reported and makes the exit code 2; all other output is still written.
    """
    run = settings.run
    found, failed = _apply_baseline(settings, found, known)
    for path in run.output:
        try:
            formats.write_file(path, found, settings.output_name, settings.options)
        except UsageError as error:
            failed = error
            output.print_message(f"error: {error}")
    if not run.quiet:
        _print_report(run, found, layout)
    if failed is not None:
        return failed.exit_code
    return 0 if run.exit_zero and found.exit_code == 1 else found.exit_code


def _print_report(run: RunOptions, found: Report, layout: str) -> None:
    if run.format != "text":
        output.print_text(formats.render_format(run.format, found))
    elif found.groups:
        from syncheck.report import text

        output.print_parts(getattr(text, layout)(found, run.limit), run.color)


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
