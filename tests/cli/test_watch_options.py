"""The command line of `syncheck watch`: options before the script, and everything after it is the script's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from syncheck.live.watching.launching import describe_launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import sys; print(sys.argv[1:], __name__, sys.path[0]); sys.exit(int(sys.argv[1]))"


def watch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder with a script."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "syncheck", "watch", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no script"),
        (["nothing.py"], "nothing.py: no such script"),
        (["--every"], "--every: expected one argument"),
        (["--every", "-1", "script.py"], "--every -1: must be at least 0"),
        (["--patience", "nan", "script.py"], "--patience nan: must be a number of seconds"),
        (["--evry", "3", "script.py"], "--evry"),
        (
            ["--witnesses", "batch", "script.py"],
            "--witnesses batch: must be one of gradients, parameters, batches, rng, settings, none",
        ),
        (["--allow", "SYN999", "script.py"], "SYN999"),
        (["-o", "page.pdf", "script.py"], "page.pdf: unknown file extension"),
        (["-m", "no_module"], "-m no_module: no such module"),
        (["-o", "nowhere/page.html", "script.py"], "nowhere/page.html: cannot be written"),
        (["--events", "nowhere/events.jsonl", "script.py"], "nowhere/events.jsonl: cannot be written"),
        (["--events", "script.py", "script.py"], "script.py: "),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, arguments: list[str], part: str) -> None:
    """Wrong options end with exit code 2 and one line, before the script runs."""
    result = watch(tmp_path, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert part in result.stderr


def test_the_help_has_whole_commands_and_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 80 columns the command to copy is one line, and the kinds of tensors and the source of codes are listed."""
    monkeypatch.setenv("COLUMNS", "80")
    result = watch(tmp_path, "--help")
    assert result.returncode == 0
    assert "  torchrun --nproc-per-node 8 -m syncheck watch train.py\n" in result.stdout
    words = " ".join(result.stdout.split())
    assert "params, buffers, optimizer, rng" in words
    assert "syncheck explain" in words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["script.py", "0", "--every", "x"], ["0", "--every", "x"]),
        (["--every=5", "--strict", "script.py", "3"], ["3"]),
        (["--allow", "SYN201", "--", "script.py", "0"], ["0"]),
        (["-m", "script", "4", "--help"], ["4", "--help"]),
    ],
)
def test_the_script_gets_its_arguments_and_gives_its_exit_code(
    tmp_path: Path, arguments: list[str], given: list[str]
) -> None:
    """The script is __main__, its folder is searched first, and its exit code is that of the command."""
    result = watch(tmp_path, *arguments)
    assert result.returncode == int(given[0]), result.stderr
    assert result.stdout == f"{given} __main__ {tmp_path}\n"


@pytest.mark.parametrize(
    ("error", "variable"),
    [
        (KeyError("LOCAL_RANK"), "LOCAL_RANK"),
        (ValueError("env:// rendezvous: environment variable RANK expected, but not set"), "RANK"),
        (ValueError("environment variable MASTER_ADDR expected, but not set"), "MASTER_ADDR"),
        (KeyError("rank"), None),
        (ValueError("RANKS of the tensor"), None),
        (RuntimeError("RANK"), None),
    ],
)
def test_a_script_without_its_launcher_names_the_launch(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, variable: str | None
) -> None:
    """Only a missing variable of a launcher does; the command has all options, and a launched rank has no advice."""
    monkeypatch.delenv("RANK", raising=False)
    command = ["watch", "--every", "5", "my script.py", "--epochs", "3"]
    advice = describe_launch(error, command)
    if variable is None:
        assert advice is None
        return
    assert advice is not None
    assert advice.startswith(f"the script expects {variable} ")
    assert advice.endswith("torchrun --nproc-per-node 2 -m syncheck watch --every 5 'my script.py' --epochs 3")
    monkeypatch.setenv("RANK", "0")
    assert describe_launch(error, command) is None


@pytest.mark.slow
def test_the_launch_is_printed_after_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of torchrun that is watched alone ends with its error, and then one line with the right command."""
    pytest.importorskip("torch")
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    result = watch(tmp_path, "train.py", "--lr", "1")
    assert result.returncode == 1
    assert "environment variable RANK expected" in result.stderr
    assert "torchrun --nproc-per-node 2 -m syncheck watch train.py --lr 1" in result.stdout + result.stderr


@pytest.mark.slow
def test_the_script_is_found_as_python_finds_it(tmp_path: Path) -> None:
    """`__file__`, sys.argv, sys.path and annotations are those of `python SCRIPT`, also for a link."""
    (tmp_path / "folder").mkdir()
    # Found beside the file, not beside the link.
    (tmp_path / "folder" / "link.py").touch()
    program = tmp_path / "folder" / "__main__.py"
    program.write_text(
        "import sys, link\nsize: int = 1\nprint(__file__, sys.argv, sys.path[0], __annotations__, __spec__, dir())\n"
    )
    (tmp_path / "link.py").symlink_to(program)
    for target in ("folder/__main__.py", "./link.py"):
        expected = subprocess.run([sys.executable, target], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert watch(tmp_path, target).stdout == expected.stdout


@pytest.mark.slow
def test_only_the_first_rank_needs_the_folder_of_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other nodes write no file, so their script runs."""
    pytest.importorskip("torch")
    monkeypatch.setenv("RANK", "1")
    assert watch(tmp_path, "-o", "nowhere/page.html", "script.py", "5").returncode == 5
