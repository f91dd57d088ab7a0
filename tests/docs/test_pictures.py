"""The pictures of README: a recording of the demo as an animated SVG, and a photograph of a report page."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from support.listings import find_texts

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    """Return docs/record_demo.py."""
    specification = importlib.util.spec_from_file_location("record_demo", DOCS / "record_demo.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Named tuples look up their module.
    sys.modules["record_demo"] = module
    specification.loader.exec_module(module)
    return module


def list_lines(screen: object) -> list[str]:
    """Return the texts of the lines of a screen."""
    return ["".join(character for character, _ in line) for line in screen.lines]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ("one\r\ntwo", ["one", "two"]),
        ("10%\r20%\r\n", ["20%", ""]),
        ("a\r\nbar\r\x1b[2K\x1b[1A\x1b[2Kend", ["end", ""]),
        ("long line\r\x1b[Kshort", ["short"]),
        ("\x1b[?25l\x1b[1;31mred\x1b[0m \u2501", ["red \u2501"]),
        ("x" * 101, ["x" * 100, "x"]),
    ],
)
def test_the_screen_of_a_terminal(recorder: ModuleType, output: str, lines: list[str]) -> None:
    """A screen obeys carriage returns, erased lines, a cursor that goes up and the width, also byte by byte."""
    whole, split = recorder.Screen(), recorder.Screen()
    whole.write(output.encode())
    for byte in output.encode():
        split.write(bytes([byte]))
    assert list_lines(whole) == list_lines(split) == lines


def test_the_styles_of_characters(recorder: ModuleType) -> None:
    """Colors of 16, of 256 and of all colors, bold and dim text have styles; a reset ends them."""
    screen = recorder.Screen()
    screen.write(b"\x1b[31ma\x1b[38;5;196mb\x1b[38;2;1;2;3mc\x1b[0m\x1b[1md\x1b[0;2me\x1b[mf")
    styles = [style.css for _, style in screen.lines[0]]
    assert styles == ["fill:#ff7b72", "fill:#ff0000", "fill:#010203", "font-weight:bold", "opacity:.6", ""]


def test_frames_of_a_recording(recorder: ModuleType) -> None:
    """A picture has the last state of quick changes, each row once, and text is never markup."""
    chunks = [recorder.Chunk(seconds, data) for seconds, data in ((0, b"$ a\r\n"), (0.1, b"1"), (0.2, b"\r</svg>"))]
    frames = recorder.make_frames(chunks)
    picture = ET.fromstring(recorder.draw(frames))
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    assert texts == ["$ a", "</svg>"]
    assert recorder.choose_durations(frames)[-1] == recorder.LAST


def test_the_recording_is_the_demo() -> None:
    """The committed recording is small, has no script, loads nothing, and shows the commands of the demo."""
    source = (DOCS / "demo.svg").read_text(encoding="utf-8")
    picture = ET.fromstring(source)
    assert len(source) < 300_000
    assert not re.search(r"<script|<image|url\(|@import", source)
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    for command in ("$ syncheck demo", "$ syncheck compare", "$ syncheck report"):
        assert find_texts(texts, command), command


def read_recording() -> str:
    """Return the texts of the recording without spaces: the lines of the terminal end within words."""
    picture = ET.fromstring((DOCS / "demo.svg").read_text(encoding="utf-8"))
    return remove_spaces("".join("".join(text.itertext()) for text in picture.iter(f"{SVG}text")))


def remove_spaces(text: str) -> str:
    """Return a text without white space."""
    return re.sub(r"\s", "", text)


def test_the_recording_has_the_lines_of_the_demo() -> None:
    """The recording has the constant parts of every line that the demo itself prints."""
    source = (ROOT / "syncheck" / "cli" / "demo.py").read_text(encoding="utf-8")
    parts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_print":
            constants = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
            parts += [remove_spaces(str(constant.value)) for constant in constants]
    recording = read_recording()
    assert len(parts) > 10
    assert [part for part in parts if part not in recording] == []


def test_the_recording_has_the_last_line_of_a_watched_run() -> None:
    """The recording has the verdict of `syncheck watch` in today's words."""
    rules = pytest.importorskip("syncheck.live.witnesses.rules")
    recording = read_recording()
    lines = [f"OUT OF SYNC: {rules.Seen.WATCHED(steps=20, checks=count)}" for count in range(1, 21)]
    assert [line for line in lines if remove_spaces(line) in recording]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return docs/make_pictures.py."""
    pytest.importorskip("syncheck.live.witnesses.rules")
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("make_pictures")


def test_the_check_of_pictures_includes_the_recording(pictures: ModuleType) -> None:
    """The recording has the cause, the fix and the columns of today's demo; another word in one of them is noticed."""
    recording = (DOCS / "demo.svg").read_text(encoding="utf-8")
    texts = pictures.list_constant_texts()
    assert len(texts) > 5
    assert pictures.find_stale_texts(recording, texts) == []
    for constant in texts:
        changed = constant.replace("e", "x")
        assert pictures.find_stale_texts(recording, [constant, changed]) == [changed], constant


def test_the_photograph_is_small() -> None:
    """The committed photograph of the report page is a PNG file of less than 200 kB."""
    content = (DOCS / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 200_000


def test_readme_is_short() -> None:
    """README has at most 130 lines, and both pictures."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert "](docs/demo.svg)" in text
    assert "](docs/report.png)" in text
