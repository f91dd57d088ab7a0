"""Exhausted resources, odd shells and terminals: the same result, or one line with the missing resource."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import network, save_pth, save_safetensors
from support.listings import measure_width

import syncheck
from syncheck import cli
from syncheck.cli import output
from syncheck.tensors import blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Shell = Callable[..., tuple[int, str, str]]
    Ranks = Callable[..., list[Path]]

COMPARE = "syncheck compare run_rank0.pth run_rank1.pth"
LAST = "14 tensors: 12 identical, 0 close, 2 different, 0 not compared"
MEMORY = "out of memory; raise the limit (ulimit -v), or compare fewer files at once, with --jobs 1"
FILES = "too many open files; raise the limit (ulimit -n) to at least a few dozen"
GONE = "the current folder was removed; change to an existing folder"


def drop_confirmations(err: str) -> str:
    """Return the messages without those about written files."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("syncheck: wrote "))


def assert_out_of_sync(result: tuple[int, str, str]) -> None:
    """Assert that a run found the two ranks out of sync and printed no error."""
    assert (result[0], drop_confirmations(result[2])) == (1, "")
    assert result[1].splitlines()[-1] == LAST


ODD = {
    "no home": f"unset HOME; {COMPARE} -o out.html",
    "no folder for temporary files": f"export TMPDIR=/nowhere TEMP= TMP=/dev/null; {COMPARE} -o out.json",
    "an unknown locale": f"env LC_ALL=xx_YY.nothing {COMPARE} -o out.md",
    "decimal commas": f"env LC_ALL=de_DE.UTF-8 LC_NUMERIC=de_DE.UTF-8 {COMPARE} -o out.html",
    "an empty environment": f"env -i PYTHONPATH=$PYTHONPATH {COMPARE} -o out.json",
    "twenty open files": f"ulimit -n 20; {COMPARE} -o out.json -o out.html",
    "no core, small stack": f"ulimit -c 0; ulimit -s 1024; {COMPARE}",
    "a mask for no permission": f"umask 777; {COMPARE}",
}
RUN_BY = {
    "-OO": "without assertions and docstrings", "-W error": "warnings are errors", "-X dev": "checks of Python",
    "-X utf8=0": "encoding of the locale",
}  # fmt: skip
# Several commands in one process, and their exit codes.
SEVERAL = """
import sys
from syncheck.cli import main
codes = []
for line in sys.argv[1:]:
    try:
        codes.append(main(line.split()))
    except SystemExit as stopped:
        codes.append(stopped.code)
print(codes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_environments(shell: Shell, name: str) -> None:
    """The result does not depend on the environment."""
    assert_out_of_sync(shell(ODD[name]))


@pytest.mark.slow
@pytest.mark.parametrize("python", RUN_BY)
def test_odd_interpreters(shell: Shell, tmp_path: Path, python: str) -> None:
    """Results, reports and fingerprints do not depend on the options of Python."""
    assert_out_of_sync(shell(f"{COMPARE} -o out.html -o out.json -o out.md -o out.txt -o out.xml", python))
    lines = ("fingerprint run_rank0.pth -o made.json", "compare run_rank0.pth run_rank1.pth nothing.pth")
    command = [sys.executable, *python.split(), "-c", SEVERAL, *lines, "show run_rank0.pth", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 1, 0, 0]"
    assert (tmp_path / "made.json").exists()
    errors = drop_confirmations(done.stderr)
    assert errors.startswith("syncheck: error: nothing.pth: ")
    assert errors.count("\n") == 1


def test_explain_without_docstrings(shell: Shell) -> None:
    """`explain` prints docstrings; without them, under -OO, it ends with one line and exit code 2."""
    for command in ("syncheck explain", "syncheck explain SYN201"):
        code, out, err = shell(command, "-OO")
        assert (code, out) == (2, "")
        assert err.startswith("syncheck: error: explain: `python -OO` removes the docstrings")
        assert err.count("\n") == 1


def test_removed_folder(shell: Shell, tmp_path: Path) -> None:
    """In a removed folder, absolute paths are compared, and a relative path is an error in one line."""
    gone = "mkdir -p gone; cd gone; rmdir ../gone; "
    prefix = f"{tmp_path}/run_rank"
    assert_out_of_sync(shell(f"{gone}syncheck compare {prefix}0.pth {prefix}1.pth"))
    code, out, err = shell(f"{gone}syncheck compare {prefix}0.pth ../run_rank1.pth")
    assert (code, out, err) == (2, "", f"syncheck: error: ../run_rank1.pth: {GONE}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["report", "show a", "demo", "compare '*.pth'", "compare {0} {1} -o a.json", "compare a b", "fingerprint a -o b"],
)
def test_other_commands_in_a_removed_folder(shell: Shell, tmp_path: Path, command: str) -> None:
    """In a removed folder, each command exits with 2 and prints one line."""
    command = command.replace("{0}", f"{tmp_path}/run_rank0.pth").replace("{1}", f"{tmp_path}/run_rank1.pth")
    code, out, err = shell(f"mkdir -p gone; cd gone; rmdir ../gone; syncheck {command}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("syncheck: error: ")


def test_too_few_files(shell: Shell) -> None:
    """If Python itself cannot open enough files, the error is one line with exit code 2."""
    code, out, err = shell(f"ulimit -n 5; {COMPARE} -o out.html")
    assert (code, out, err) == (2, "", f"syncheck: error: {FILES}\n")


@pytest.mark.slow
def test_all_limits_of_memory_and_files(shell: Shell, tmp_path: Path) -> None:
    """Under any limit of memory or open files, two ranks in sync exit with 0 or a known error."""
    save_pth(tmp_path / "run_rank1.pth", network())
    outcomes = set()
    for kilobytes in range(20_000, 260_000, 20_000):
        code, out, err = shell(f"ulimit -v {kilobytes}; {COMPARE} -o out.html")
        # During imports there is no memory for the whole message, and with still less Python itself does not start.
        if not err.startswith(("bash", "python")):
            errors = (f"syncheck: error: {MEMORY}\n", "syncheck: error: out of memory\n")
            assert (code, drop_confirmations(err)) == (0, "") or (code == 2 and err in errors), (kilobytes, code, err)
        outcomes.add((code, bool(out)))
    for files in range(4, 24):
        code, out, err = shell(f"ulimit -n {files}; {COMPARE} -o out.html")
        errors = (
            f"syncheck: error: {FILES}\n",
            "syncheck: error: --output out.html: cannot be written: Too many open files\n",
        )
        is_right = (code, drop_confirmations(err)) == (0, "") or (code == 2 and err in errors)
        assert is_right or "Fatal Python error" in err, (files, err)
        outcomes.add((code, bool(out)))
    assert {(0, True), (2, False)} <= outcomes


def test_threads_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If at most one thread can be started, the calling thread does the work with the same result."""
    for rank, last in enumerate((0, 1, 0)):
        array = np.zeros(9_000_000, np.uint8)
        array[-1] = last
        save_safetensors(tmp_path / f"run_rank{rank}.safetensors", {"w": array})
    monkeypatch.setattr(blocks, "LARGE", 1)
    options = syncheck.Options(jobs=4)
    usual = syncheck.compare(str(tmp_path), options=options)
    real_start = threading.Thread.start
    for limit in (0, 1):
        threads: list[threading.Thread] = []

        def start(thread: threading.Thread, limit: int = limit, threads: list[threading.Thread] = threads) -> None:
            if len(threads) == limit:
                raise RuntimeError("can't start new thread")
            threads.append(thread)
            real_start(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        assert syncheck.compare(str(tmp_path), options=options) == usual
        assert len(threads) == limit
    assert usual.groups[0].tensors[0].clusters == ((0, 2), (1,))


@pytest.mark.slow
def test_no_room_for_a_thread(shell: Shell, tmp_path: Path) -> None:
    """A limit without memory for the stack of a second thread does not change the result."""
    for rank in range(2):
        save_safetensors(tmp_path / f"large_rank{rank}.safetensors", {"w": np.full(8 << 20, rank, np.float32)})
    command = "syncheck compare large_rank0.safetensors large_rank1.safetensors --jobs 4"
    usual = shell(command)
    assert usual[0] == 1
    assert shell(f"ulimit -s 900000; ulimit -v 800000; {command}") == usual


def print_on_terminal(columns: str, shell: Shell, command: str, **environment: str) -> str:
    """Return the output of a command on a terminal, without colours."""
    script = f"script -qec 'stty cols {columns} 2>/dev/null; {command}' /dev/null"
    _, out, _ = shell(script, **({"TERM": "xterm-256color"} | environment))
    # Colours, and on a busy machine the progress, which disappears before the report.
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert re.findall(r"[^\x20-\x7e\r\n\x80-\U0010ffff]", text) == []
    return text.replace("\r", "")


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["1", "3", "20", "80", "200", "5000"])
def test_terminals_of_all_widths(shell: Shell, columns: str) -> None:
    """No text is lost at any width, and from 80 columns on no line is wider than the terminal."""
    text = print_on_terminal(columns, shell, COMPARE)
    assert measure_width(text.splitlines()) <= max(int(columns), 79)
    assert "OUTOFSYNC" in re.sub(r"\s", "", text)
    assert "".join(LAST.split()) in re.sub(r"\s", "", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{"COLUMNS": "x"}, {"COLUMNS": "0"}, {"COLUMNS": "-5"}, {"TERM": ""}, {"TERM": "dumb"}, {"TERM": "nothing"}],
    ids=str,
)
def test_terminals_with_invalid_settings(shell: Shell, environment: dict[str, str]) -> None:
    """A terminal of unknown type or width is treated as a terminal of 80 columns or as a pipe."""
    text = print_on_terminal("80", shell, COMPARE, **environment)
    assert text.splitlines()[-1] == LAST


def test_no_memory_for_the_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """If memory runs out again while an error is reported, the exit code is 2 and not Python's 1."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cli, "_run_command", fail)
    monkeypatch.setattr(output, "print_message", fail)
    assert cli.main([]) == 2
    assert capfd.readouterr().err == "syncheck: error: out of memory\n"
