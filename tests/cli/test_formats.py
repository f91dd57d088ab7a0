"""`--format`: stdout in each format, typed or set in [tool.syncheck], also with hostile file names."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import Done, save, save_pth, select_summary
from support.listings import find_texts, is_printable, list_absent, list_fields

from syncheck.messages import Note
from syncheck.options import EXTENSIONS, FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., Done]

pytestmark = pytest.mark.usefixtures("two_ranks")
COUNTS = "14 tensors: 12 identical, 0 close, 2 different, 0 not compared"


def is_whole(name: str, text: str) -> None:
    """Assert that a text is a complete document of its format and reports SYN201."""
    assert "SYN201" in text
    if name == "json":
        assert json.loads(text)["verdict"] == "out_of_sync"
    elif name == "junit":
        assert ET.fromstring(text).attrib["failures"] == "1"
    elif name == "github":
        lines = text.splitlines()
        title = "SYN201 bn-local-stats (warning%2C consistent) on ranks 0-1%2C "
        assert lines[0].startswith(f"::error file=run_rank0.pth,title={title}")
        assert lines[1:] == ["OUT OF SYNC", COUNTS]
    elif name == "markdown":
        title, unaffected, counts, *_ = text.split("\n\n")
        assert (title, counts) == ("## syncheck: OUT OF SYNC", COUNTS)
        assert str(Note.RANK_0_UNAFFECTED()) in unaffected
    elif name == "html":
        assert text.startswith("<!doctype html>")
        assert text.rstrip().endswith("</html>")
    else:
        assert name == "text", f"add a check of a complete document in {name}"
        verdict, unaffected, _, counts = select_summary(text)
        assert (verdict, unaffected, counts) == ("OUT OF SYNC", str(Note.RANK_0_UNAFFECTED()), COUNTS)


@pytest.mark.parametrize("command", ["compare", "report"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_on_stdout(cli: Run, tmp_path: Path, name: str, command: str) -> None:
    """Each format is the only output on stdout, is the same if set in pyproject.toml, and is suppressed by -q."""
    typed = cli(command, "run_*.pth", "--format", name)
    assert (typed.code, typed.err) == (1, "")
    is_whole(name, typed.out)
    assert cli(command, "run_*.pth", "--format", name, "-q").out == ""
    assert cli(command, "run_*.pth", "--format", name, "--exit-zero") == Done(0, typed.out, "")
    (tmp_path / "pyproject.toml").write_text(f"[tool.syncheck]\nformat = '{name}'\n")
    assert cli(command, "run_*.pth").out == typed.out


def test_every_file_extension(cli: Run, tmp_path: Path) -> None:
    """One run writes a file for each file extension, equal to stdout of the same format except HTML and text.

    Only the JSON of this run has histograms, because they are collected for the page.
    """
    outputs = [f"--output=out{extension}" for extension in EXTENSIONS]
    assert cli("compare", "run_*.pth", "--format", "github", *outputs).code == 1
    for extension, name in EXTENSIONS.items():
        text = (tmp_path / f"out{extension}").read_text()
        is_whole(name, text)
        if name == "json":
            text, replaced = re.subn(r'"histogram": \{.*?\}', '"histogram": null', text, flags=re.DOTALL)
            assert replaced
        if name not in ("html", "text"):
            assert text == cli("compare", "run_*.pth", "--format", name).out


def test_help_and_errors_name_the_formats(cli: Run) -> None:
    """The help, and the errors for an invalid format and file extension, list the valid values."""
    bad_format = cli("compare", "run_*.pth", "--format", "xml")
    assert (bad_format.code, bad_format.out, bad_format.err.count("\n")) == (2, "", 1)
    assert not list_absent(bad_format.err, FORMATS)
    bad_extension = cli("compare", "run_*.pth", "-o", "out.junit")
    assert (bad_extension.code, bad_extension.out, bad_extension.err.count("\n")) == (2, "", 1)
    assert not list_absent(bad_extension.err, EXTENSIONS)
    help_text = re.sub(r"\s+", " ", cli("compare", "--help").out)
    assert f"{{{','.join(FORMATS)}}}" in help_text
    assert ", ".join(EXTENSIONS) in help_text


def test_every_format_is_documented() -> None:
    """The section Formats of docs/options.md has a row for each value of --format and for each file extension."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    lines = find_texts(page.split("\n## Formats\n")[1].split("\n## ")[0].splitlines(), start="| ")
    cells = re.split(r" \| |\| ", "".join(lines))
    assert {f"`{value}`" for value in (*FORMATS, *EXTENSIONS)} - set(cells) == set(), (
        "no row in docs/options.md, Formats"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_undecided_documents(cli: Run, tmp_path: Path, name: str) -> None:
    """An undecided verdict is a document too: for a single file, and for an unreadable file."""
    single = cli("compare", "run_rank0.pth", "--format", name)
    assert single.code == 2
    (tmp_path / "run_rank1.pth").write_text("no checkpoint")
    unreadable = cli("compare", "run_*.pth", "--format", name)
    assert unreadable.code == 2
    for done, reason in ((single, "no replica to compare with"), (unreadable, "run_rank1.pth")):
        if name == "junit":
            assert int(ET.fromstring(done.out).attrib["errors"]) > 0
        elif name == "json":
            assert json.loads(done.out)["verdict"] == "undecided"
        else:
            # The reason of an unreadable file is on stderr beside a text for people.
            assert reason in done.out + done.err
            assert (name != "github") or done.out.startswith("::error ")


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_files(cli: Run, tmp_path: Path, name: str) -> None:
    """Names of tensors and files cannot control the terminal or the CI runner, or close an XML element."""
    evil = "x]]></failure>\x1b[31m\n::add-mask::y,%0A\r##[error]\u202e@team"
    for rank in range(2):
        save_pth(tmp_path / f"a,b::c%\x1b[2J\n::error::_rank{rank}.pth", {evil: np.full(2, rank, np.float32)})
    done = cli("compare", "a*.pth", "--format", name)
    assert done.code == 1
    assert is_printable(done.out)
    assert "\n::add-mask" not in done.out
    assert "\n::error::" not in done.out
    if name == "junit":
        root = ET.fromstring(done.out)
        assert list_fields(list_fields(root.iter("testcase"), "attrib"), "name") == ["parameters"]
        assert "x]]></failure>" in str(root.findtext("testsuite/testcase/failure"))
    if name == "github":
        (line,) = find_texts(done.out.splitlines(), start="::")
        assert line.startswith(r"::error file=a%2Cb%3A%3Ac%25\x1b[2J\n%3A%3Aerror%3A%3A_rank")
        assert line.count("::", 2, line.index(",title=")) == 0


@pytest.mark.slow
def test_plain_locale(shell: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """With LANG=C, the output is complete even for names outside ASCII."""
    for rank in range(2):
        save(tmp_path / f"rank{rank}.pth", {"gewicht\u00e4\u4e2d": np.full(2, rank, np.float32)})
    environment = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name in ("text", "junit", "github", "markdown"):
        code, out, err = shell(f"syncheck compare rank0.pth rank1.pth --format {name}", **environment)
        assert (code, err) == (1, "")
        assert "gewicht" in out
        if name == "junit":
            assert "gewicht\u00e4\u4e2d" in str(ET.fromstring(out).findtext("testsuite/testcase/failure"))
