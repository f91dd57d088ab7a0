"""[tool.syncheck] of pyproject.toml: what makes no sense is one line that says where, what was found and needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from project_file import write

from syncheck import config
from syncheck.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ("alow = ['SYN201']", ["tool.syncheck.alow: unknown key", "allow", "group-by"]),
        ("group_by = 'x'", ["tool.syncheck.group_by: unknown key"]),
        ("only = 'params'", ["tool.syncheck.only = 'params': must be"]),
        ("allow = [201]", ["tool.syncheck.allow = [201]: must be"]),
        ("checkpoints = 'ckpts'", ["tool.syncheck.checkpoints = 'ckpts': must be"]),
        ("rtol = '1e-3'\natol = 0", ["tool.syncheck.rtol = '1e-3': must be"]),
        ("atol = true\nrtol = 0", ["tool.syncheck.atol = True: must be"]),
        ("ulp = 1.5", ["tool.syncheck.ulp = 1.5: must be"]),
        ("ulp = false", ["tool.syncheck.ulp = False: must be"]),
        ("group-by = ['x']", ["tool.syncheck.group-by = ['x']: must be"]),
        ("[tool.syncheck.allow]\ncode = 1", ["tool.syncheck.allow = {'code': 1}: must be"]),
        ("allow = ['SYN999']", ["tool.syncheck.allow = 'SYN999': no such code"]),
        ("only = ['weights']", ["tool.syncheck.only = 'weights': must be", "params"]),
        ("rtol = 0.1", ["tool.syncheck.rtol and tool.syncheck.atol belong together"]),
        ("rtol = 2\natol = 0", ["tool.syncheck.rtol = 2.0 tool.syncheck.atol = 0.0: must be"]),
        ("rtol = nan\natol = 0", ["tool.syncheck.rtol = nan"]),
        (f"rtol = 0\natol = 1{'0' * 400}", ["tool.syncheck.rtol = 0.0 tool.syncheck.atol = inf"]),
        ("ulp = -1", ["tool.syncheck.ulp = -1: must be"]),
        ("close = true\nulp = 1", ["tool.syncheck.close cannot be combined", "tool.syncheck.ulp"]),
        ("group-by = '('", ["tool.syncheck.group-by = '(': not a regular expression"]),
        ("jobs = 0", ["tool.syncheck.jobs = 0: must be"]),
        ("jobs = 'all'", ["tool.syncheck.jobs = 'all': must be"]),
        ("reference = [0]", ["tool.syncheck.reference = [0]: must be"]),
        ("reference = true", ["tool.syncheck.reference = True: must be"]),
        ("quick = 1", ["tool.syncheck.quick = 1: must be"]),
        ("close = 'yes'", ["tool.syncheck.close = 'yes': must be"]),
        ("tolerance = 1e-3", ["tool.syncheck.tolerance = 0.001: must be"]),
        ("exit-zero = 1", ["tool.syncheck.exit-zero = 1: must be"]),
        ("format = 'yaml'", ["tool.syncheck.format = 'yaml': must be"]),
        ("format = 3", ["tool.syncheck.format = 3: must be"]),
        ("color = true", ["tool.syncheck.color = True: must be"]),
        ("output = 'x.json'", ["tool.syncheck.output = 'x.json': must be"]),
        ("limit = -1", ["tool.syncheck.limit = -1: must be"]),
        ("limit = 1.0", ["tool.syncheck.limit = 1.0: must be"]),
        ("limit = true", ["tool.syncheck.limit = True: must be"]),
        ("allow = [\n[tool.x]", ["not TOML", "at line"]),
        ("x = " + "[" * 9000, ["not TOML"]),
        ("allow = ['\x1b[31m']", ["not TOML"]),
    ],
)
def test_what_makes_no_sense_is_one_line(project: Path, lines: str, texts: list[str]) -> None:
    """Each wrong key or value names file, key, found and needed in one line, with no option of the command line."""
    path = write(project, lines)
    with pytest.raises(UsageError) as caught:
        config.load(project)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert all(text in message for text in texts), message
    assert "\n" not in message
    assert "--" not in message


def test_table_that_is_no_table(project: Path) -> None:
    """`tool.syncheck` with a plain value is refused by name."""
    (project / "pyproject.toml").write_text("tool.syncheck = 3\n")
    with pytest.raises(UsageError, match=r"tool\.syncheck = 3: must be a table"):
        config.load(project)


def test_bytes_that_are_no_text(project: Path) -> None:
    """A file that mentions us and is not UTF-8 is an error, one that does not is not ours to judge."""
    path = project / "pyproject.toml"
    path.write_bytes(b"# \xff\n[tool.other]\n[")
    assert config.load(project) == config.Config()
    path.write_bytes(b"# \xff\n[tool.syncheck]\n")
    with pytest.raises(UsageError, match="not TOML"):
        config.load(project)


def test_file_that_may_not_be_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there and cannot be read may hold options: an error, for the verdict could be another."""
    path = write(project, "ulp = 3")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(UsageError, match="Permission denied") as caught:
        config.load(project)
    assert str(caught.value).startswith(str(path))
