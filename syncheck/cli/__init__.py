"""The command line: arguments and printing only."""

from __future__ import annotations

import gc
import os
import sys

CRASH = 3
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 in sync, 1 out of sync, 2 could not tell, 3 a crash of ours."""
    # numpy's matrix routines are not used here; not to start their threads saves a tenth of the whole run.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Records of 200,000 tensors hold no cycles; to search them for some every 700 takes a fifth of the whole run.
    gc.set_threshold(100_000)
    from syncheck.cli import output
    from syncheck.cli.parser import build
    from syncheck.errors import OptionError, SyncheckError, Words

    arguments = build().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except SyncheckError as error:
        text = error.spelled(Words("--", " ")) if isinstance(error, OptionError) else error
        output.tell(f"error: {text}")
        return error.exit_code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python must not complain at exit when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports for SIGPIPE
    except KeyboardInterrupt:
        print("syncheck: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception:  # noqa: BLE001 - whatever it is, exit 1 would claim that replicas differ
        _report_crash(sys.argv[1:] if argv is None else argv)
        return CRASH


def _report_crash(argv: list[str]) -> None:
    import platform
    import traceback

    from syncheck.report.files import version

    traceback.print_exc()
    print(
        "syncheck: this is a crash of syncheck, not a verdict on your files. Please report the lines above with:\n"
        f"  syncheck {version()}, Python {platform.python_version()}, {platform.platform()}\n"
        f"  arguments: {argv}",
        file=sys.stderr,
    )
