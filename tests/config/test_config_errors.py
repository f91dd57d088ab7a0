"""Errors in [tool.syncheck] of pyproject.toml."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from project_file import write

from syncheck import config
from syncheck.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


# Values of another type or outside of the range, as Python prints them.
WRONG = [
    ("only", "'params'"), ("allow", "[201]"), ("checkpoints", "'ckpts'"), ("ulp", "1.5"), ("ulp", "False"),
    ("ulp", "-1"), ("group-by", "['x']"), ("jobs", "0"), ("jobs", "'all'"), ("reference", "[0]"),
    ("reference", "True"), ("quick", "1"), ("close", "'yes'"), ("tolerance", "0.001"), ("exit-zero", "1"),
    ("format", "'yaml'"), ("format", "3"), ("color", "True"), ("output", "'x.json'"), ("limit", "-1"),
    ("limit", "1.0"), ("limit", "True"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        *((f"{key} = {text.lower()}", [f"tool.syncheck.{key} = {text}: must be"]) for key, text in WRONG),
        ("alow = ['SYN201']", ["tool.syncheck.alow: unknown key", "allow", "group-by"]),
        ("group_by = 'x'", ["tool.syncheck.group_by: unknown key"]),
        ("rtol = '1e-3'\natol = 0", ["tool.syncheck.rtol = '1e-3': must be"]),
        ("atol = true\nrtol = 0", ["tool.syncheck.atol = True: must be"]),
        ("[tool.syncheck.allow]\ncode = 1", ["tool.syncheck.allow = {'code': 1}: must be"]),
        ("allow = ['SYN999']", ["tool.syncheck.allow = 'SYN999': no such code"]),
        ("only = ['weights']", ["tool.syncheck.only = 'weights': must be", "params"]),
        ("rtol = 0.1", ["tool.syncheck.rtol and tool.syncheck.atol belong together"]),
        ("rtol = 2\natol = 0", ["tool.syncheck.rtol = 2.0 tool.syncheck.atol = 0.0: must be"]),
        ("rtol = nan\natol = 0", ["tool.syncheck.rtol = nan"]),
        (f"rtol = 0\natol = 1{'0' * 400}", ["tool.syncheck.rtol = 0.0 tool.syncheck.atol = inf"]),
        ("close = true\nulp = 1", ["tool.syncheck.close cannot be combined", "tool.syncheck.ulp"]),
        ("group-by = '('", ["tool.syncheck.group-by = '(': not a regular expression"]),
        ("allow = [\n[tool.x]", ["not TOML", "at line"]),
        ("x = " + "[" * 9000, ["not TOML"]),
        ("allow = ['\x1b[31m']", ["not TOML"]),
    ],
)
def test_invalid_values(project: Path, lines: str, texts: list[str]) -> None:
    """An invalid key or value causes one line with the file, the key, the value and the requirement."""
    path = write(project, lines)
    with pytest.raises(UsageError) as caught:
        config.load(project)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert all(text in message for text in texts), message
    assert "\n" not in message
    assert "--" not in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"tool.syncheck = 3\n", r"tool\.syncheck = 3: must be a table"),
        (b"# \xff\n[tool.syncheck]\n", "not TOML"),
        (b"# \xff\n[tool.other]\n[", None),  # without our table, the file is not checked
    ],
)
def test_invalid_files(project: Path, content: bytes, message: str | None) -> None:
    """A table that is not a table, or a file that is not UTF-8, is an error if the file mentions syncheck."""
    (project / "pyproject.toml").write_bytes(content)
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        assert config.load(project) == config.Config()


def test_unreadable_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read is an error, because its options could change the verdict."""
    path = write(project, "ulp = 3")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(UsageError, match="Permission denied") as caught:
        config.load(project)
    assert str(caught.value).startswith(str(path))
