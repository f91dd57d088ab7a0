"""Record `syncheck demo` in a terminal as an animated picture: `python docs/record_demo.py` writes docs/demo.svg.

The demo runs in a pseudo-terminal and trains for about a minute; it needs the extra `train`. The picture has the lines
of the terminal and one CSS animation, and no script. Each line is stored once, however many frames have it.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from html import escape
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
COLUMNS, ROWS = 100, 30
# Pixels of a character, and of the frame around all lines.
WIDTH, HEIGHT, MARGIN = 8.4, 18, 12
# Seconds of the recording between two frames, and the longest pause in it; lines that are new in one frame.
SHORTEST, LONGEST = 0.5, 1.5
MOST_LINES = 8
# The picture runs faster than the recording, and longer on a frame for each line that is new, up to a limit.
SPEED = 3.0
SECONDS_PER_LINE, MOST_SECONDS = 0.12, 4.0
# Seconds of the last frame, before the picture starts again.
LAST = 8.0
TEXT, BACKGROUND = "#d0d7de", "#0d1117"
# The colors of a terminal by the second digit of their code, first normal, then bright.
NORMAL = ("#6e7681", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#d0d7de")
BRIGHT = ("#8b949e", "#ffa198", "#56d364", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#ffffff")
# Steps of a color in the cube of 256 colors, and the codes of its parts.
CUBE = (0, 95, 135, 175, 215, 255)
FIRST_OF_CUBE, FIRST_GRAY = 16, 232
_ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Chunk(NamedTuple):
    """Output of the demo, with the seconds since its start."""

    seconds: float
    data: bytes


class Style(NamedTuple):
    """The style of a character."""

    color: str = ""
    is_bold: bool = False
    is_dim: bool = False

    @property
    def css(self) -> str:
        """The declarations of the style."""
        declarations = []
        if self.color:
            declarations.append(f"fill:{self.color}")
        if self.is_bold:
            declarations.append("font-weight:bold")
        if self.is_dim:
            declarations.append("opacity:.6")
        return ";".join(declarations)


Cell = tuple[str, Style]
Row = tuple[Cell, ...]


class Frame(NamedTuple):
    """The rows of the terminal from a time of the recording on."""

    seconds: float
    line_count: int
    """All lines until now, with those that were scrolled out."""
    rows: tuple[Row, ...]


class Screen:
    """A terminal: text, carriage returns, a cursor that goes up, erased lines, and colors."""

    def __init__(self) -> None:
        self.lines: list[list[Cell]] = [[]]
        self._row = self._column = 0
        self._style = Style()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete = ""

    def write(self, data: bytes) -> None:
        """Add output, which may end within a character or an escape sequence."""
        text = self._incomplete + self._decoder.decode(data)
        self._incomplete = ""
        position = 0
        while position < len(text):
            if text[position] != "\x1b":
                self._write_character(text[position])
                position += 1
                continue
            match = _ESCAPE.match(text, position)
            if match is None:
                # The next output has its end.
                self._incomplete = text[position:]
                return
            self._obey(match[1], match[2])
            position = match.end()

    def show(self) -> tuple[Row, ...]:
        """Return the last rows."""
        return tuple(tuple(line) for line in self.lines[-ROWS:])

    def _write_character(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._go_down()
        elif character.isprintable():
            if self._column == COLUMNS:
                self._column = 0
                self._go_down()
            line = self.lines[self._row]
            # The cursor may be right of the end of the line.
            line += [(" ", Style())] * (self._column - len(line))
            line[self._column : self._column + 1] = [(character, self._style)]
            self._column += 1

    def _go_down(self) -> None:
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append([])

    def _obey(self, parameters: str, command: str) -> None:
        """Obey an escape sequence; sequences that change no text, like hiding the cursor, are ignored."""
        if command == "A":
            self._row = max(0, self._row - int(parameters or 1))
        elif command == "K":
            # 2 erases the line, 0 the part right of the cursor.
            end = 0 if parameters == "2" else self._column
            del self.lines[self._row][end:]
        elif command == "m":
            self._set_style([int(code or 0) for code in parameters.split(";")])

    def _set_style(self, codes: list[int]) -> None:
        style = self._style
        while codes:
            code = codes.pop(0)
            if code == 0:
                style = Style()
            elif code == 1:
                style = style._replace(is_bold=True)
            elif code == 2:
                style = style._replace(is_dim=True)
            elif code == 38:
                style = style._replace(color=_read_color(codes))
            elif code // 10 in (3, 9) and code % 10 < 8:
                colors = NORMAL if code < 90 else BRIGHT
                style = style._replace(color=colors[code % 10])
        self._style = style


def _read_color(codes: list[int]) -> str:
    """Remove the color from the codes after 38, and return it: red, green and blue, or the number of a color."""
    if codes.pop(0) == 2:
        red, green, blue = codes[:3]
        del codes[:3]
        return f"#{red:02x}{green:02x}{blue:02x}"
    number = codes.pop(0)
    if number >= FIRST_GRAY:
        level = 8 + 10 * (number - FIRST_GRAY)
        return f"#{level:02x}{level:02x}{level:02x}"
    if number >= FIRST_OF_CUBE:
        number -= FIRST_OF_CUBE
        return f"#{CUBE[number // 36]:02x}{CUBE[number // 6 % 6]:02x}{CUBE[number % 6]:02x}"
    return (*NORMAL, *BRIGHT)[number]


def record() -> list[Chunk]:
    """Run the demo in a pseudo-terminal, and return its output. Raises SystemExit if the demo fails."""
    environment = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(HERE.parent)}
    chunks = [Chunk(0.0, b"\x1b[1m$ syncheck demo\x1b[0m\r\n")]
    with tempfile.TemporaryDirectory() as folder:
        process, terminal = pty.fork()
        if not process:
            os.chdir(folder)
            os.environ.update(environment, COLUMNS=str(COLUMNS), LINES=str(ROWS))
            os.execv(sys.executable, [sys.executable, "-m", "syncheck", "demo"])
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        start = time.monotonic()
        while True:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:
                # Linux reports the end of a terminal as an error.
                break
            chunks.append(Chunk(time.monotonic() - start, data))
        _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit("the demo failed:\n" + b"".join(chunk.data for chunk in chunks).decode(errors="replace"))
    return chunks


def make_frames(chunks: list[Chunk]) -> list[Frame]:
    """Return the states of the terminal: at least SHORTEST seconds or MOST_LINES lines apart, and the last one."""
    screen = Screen()
    frames: list[Frame] = []
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        # Many lines at once would scroll out before anybody can read them.
        for line in chunk.data.splitlines(keepends=True):
            screen.write(line)
            if frames and len(screen.lines) - frames[-1].line_count >= MOST_LINES:
                frames.append(Frame(chunk.seconds, len(screen.lines), screen.show()))

        is_replaced = following is not None and frames and following.seconds - frames[-1].seconds < SHORTEST
        if not is_replaced:
            frames.append(Frame(chunk.seconds, len(screen.lines), screen.show()))
    return frames


def choose_durations(frames: list[Frame]) -> list[float]:
    """Return the seconds of each frame in the picture: quick while a bar moves, slow enough to read new lines."""
    durations = []
    line_count = 0
    for frame, following in pairwise(frames):
        pause = min(LONGEST, following.seconds - frame.seconds) / SPEED
        reading = min(MOST_SECONDS, SECONDS_PER_LINE * (frame.line_count - line_count))
        durations.append(max(pause, reading))
        line_count = frame.line_count
    return [*durations, LAST]


def draw(frames: list[Frame]) -> str:
    """Return the SVG, a strip of all frames behind a window that moves along it."""
    numbers: dict[Row, int] = {}
    styles: dict[str, int] = {}
    drawn_frames = []
    width = round(COLUMNS * WIDTH + 2 * MARGIN)
    for position, frame in enumerate(frames):
        uses = []
        for y, row in enumerate(frame.rows, 1):
            if row:
                number = numbers.setdefault(row, len(numbers))
                uses.append(f'<use href="#r{number}" y="{y * HEIGHT}"/>')
        drawn_frames.append(f'<g transform="translate({position * width})">{"".join(uses)}</g>')

    rows = [_draw_row(row, number, styles) for row, number in numbers.items()]
    style_rules = [f".s{number}{{{css}}}" for css, number in styles.items()]
    durations = choose_durations(frames)
    total = sum(durations)
    keyframes = []
    elapsed = 0.0
    for position, duration in enumerate(durations):
        keyframes.append(f"{elapsed / total:.3%}{{transform:translateX({-position * width}px)}}")
        elapsed += duration

    last = -(len(frames) - 1) * width
    height = ROWS * HEIGHT + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>A recording of syncheck demo</title>",
        "<style>",
        f"text{{font:14px ui-monospace,Menlo,Consolas,monospace;fill:{TEXT};white-space:pre}}",
        *style_rules,
        f"@keyframes play{{{''.join(keyframes)}}}",
        f"#strip{{animation:play {total:.1f}s step-end infinite}}",
        # A reader who prefers no motion gets the result.
        f"@media (prefers-reduced-motion:reduce){{#strip{{animation:none;transform:translateX({last}px)}}}}",
        "</style>",
        f"<defs>{''.join(rows)}</defs>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        f'<svg x="{MARGIN}" y="{MARGIN // 2}" width="{width - MARGIN}" height="{height}"><g id="strip">',
        *drawn_frames,
        "</g></svg>",
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def _draw_row(row: Row, number: int, styles: dict[str, int]) -> str:
    """Return the text of a row. styles: the number of each style until now."""
    spans = []
    column = 0
    for style, cells in groupby(row, key=itemgetter(1)):
        text = "".join(character for character, _ in cells)
        attributes = ""
        if style.css:
            attributes = f' class="s{styles.setdefault(style.css, len(styles))}"'
        # A position for each span, because the font of a reader may have another width.
        if text.strip():
            spans.append(f'<tspan x="{column * WIDTH:.4g}"{attributes}>{escape(text.rstrip(), quote=False)}</tspan>')
        column += len(text)
    return f'<text id="r{number}">{"".join(spans)}</text>'


if __name__ == "__main__":
    (HERE / "demo.svg").write_text(draw(make_frames(record())), encoding="utf-8")
