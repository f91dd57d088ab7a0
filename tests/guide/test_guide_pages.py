"""The files and commands of each page of docs/guide run, and print the output on the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from pages import GUIDE, ROOT, Command, commands, matches, read
from support.started import CLONE

PAGES = sorted(GUIDE.glob("[0-9]*.md"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PAGES, ids=attrgetter("stem"))
def test_a_page_runs(path: Path, tmp_path: Path) -> None:
    """The commands of a page, typed in order, print its output and end with its exit codes."""
    for name in ("train", "syncheck", "fixtures", "pyproject.toml"):  # as in a clone
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": CLONE, "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1", "COLUMNS": "100", "PYTHONWARNINGS": "ignore",
        # torchrun's agents log an error at the end of a good run if the agent with the store leaves first.
        "TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL",
    }  # fmt: skip
    for step in read(path).steps:
        if not isinstance(step, Command):
            (tmp_path / step[0]).write_text(step[1], encoding="utf-8")
            continue
        # gloo aborts a process now and then when the interpreter ends, after the script's last line.
        for _ in range(4):
            with (tmp_path / "printed").open("w+") as out:
                done = subprocess.run(
                    ["bash", "-o", "pipefail", "-c", step.typed], cwd=tmp_path, env=environment,
                    stdout=out, stderr=subprocess.STDOUT, timeout=300, check=False,
                )  # fmt: skip
                out.seek(0)
                printed = out.read()
            if "terminate called without an active exception" not in printed:
                break
        assert done.returncode == step.code, f"$ {step.typed}\n{printed}"
        assert matches(step.printed, printed), f"$ {step.typed}\n{printed}\nthe page says\n" + "\n".join(step.printed)


@pytest.mark.parametrize("path", PAGES, ids=attrgetter("stem"))
def test_a_page_is_whole(path: Path) -> None:
    """The test that runs a page uses all of its code, and the page links to code in train/."""
    assert read(path).others == []
    assert "](../../train/" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=attrgetter("stem"))
def test_a_page_can_be_learned_from(path: Path) -> None:
    """A page begins with its aims and requirements, has a picture, and exercises with as many answers."""
    text = path.read_text(encoding="utf-8")
    paragraphs = text.split("\n\n")[1:3]
    if paragraphs[0].startswith("English | "):  # the switch of a page with a translation
        del paragraphs[0]
    assert paragraphs[0].startswith("**You will learn** ")
    assert "**You need** " in paragraphs[0].replace("\n", " ")
    assert "](pictures/" in text
    questions, answers = text.partition("\n## Exercises\n")[2].split("<details><summary>Answers</summary>")
    answers = answers.partition("</details>")[0]
    counts = [len(re.findall(r"^\d\. ", part, re.MULTILINE)) for part in (questions, answers)]
    assert counts[0] == counts[1] >= 2
    assert len(text.splitlines()) <= 250


def test_output_must_equal_the_page() -> None:
    """`...` stands for any lines or characters; any other difference fails."""
    (command,) = commands("$ echo one \\\n    two  # exit code 3\nloss 0.5 after ...s\n...\nlast\n")
    assert (command.typed, command.code) == ("echo one two  # exit code 3", 3)
    assert matches(command.printed, "loss 0.5 after 12.3s\nanything\nat all\nlast\n")
    assert matches(command.printed, "loss 0.5 after 12.3s\nlast\n")
    assert not matches(command.printed, "loss 0.6 after 12.3s\nlast\n")
    assert not matches(command.printed, "loss 0.5 after 12.3s\nlast\nmore\n")
    assert not matches(("one",), "")
