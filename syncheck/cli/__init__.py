"""The command line: arguments and printing only."""

from __future__ import annotations

import gc
import os
import sys

CRASH = 3
INTERRUPTED = 130
CLOSED = 141  # what a shell reports for SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 in sync, 1 out of sync, 2 could not tell, 3 a crash of ours."""
    # Starting the threads of numpy's matrix routines, which syncheck does not use, takes a tenth of a run.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Records of 200,000 tensors contain no cycles; a search after every 700 objects takes a fifth of a run.
    gc.set_threshold(100_000)
    # Imports take most of a short run, so Ctrl-C must work during them.
    try:
        from syncheck.cli import streams

        streams.reopen()
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            streams.settle()
    except KeyboardInterrupt:
        from syncheck.cli import streams

        streams.say("syncheck: interrupted")
        return INTERRUPTED
    except MemoryError:  # during imports, or while an error was being reported
        os.write(2, b"syncheck: error: out of memory\n")
        return 2


def _run(argv: list[str]) -> int:
    from syncheck.cli import output, streams
    from syncheck.errors import COMMAND_LINE, OptionError, SyncheckError

    try:
        code = _carried_out(argv)
        streams.flush()
        return code
    except SyncheckError as error:
        text = error.spelled(COMMAND_LINE) if isinstance(error, OptionError) else error
        output.tell(f"error: {text}")
        return error.exit_code
    except BrokenPipeError:
        # The reader, such as `| head`, closed the pipe. Python would report an error when it flushes at exit.
        streams.silence(sys.stdout)
        return CLOSED
    except Exception as error:  # noqa: BLE001 - Python's exit code 1 would mean that replicas differ
        lacking = _lacking(error)
        if not lacking:
            _report_crash(argv)
            return CRASH
    # The end of the block has released the frames of the failed run, so that there is memory for the message.
    output.tell(f"error: {lacking}")
    return SyncheckError.exit_code


def _carried_out(argv: list[str]) -> int:
    from syncheck.cli import streams
    from syncheck.cli.parser import build

    with streams.printing():
        try:
            arguments = build().parse_args(argv)
        except SystemExit:  # after help, and after an error was printed
            sys.stdout.flush()
            raise
    code: int = arguments.run(arguments)
    return code


def _lacking(error: Exception) -> str:
    """Describe the exhausted resource that ended a run, and the next step; empty for any other error."""
    import errno

    number = error.errno if isinstance(error, OSError) else None
    # Without memory to map a library, the error is an ImportError.
    unmapped = isinstance(error, ImportError) and "failed to map segment" in str(error)
    if isinstance(error, MemoryError) or unmapped or number == errno.ENOMEM:
        return "out of memory; raise its limit (ulimit -v), or compare fewer files at once, with --jobs 1"
    if number in (errno.EMFILE, errno.ENFILE):
        return "too many open files; raise their limit (ulimit -n), of which a few dozen are needed"
    return ""


def _report_crash(argv: list[str]) -> None:
    import traceback

    from syncheck.cli import about, streams

    streams.say(
        f"{traceback.format_exc()}"
        "syncheck: this is a crash of syncheck, not a verdict on your files. Please report the lines above with:\n"
        + "".join(f"  {line}\n" for line in about.lines())
        + f"  arguments: {argv}"
    )
