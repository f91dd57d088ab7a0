"""The commands of docs/reference/exit-codes.md have the listed exit codes, and the linked tests exist."""

from __future__ import annotations

import ast
import glob
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.listings import list_codes, list_fields, map_fields

from syncheck.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (.+) \| (\d+) \| (?:`(.+)`|\[(\w+)\]\((\S+)\)) \|$", re.MULTILINE)
ROWS = [(what, int(code), command, test, path) for what, code, command, test, path in _ROW.findall(PAGE)]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a link to the fixtures, as the current folder."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def split_command(command: str) -> list[str]:
    """Split a command as a shell does, and expand unquoted globs."""
    words = []
    for word in re.findall(r"'[^']*'|\S+", command)[1:]:
        words += shlex.split(word) if "'" in word or "*" not in word else sorted(glob.glob(word))
    return words


def test_every_row_is_parsed() -> None:
    """The pattern of the tests below matches every row with a code and a proof."""
    proofs = [line for line in PAGE.splitlines() if line.startswith("|") and ("| `" in line or "](../../tests" in line)]
    assert len(ROWS) == len(proofs) > 45


def test_exit_codes_of_commands(clone: Path, cli: Callable[..., Done]) -> None:
    """Each syncheck command of the tables exits with its code, in a folder with the fixtures."""
    commands = {command: code for _, code, command, _, _ in ROWS if command.startswith("syncheck")}
    assert len(commands) > 25
    ended = {command: cli(*split_command(command)) for command in commands}
    assert map_fields(ended, "code") == commands
    assert not any("Traceback" in done.err for done in ended.values())
    assert sorted(os.listdir(clone)) == ["fixtures", "known.json", "more", "prints"]


@pytest.mark.slow
def test_exit_codes_of_pytest_sessions(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pytest command of the tables exits with its code, and an interrupted session with 2."""
    requested = [(split_command(command), code) for _, code, command, _, _ in ROWS if command.startswith("pytest")]
    assert set(list_fields(requested, 1)) == {0, 1, 4, 5}
    (clone / "interrupting.py").write_text(
        "import os, signal\n\ndef pytest_runtest_call(item):\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    write = ["--baseline", "known.json", "--update-baseline"]
    assert main(["compare", "fixtures/desync/bn_local_stats", "-q", *write]) == 0
    requested.append((["-p", "interrupting", "--syncheck", "fixtures/in_sync/sync_bn"], 2))
    for folder in (ROOT / "tests" / "pytest_plugin", clone):
        monkeypatch.syspath_prepend(folder)
    from support.sessions import sessions

    ended = sessions(*((clone, ["-p", "no:cacheprovider", *words]) for words, _ in requested))
    assert list_codes(ended) == list_fields(requested, 1)
    assert " passed" not in ended[-1].out


def test_linked_tests_exist() -> None:
    """Each linked file defines the test in the link text."""
    for _, _, _, test, path in ROWS:
        if test:
            tree = ast.parse((ROOT / "docs" / "reference" / path).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_closed_pipe_is_141(clone: Path) -> None:
    """A closed stdout is exit code 141 with nothing on stderr, neither a verdict nor a crash."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "syncheck", "explain", "SYN201"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=clone, stdout=write, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("folder", "codes", "says"),
    [
        ("in_sync/sync_bn", [0, 0], "in sync"),
        ("desync/bn_local_stats", [0, 1], "out of sync: do not resume from a rank's own file"),
        ("in_sync/nowhere", [2, 2], "could not tell (2)"),
    ],
)
def test_shell_examples(clone: Path, folder: str, codes: list[int], says: str) -> None:
    """Both scripts have the expected exit codes under `set -e`, in sync, out of sync and undecided."""
    bin_folder = clone / "bin"
    bin_folder.mkdir()
    (bin_folder / "syncheck").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m syncheck "$@"\n')
    (bin_folder / "syncheck").chmod(0o755)
    environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = []
    for script in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        text = script.replace("ckpts/*.pth", f"fixtures/{folder}/*.pth")
        done.append(subprocess.run(["bash", "-ec", text], capture_output=True, text=True, env=environment, check=False))
    assert list_fields(done, "returncode") == codes
    assert done[0].stdout.splitlines() == [says]
