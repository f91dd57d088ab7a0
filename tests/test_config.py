"""[tool.syncheck] of pyproject.toml: where it is looked for, what it may say, and what wins."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import network, save_pth

from syncheck import api, config
from syncheck.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that is the top of a repository, so that nothing above it is looked at."""
    (tmp_path / ".git").mkdir()
    return tmp_path


def write(folder: Path, text: str) -> Path:
    """Write a pyproject.toml whose table [tool.syncheck] has these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pyproject.toml"
    path.write_text(f"[project]\nname = 'x'\n[tool.syncheck]\n{text}\n")
    return path


EVERY_KEY = {
    "only": ('["params", "buffers"]', ("params", "buffers")),
    "include": ('["fc.*"]', ("fc.*",)),
    "exclude": ('["fc.*"]', ("fc.*",)),
    "buffers": ('["stats.*"]', ("stats.*",)),
    "rtol": ("1", 1.0),
    "atol": ("1e-8", 1e-8),
    "ulp": ("3", 3),
    "allow": ('["SYN201"]', ("SYN201",)),
    "group-by": ("'run(.)'", "run(.)"),
}


def test_every_option_has_its_key() -> None:
    """A field of Options that the file cannot set, or a key without a field, is noticed here."""
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(api.Options)}
    assert fields | {"checkpoints"} == set(config.KEYS)
    assert fields == set(EVERY_KEY)


@pytest.mark.parametrize("key", EVERY_KEY)
def test_each_key_reaches_the_options(project: Path, key: str) -> None:
    """Each key sets its field of Options, and only that one."""
    lines = {key: EVERY_KEY[key]}
    if key in ("rtol", "atol"):
        lines = {name: EVERY_KEY[name] for name in ("rtol", "atol")}
    path = write(project, "\n".join(f"{name} = {text}" for name, (text, _) in lines.items()))
    found = config.load(project)
    assert found.path == str(path)
    expected = api.Options(**{name.replace("-", "_"): value for name, (_, value) in lines.items()})
    assert config.options(found) == expected
    assert expected != api.Options()
    assert set(config.applied(found)) == set(lines)


@pytest.mark.parametrize("key", EVERY_KEY)
def test_what_is_given_wins(project: Path, key: str) -> None:
    """A value given replaces the file's, whole and not added up; what is not given does not."""
    path = write(project, "\n".join(f"{name} = {text}" for name, (text, _) in EVERY_KEY.items()))
    other: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "ulp": 0, "group-by": "other", "only": ["rng"]}
    given = {key.replace("-", "_"): other.get(key, ["SYN203"])}
    if key in ("rtol", "atol"):
        given = {"rtol": 0.0, "atol": 0.0}
    found = config.load(path.parent)
    not_given = dict.fromkeys(("include", "exclude"), ()) | {"buffers": [], "ulp": None, "group_by": None}
    got = config.options(found, **not_given | given)
    for name in EVERY_KEY:
        field = name.replace("-", "_")
        value = given.get(field, EVERY_KEY[name][1])
        assert getattr(got, field) == (tuple(value) if isinstance(value, list) else value)
        assert (name in config.applied(found, **not_given | given)) == (field not in given)


@pytest.mark.parametrize("given", [{"rtol": 0.5}, {"atol": 0.0}])
def test_one_of_the_pair_drops_the_files_pair(project: Path, given: dict[str, float]) -> None:
    """Half a tolerance is not completed from the file: the error is the one that it gives without a file."""
    write(project, "rtol = 0\natol = 1\nulp = 2")
    found = config.load(project)
    assert config.applied(found, **given) == ("ulp",)
    with pytest.raises(UsageError, match="--rtol and --atol belong together"):
        config.options(found, **given)


def test_empty_lists_are_no_options(project: Path) -> None:
    """An empty list in the file changes nothing, and is not said to."""
    write(project, "allow = []\ncheckpoints = []")
    found = config.load(project)
    assert (config.options(found), config.applied(found), found.checkpoints) == (api.Options(), (), ())


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ("alow = ['SYN201']", ["tool.syncheck.alow: no such key", "allow", "group-by"]),
        ("group_by = 'x'", ["tool.syncheck.group_by: no such key"]),
        ("only = 'params'", ["tool.syncheck.only = 'params'; needs a list of strings"]),
        ("allow = [201]", ["tool.syncheck.allow = [201]; needs a list of strings"]),
        ("checkpoints = 'ckpts'", ["tool.syncheck.checkpoints = 'ckpts'; needs a list of strings"]),
        ("rtol = '1e-3'\natol = 0", ["tool.syncheck.rtol = '1e-3'; needs a number"]),
        ("atol = true\nrtol = 0", ["tool.syncheck.atol = True; needs a number"]),
        ("ulp = 1.5", ["tool.syncheck.ulp = 1.5; needs a whole number"]),
        ("ulp = false", ["tool.syncheck.ulp = False; needs a whole number"]),
        ("group-by = ['x']", ["tool.syncheck.group-by = ['x']; needs a string"]),
        ("[tool.syncheck.allow]\ncode = 1", ["tool.syncheck.allow = {'code': 1}; needs a list of strings"]),
        ("allow = ['SYN999']", ["tool.syncheck: allow SYN999: no such finding", "SYN201"]),
        ("only = ['weights']", ["tool.syncheck: only='weights'", "params"]),
        ("rtol = 0.1", ["tool.syncheck: rtol and atol belong together"]),
        ("rtol = 2\natol = 0", ["tool.syncheck: rtol 2 atol 0: needs 0 <= rtol <= 1"]),
        ("rtol = nan\natol = 0", ["tool.syncheck: rtol nan"]),
        (f"rtol = 0\natol = 1{'0' * 400}", ["tool.syncheck: rtol 0 atol inf"]),
        ("ulp = -1", ["tool.syncheck: ulp -1: needs"]),
        ("group-by = '('", ["tool.syncheck: group-by '(': not a regular expression"]),
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
    with pytest.raises(UsageError, match=r"tool\.syncheck = 3; needs a table"):
        config.load(project)


