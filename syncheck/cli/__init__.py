"""The command line: it parses arguments, calls the library and prints the result."""

from __future__ import annotations

import atexit
import gc
import os
import sys

CRASH = 3
INTERRUPTED = 130
# What numpy and its matrix library map when they are imported, rounded up. With less, that library ends the process
# with exit code 1, which would mean that replicas differ, and Python 3.11 can hang or receive a signal.
MAPPED_BYTES = 112 * 2**20


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 in sync, 1 out of sync, 2 could not tell, 3 crash, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["watch"]:
        # Runs a script of the user in this process, which none of the following may change.
        from syncheck.cli import watch

        return watch.run(arguments[1:])
    # syncheck does not use numpy's matrix routines, and starting their threads takes a tenth of a short run.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Records of 200,000 tensors contain no reference cycles, and the default threshold of 700 objects would spend a
    # fifth of the run searching for them.
    gc.set_threshold(100_000)
    # At exit, Python would search all objects once more, for a twentieth of a short run. The system frees all memory.
    atexit.register(gc.freeze)
    # Imports take most of a short run, so Ctrl-C is handled during imports too.
    try:
        from syncheck.cli import streams

        streams.reopen_closed()
        try:
            return _run(arguments)
        finally:
            streams.flush_before_exit()
    except KeyboardInterrupt:
        from syncheck.cli import streams

        streams.print_stderr("syncheck: interrupted")
        return INTERRUPTED
    except MemoryError:  # during imports, or while an error was being reported
        os.write(2, b"syncheck: error: out of memory\n")
        return 2


def _run(argv: list[str]) -> int:
    from syncheck.cli import output, streams
    from syncheck.errors import SyncheckError
    from syncheck.text import options_as_typed

    try:
        # In reports and files too: the user reads them beside the command line.
        with options_as_typed():
            code = _run_command(argv)
        streams.flush()
        return code
    except SyncheckError as error:
        output.print_error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader, like `| head`, closed the pipe. Python would report an error when it flushes stdout at exit.
        streams.redirect_to_null(sys.stdout)
        return streams.CLOSED
    except Exception as error:  # noqa: BLE001 - Python's exit code 1 would mean that replicas differ
        exhausted = _describe_exhausted_resource(error)
        if not exhausted:
            _report_crash(argv)
            return CRASH
    # The end of the block has released the frames of the failed run, so that there is memory for the message.
    output.print_message(f"error: {exhausted}")
    return SyncheckError.exit_code


def _run_command(argv: list[str]) -> int:
    from syncheck.cli import streams

    if argv == ["--version"]:
        # Without the parser of all commands, which takes longer to import and to build than the versions to read.
        from syncheck.versions import list_versions

        with streams.convert_write_errors():
            print("\n".join(list_versions()))
        return 0
    from syncheck.cli.parser import build_parser

    with streams.convert_write_errors():
        try:
            arguments = build_parser(argv[0] if argv else "").parse_args(argv)
        except SystemExit:  # argparse has printed the help or an error
            sys.stdout.flush()
            raise
    _check_memory()
    code: int = arguments.run(arguments)
    return code


def _check_memory() -> None:
    """Raise MemoryError if the limit on memory leaves no room for the libraries of the commands."""
    import mmap

    try:
        mmap.mmap(-1, MAPPED_BYTES).close()
    except OSError as error:
        raise MemoryError from error


def _describe_exhausted_resource(error: Exception) -> str:
    """Return a message if an error means that memory or file descriptors ran out, otherwise an empty string."""
    import errno

    number = error.errno if isinstance(error, OSError) else None
    # If a shared library cannot be mapped into memory, Python raises ImportError.
    unmapped = isinstance(error, ImportError) and "failed to map segment" in str(error)
    if isinstance(error, MemoryError) or unmapped or number == errno.ENOMEM:
        return "out of memory; raise the limit (ulimit -v), or compare fewer files at once, with --jobs 1"
    if number in (errno.EMFILE, errno.ENFILE):
        return "too many open files; raise the limit (ulimit -n) to at least a few dozen"
    return ""


def _report_crash(argv: list[str]) -> None:
    import traceback

    from syncheck.cli import streams
    from syncheck.versions import list_versions

    streams.print_stderr(
        f"{traceback.format_exc()}"
        "syncheck: this is a crash of syncheck, not a verdict on your files. Please report the lines above with:\n"
        + "".join(f"  {line}\n" for line in list_versions())
        + f"  arguments: {argv}"
    )
