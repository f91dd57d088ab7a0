"""`torchrun ... -m syncheck parity my_module:Mine`: the gradient of a parallel program and of one process."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from syncheck.cli import output, ranks
from syncheck.cli.commands import check_outputs, write_report
from syncheck.errors import PeersBlocked, SyncheckError, UsageError
from syncheck.options import Options, RunOptions, list_fields
from syncheck.report import formats

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from syncheck.records import Report

# Options of a run without effect: no checkpoint, configuration or baseline is read.
_NOT_IN_PARITY = frozenset({"checkpoints", "no_config", "update_baseline"})


def run(arguments: argparse.Namespace) -> NoReturn:
    """`syncheck parity` under torchrun. Raises UsageError in one process."""
    is_under_torchrun = all(name in os.environ for name in ranks.NEEDED)
    if not is_under_torchrun or os.environ["WORLD_SIZE"] == "1":
        # Errors of the case come first, as under torchrun.
        _read_options(arguments)
        load_case(arguments.case)
        raise UsageError(
            f"{arguments.case}: nothing parallel to check in one process; start the case with torchrun "
            f"--nproc-per-node 2 -m syncheck parity {arguments.case}"
        )
    _check_across_ranks(arguments)


def _check_across_ranks(arguments: argparse.Namespace) -> NoReturn:
    """Check as one of several processes. All processes exit with the same code."""
    channel = ranks.connect()

    def work() -> int:
        options = _read_options(arguments)
        case = load_case(arguments.case)
        # A rank that has failed until here sends its error, before its peers wait in collectives of the program.
        channel.gather(None, "the case exists")
        try:
            report = _check(case, arguments.dtype, arguments.allow)
        except PeersBlocked as error:
            # The other ranks receive no message: torchrun ends them when this process exits.
            output.print_error(error)
            sys.stderr.flush()
            os._exit(error.exit_code)
        return ranks.write_on_leader(channel, report, lambda report: write_report(report, Options(), options))

    ranks.leave(channel, ranks.work_together(channel, work))


def _read_options(arguments: argparse.Namespace) -> RunOptions:
    """Return the options, and check that the output files can be written. Raises UsageError."""
    typed: dict[str, Any] = {}
    for name in list_fields(RunOptions) - _NOT_IN_PARITY:
        value = getattr(arguments, name)
        # None: not typed, so the default applies.
        if value is not None:
            typed[name] = tuple(value) if name == "output" else value
    run = RunOptions(**typed)
    formats.check_extensions(run.output)
    if output.is_first_process():
        check_outputs(Options(), run, [])
    return run


def _check(case: Any, dtype: str, allow: Sequence[str]) -> Report:
    """Check a case. Raises UsageError without torch. allow: codes of findings that do not count."""
    try:
        from syncheck.parity.check import check_parity

        return check_parity(case, dtype, allow=allow)
    except ModuleNotFoundError as error:
        raise UsageError(f"parity requires torch ({error}): pip install 'syncheck[live]'") from None


def load_case(name: str) -> Any:
    """Return an instance of a class `module:Class`; modules are searched in the working directory first.

    Raises UsageError if the module or the class cannot be imported or created.
    """
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name.isidentifier():
        raise UsageError(f"{name}: expected module:Class, for example my_module:Mine")
    if os.path.isfile(module_name):
        module = os.path.splitext(module_name)[0].replace(os.sep, ".")
        raise UsageError(f"{name}: a module has no path; did you mean {module}:{class_name}?")
    # `python -m` has this entry, and the script `syncheck` does not.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        case = getattr(importlib.import_module(module_name), class_name)
        return case()
    except SyncheckError:
        raise
    # The module is code of the user: any error in it is about the case.
    except Exception as error:  # noqa: BLE001
        raise UsageError(f"{name}: {type(error).__name__}: {error}") from None