def test_bytes_that_are_no_text(project: Path) -> None:
    """A file that mentions us and is not UTF-8 is an error, one that does not is not ours to judge."""
    path = project / "pyproject.toml"
    path.write_bytes(b"# \xff\n[tool.other]\n[")
    assert config.load(project) == config.Config()
    path.write_bytes(b"# \xff\n[tool.syncheck]\n")
    with pytest.raises(UsageError, match="not TOML"):
        config.load(project)


@pytest.mark.parametrize(
    "text",
    [
        "[tool.syncheck]\nulp = 3", "[ tool . syncheck ]\nulp = 3", "[tool.'syncheck']\nulp = 3",
        '["tool"."syncheck"]\nulp = 3', "[tool]\nsyncheck = {ulp = 3}", "[tool]\nsyncheck.ulp = 3",
        "tool.syncheck.ulp = 3", "tool = {syncheck = {ulp = 3}}",
    ],
)  # fmt: skip
def test_every_spelling_of_the_table_is_found(project: Path, text: str) -> None:
    """The quick look at the bytes passes over no way in which TOML can write the table."""
    (project / "pyproject.toml").write_text(text)
    assert config.load(project).values == {"ulp": 3}


def test_file_that_may_not_be_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there and cannot be read may hold options: an error, for the verdict could be another."""
    path = write(project, "ulp = 3")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(UsageError, match="cannot read it: Permission denied") as caught:
        config.load(project)
    assert str(caught.value).startswith(str(path))


def test_nearest_file_with_the_table_is_taken(project: Path) -> None:
    """Of nested folders the nearest file with the table counts, alone; one without it is passed over."""
    write(project, "ulp = 1\nallow = ['SYN201']")
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[project]\ndependencies = ['syncheck']\n")
    (project / "a" / "c" / "pyproject.toml").mkdir(parents=True)
    assert config.load(inner).values == {"ulp": 1, "allow": ("SYN201",)}
    assert config.load(project / "a" / "c").values == {"ulp": 1, "allow": ("SYN201",)}
    write(project / "a", "ulp = 2")
    assert config.load(inner).values == {"ulp": 2}
    assert config.load(project).values["ulp"] == 1


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_search_ends_at_the_repository(project: Path, kind: str) -> None:
    """What lies above a repository, or above a worktree, whose .git is a file, is not its own."""
    write(project, "ulp = 1")
    inner = project / "clone" / "src"
    inner.mkdir(parents=True)
    assert config.load(inner).values == {"ulp": 1}
    if kind == "folder":
        (inner.parent / ".git").mkdir()
    else:
        (inner.parent / ".git").write_text("gitdir: elsewhere")
    assert config.load(inner) == config.Config()
    write(inner.parent, "ulp = 2")
    assert config.load(inner).values == {"ulp": 2}


def test_checkpoints_are_relative_to_their_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder below, and with brackets in a folder's name, the patterns still lead to the same files."""
    top = project / "my [1] project"
    write(top, "checkpoints = ['ckpts/*.pth', '/abs/x.pth', 'plain']")
    (top / "src").mkdir()
    save_pth(top / "ckpts" / "rank0.pth", network())
    monkeypatch.chdir(top)
    assert config.load().checkpoints == ("ckpts/*.pth", "/abs/x.pth", "plain")
    monkeypatch.chdir(top / "src")
    pattern, absolute, plain = config.load().checkpoints
    assert (absolute, plain) == ("/abs/x.pth", str(top / "plain"))
    assert len(api.find(pattern).groups) == 1


def test_nothing_is_parsed_where_nobody_mentions_us(project: Path) -> None:
    """A file without our name costs no import of tomllib."""
    (project / "pyproject.toml").write_text("[tool.ruff]\n")
    code = "import sys; from syncheck import config; config.load(); print('tomllib' in sys.modules)"
    for expected in ("False", "True"):
        done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
        write(project, "ulp = 3")


def test_folder_that_is_gone(project: Path) -> None:
    """Where the current folder was removed, there is no file, and no crash."""
    gone = project / "gone"
    gone.mkdir()
    code = "import os; from syncheck import config; os.rmdir(os.getcwd()); print(config.load())"
    # The package is found by its place, as the current folder will not be there.
    environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(api.__file__))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=gone, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Config(path=None")
