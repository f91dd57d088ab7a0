"""Names in any script, and names with a special meaning for terminals, CI, HTML, Markdown or shells."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len
from support.browser import opened
from support.checkpoints import Done, save_pth, save_safetensors
from support.hostile_names import FILES, NAMES, shorten
from support.listings import find_all, is_printable, list_fields, list_names
from support.states import omit

from syncheck.options import EXTENSIONS
from syncheck.report.long_names import shorten_name
from syncheck.text import logged, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., Done]

OUTPUTS = [f"--output=out{ending}" for ending in EXTENSIONS]
QUICK = ["\n::set-output name=a::b", "\udcff\udcfe"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FILES if name not in QUICK]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def save_ranks(names: list[str], first: str = "run_rank0.pth", second: str = "run_rank1.pth") -> tuple[str, str]:
    """Write two ranks whose tensors all differ, with the names also in values and in the metadata."""
    for rank, path in enumerate((first, second)):
        tensors = {name: np.full(2, rank + i, np.float32) for i, name in enumerate(names)}
        metadata = {
            "schema": 1,
            "rank": rank,
            "world_size": 2,
            "run": "run",
            "method": names[0],
            "host": names[0] + str(rank),
        }
        values = {"epoch": f"{names[0]}{rank}", names[-1]: names[0], f"{names[-1]}{rank}": "on this rank only"}
        save_pth(Path("made.pth"), {"model": tensors, "syncheck": metadata} | values)
        os.rename("made.pth", path)
    return first, second


def is_harmless(text: str) -> bool:
    """Return whether a text has only printable lines and colours, and no commands for a terminal or a CI runner."""
    plain = COLOURS.sub("", text)
    commands = [line for line in plain.split("\n") if line.strip().startswith("::") or re.search(r"##\w*\[", line)]
    return is_printable(plain) and not commands


def check_documents(cli: Run, paths: tuple[str, str], names: list[str]) -> None:
    """Write every format, and parse each document."""
    done = cli("compare", "--no-config", *OUTPUTS, "--", *paths)
    assert (done.code, done.err.count("\n")) == (1, len(EXTENSIONS))
    assert is_harmless(done.out)
    texts = {}
    for ending in EXTENSIONS:
        with open(f"out{ending}", encoding="utf-8") as file:
            texts[ending] = file.read()
    (group,) = json.loads(texts[".json"])["groups"]
    assert set(list_names(group["tensors"])) == {f"{name}" for name in names}
    assert list_fields(group["replicas"], "path") == list(paths)
    root = ET.fromstring(texts[".xml"])
    assert set(list_fields(root.iter(), "tag")) <= {
        "testsuites", "testsuite", "properties", "property", "testcase", "failure", "system-out",
    }  # fmt: skip
    for ending in (".json", ".md", ".txt", ".xml"):
        assert is_harmless(texts[ending]), ending
    tokens = MarkdownIt("js-default").parse(texts[".md"])
    for token in tokens:
        assert not {"link_open", "image", "html_inline"} & set(list_fields(token.children or [], "type"))
    blocks = "".join(list_fields(find_all(tokens, type="html_block"), "content"))
    assert set(re.sub(r"\d+", "N", blocks).splitlines()) <= {
        "<details><summary>N tensors, worst first</summary>", "</details>",
    }  # fmt: skip
    page = texts[".html"]
    assert is_printable(page)
    for name in names:
        assert logged(shorten_name(name)) in logged(texts[".txt"])


def check_streams(cli: Run, paths: tuple[str, str]) -> None:
    """Run every command, with and without colours, and the format without a file extension."""
    inputs = ("--no-config", "--", *paths)
    commands = [("compare", "--color", "always", *inputs), ("report", "--color", "always", *inputs)]
    commands += [("show", "--", paths[0]), ("show", "--color", "always", "--", paths[0])]
    commands += [("show", "--format", "json", "--", paths[0]), ("fingerprint", "-o", "made.json", "--", paths[0])]
    for command in commands:
        done = cli(*command)
        assert done.code in (0, 1), done.err
        assert is_harmless(done.out), command
        assert is_harmless(done.err), command
    # Each annotation is a command on one line, and there are no other commands.
    lines = cli("compare", "--format", "github", *inputs).out.split("\n")
    assert all(line.isprintable() for line in lines)
    assert (
        sum(line.lstrip().startswith("::") for line in lines) == sum(line.startswith("::error ") for line in lines) == 1
    )
    # A fingerprint with hostile names can be compared.
    done = cli("compare", "--no-config", "--format", "json", "--group-by=", "--", "made.json", paths[1])
    assert done.code == 1, done.err


@pytest.mark.slow
def test_all_names_at_once(cli: Run) -> None:
    """With all names in one file, each command and format prints every name and executes no name."""
    names = list(dict.fromkeys(NAMES))
    paths = save_ranks(names)
    check_documents(cli, paths, names)
    check_streams(cli, paths)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=shorten)
def test_each_name(cli: Run, name: str) -> None:
    """Each name is harmless as the only name of a tensor, a value, a method and a host."""
    paths = save_ranks([name])
    check_documents(cli, paths, [name])
    check_streams(cli, paths)


@pytest.mark.parametrize("name", [*QUICK, *SLOW], ids=shorten)
def test_each_file_name(cli: Run, name: str) -> None:
    """Each name is harmless as the name of a file and of a folder, and as an option and an argument."""
    os.mkdir(name)
    paths = save_ranks(["w"], f"{name}/{name}_rank0.pth", f"{name}/{name}_rank1.pth")
    check_documents(cli, paths, ["w"])
    for command in (("compare", "--", name), ("report", "--no-config", "--color", "always", "--", name)):
        done = cli(*command)
        assert done.code == 1, done.err
        assert is_harmless(done.out)
    done = cli("fingerprint", f"--output={name}/made.json", "--", paths[0])
    assert (done.code, done.out) == (0, "")
    assert is_harmless(done.err)
    with open(f"{name}/broken_rank2.pth", "w") as file:
        file.write("x")
    done = cli("compare", "--", name)
    assert done.code == 1
    assert is_harmless(done.out)
    assert is_harmless(done.err)
    assert done.err.count("\n") == 1
    # Errors about wrong usage repeat the typed name.
    for wrong in (
        ("compare", f"--{name}"),
        ("compare", f"--format={name}", "a"),
        ("explain", "--", name),
        (f"no{name}",),
    ):
        done = cli(*wrong)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert is_harmless(done.err)


@pytest.mark.parametrize("pattern", ["(", "it's (", "a b$(touch bad)(", '"`touch bad`(', "~/*(", "-x(", "\\(("])
def test_an_option_in_an_error_is_quoted(cli: Run, pattern: str) -> None:
    """An error message starts with the wrong option and its value as an argument that a shell reads back."""
    done = cli("compare", "a.pth", "b.pth", f"--group-by={pattern}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"syncheck: error: --group-by {shlex.quote(pattern)}: not a regular expression")


@pytest.mark.slow
def test_in_a_browser(cli: Run, tmp_path: Path) -> None:
    """In a browser, a page of all names has no new script, link, picture or console message, and shows every name."""
    names = [name for name in dict.fromkeys(NAMES) if 0 < len(name) < 200]
    assert cli("compare", *save_ranks(names), "-n", "0", "-o", "out.html").code == 1
    before = (tmp_path / "out.html").read_text()
    with opened(tmp_path / "out.html") as (page, messages):
        document = page.content()
        links = page.evaluate("[...document.querySelectorAll('a')].map((each) => each.getAttribute('href'))")
        page.locator(".chart").first.hover()
        assert messages == []
    assert document.count("<script") == before.count("<script")
    assert not re.search(r"<(img|iframe|object|embed)", document)
    assert [link for link in links if not link.startswith("#")] == []
    output = html.unescape(re.sub(r"<[^>]*>", "", document))
    missing = [name for name in names if one_line(name) not in output]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("columns", [20, 80, 200])
def test_on_a_real_terminal(cli: Run, tmp_path: Path, columns: int) -> None:
    """A terminal receives only text, line breaks and colours; from 80 columns on, lines fit the terminal."""
    names = [name for name in dict.fromkeys(NAMES) if len(name) < 500]
    save_ranks(names)
    command = f"{sys.executable} -m syncheck compare run_rank0.pth run_rank1.pth -n 0"
    done = subprocess.run(
        ["script", "-qec", f"stty cols {columns}; {command}", "/dev/null"],
        cwd=tmp_path, capture_output=True, timeout=60,
        env=omit(os.environ, "COLUMNS", "NO_COLOR") | {"TERM": "xterm"}, check=False,
    )  # fmt: skip
    text = COLOURS.sub("", done.stdout.decode()).replace("\r\n", "\n")
    assert done.returncode == 1
    assert is_printable(text)
    if columns >= 80:
        assert max(cell_len(line.rstrip()) for line in text.split("\n")) <= columns


@pytest.mark.slow
@pytest.mark.parametrize("count, length", [(2, 200_000), (300, 20_000), (20_000, 60)])
def test_long_names_and_many_names(cli: Run, tmp_path: Path, count: int, length: int) -> None:
    """With very long names and with very many names, the time and the size of every output are bounded."""
    tensors = [f"{i}.{'x' * length}" for i in range(count)]
    paths = ("run_rank0.safetensors", "run_rank1.safetensors")
    for rank, path in enumerate(paths):
        save_safetensors(tmp_path / path, {name: np.full(1, rank, np.float32) for name in tensors[:2000]})
    start = time.monotonic()
    assert cli("compare", *paths, *OUTPUTS).code == 1
    assert cli("compare", *paths, "--color", "always").code == 1
    assert cli("show", paths[0]).code == 0
    assert time.monotonic() - start < 60
    size = count * length
    for ending in EXTENSIONS:
        assert (tmp_path / f"out{ending}").stat().st_size < 20 * size + 2_000_000
