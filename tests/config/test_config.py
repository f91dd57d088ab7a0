"""[tool.syncheck] of pyproject.toml: search, keys, precedence and errors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import network, save_pth
from support.listings import list_absent, list_names
from support.states import pick

from syncheck import api, config, options
from syncheck.errors import UsageError
from syncheck.options import TOML

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the top folder of a repository, at which the search for a pyproject.toml ends."""
    (tmp_path / ".git").mkdir()
    return tmp_path


def write(folder: Path, text: str) -> Path:
    """Write a pyproject.toml with the given lines in [tool.syncheck]."""
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
    "close": ("true", True),
    "tolerance": ('{bn_mean = "close", "fc.*" = {ulp = 1}}', {"bn_mean": "close", "fc.*": {"ulp": 1}}),
    "allow": ('["SYN201"]', ("SYN201",)),
    "baseline": ("'/known.json'", "/known.json"),
    "group_by": ("'run(.)'", "run(.)"),
    "reference": ("1", 1),
    "jobs": ("2", 2),
    "quick": ("true", True),
    "rng": ("true", True),
}
# Keys that affect only the command line.
EVERY_PRINTING_KEY = {
    "exit_zero": ("true", True),
    "format": ('"json"', "json"),
    "output": ('["out.json"]', ("out.json",)),
    "limit": ("3", 3),
    "quiet": ("true", True),
    "verbose": ("true", True),
    "color": ('"never"', "never"),
}
# Neither is valid without the other.
TOGETHER = {"rtol": ("rtol", "atol"), "atol": ("rtol", "atol")}


def test_every_option_has_its_key() -> None:
    """Every field of Options has a key, and every key has a field."""
    assert set(list_names(dataclasses.fields(api.Options))) == set(EVERY_KEY)
    assert set(options.list_options(TOML)) == {"checkpoints", *EVERY_KEY, *EVERY_PRINTING_KEY}


@pytest.mark.parametrize("key", EVERY_KEY)
def test_each_key_reaches_the_options(project: Path, key: str) -> None:
    """Each key sets only its field of Options."""
    lines = pick(EVERY_KEY, TOGETHER.get(key, (key,)))
    path = write(project, "\n".join(f"{name} = {text}" for name, (text, _) in lines.items()))
    result, values = config.load(project)
    assert result == str(path)
    expected = api.Options(**{name: value for name, (_, value) in lines.items()})
    assert config.merge_options(values, api.Options, {}) == expected
    assert expected != api.Options()
    assert set(config.list_applied(values, api.Options, {})) == set(lines)


@pytest.mark.parametrize("key", EVERY_PRINTING_KEY)
def test_printing_keys_are_separate(project: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Keys for output are not part of the options of a comparison, which the pytest plugin uses."""
    text, value = EVERY_PRINTING_KEY[key]
    write(project, f"{key} = {text}\nulp = 3")
    monkeypatch.chdir(project)
    _, values = config.load()
    assert config.list_applied(values, options.RunOptions, {}) == [key]
    assert getattr(config.merge_options(values, options.RunOptions, {}), key) == value
    assert config.merge_options(values, api.Options, {}) == api.Options(ulp=3)
    assert config.list_applied(values, api.Options, {}) == ["ulp"]


@pytest.mark.parametrize("given", [{"rtol": 0.5}, {"atol": 0.0}])
def test_half_of_a_tolerance(project: Path, given: dict[str, float]) -> None:
    """The file does not complete half of a tolerance, which is an error as without a file."""
    write(project, "rtol = 0\natol = 1\nulp = 2\nallow = ['SYN201']\n[tool.syncheck.tolerance]\nbuffer = 'close'")
    _, values = config.load(project)
    assert config.list_applied(values, api.Options, given) == ["allow"]
    with pytest.raises(UsageError, match="rtol and atol belong together"):
        config.merge_options(values, api.Options, given)


@pytest.mark.parametrize(
    "text",
    [
        "close = false\nquick = false\nexit_zero = false\nquiet = false\n[tool.syncheck.tolerance]",
        "allow = []\ncheckpoints = []",
    ],
)
def test_defaults_are_not_listed(project: Path, text: str) -> None:
    """False flags and empty lists are the defaults and not listed as applied."""
    write(project, text)
    assert config.load(project) == (str(project / "pyproject.toml"), {})


@pytest.mark.parametrize(
    "text",
    [
        "[tool.syncheck]\nulp = 3", "[ tool . syncheck ]\nulp = 3", "[tool.'syncheck']\nulp = 3",
        '["tool"."syncheck"]\nulp = 3', "[tool]\nsyncheck = {ulp = 3}", "[tool]\nsyncheck.ulp = 3",
        "tool.syncheck.ulp = 3", "tool = {syncheck = {ulp = 3}}",
    ],
)  # fmt: skip
def test_every_spelling_of_the_table_is_found(project: Path, text: str) -> None:
    """The search in the bytes finds the table in every TOML spelling."""
    (project / "pyproject.toml").write_text(text)
    assert config.load(project)[1] == {"ulp": 3}


def test_nearest_file_with_the_table_is_taken(project: Path) -> None:
    """Only the nearest file with the table counts; files without the table are skipped."""
    write(project, "ulp = 1\nallow = ['SYN201']")
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[project]\ndependencies = ['syncheck']\n")
    (project / "a" / "c" / "pyproject.toml").mkdir(parents=True)
    assert config.load(inner)[1] == {"ulp": 1, "allow": ("SYN201",)}
    assert config.load(project / "a" / "c")[1] == {"ulp": 1, "allow": ("SYN201",)}
    write(project / "a", "ulp = 2")
    assert config.load(inner)[1] == {"ulp": 2}
    assert config.load(project)[1]["ulp"] == 1


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_search_ends_at_the_repository(project: Path, kind: str) -> None:
    """The search stops at a repository, and at a worktree, whose .git is a file."""
    write(project, "ulp = 1")
    inner = project / "clone" / "src"
    inner.mkdir(parents=True)
    assert config.load(inner)[1] == {"ulp": 1}
    if kind == "folder":
        (inner.parent / ".git").mkdir()
    else:
        (inner.parent / ".git").write_text("gitdir: elsewhere")
    assert config.load(inner) == (None, {})
    write(inner.parent, "ulp = 2")
    assert config.load(inner)[1] == {"ulp": 2}


def test_checkpoints_are_relative_to_their_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns match the same files from a subfolder, and with brackets in a folder's name."""
    top = project / "my [1] project"
    write(top, "checkpoints = ['ckpts/*.pth', '/abs/x.pth', 'plain']")
    (top / "src").mkdir()
    save_pth(top / "ckpts" / "rank0.pth", network())
    monkeypatch.chdir(top)
    assert config.load()[1]["checkpoints"] == ("ckpts/*.pth", "/abs/x.pth", "plain")
    monkeypatch.chdir(top / "src")
    pattern, absolute, plain = config.load()[1]["checkpoints"]
    assert (absolute, plain) == ("/abs/x.pth", str(top / "plain"))
    assert len(api.find(pattern).groups) == 1


def test_paths_are_relative_to_their_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output files and the reference are relative to the file; a rank is not a path."""
    write(project, "output = ['out.json', '/abs/x.html']\nreference = 'ckpts/rank0.pth'")
    (project / "src").mkdir()
    monkeypatch.chdir(project / "src")
    _, values = config.load()
    output, absolute = values["output"]
    assert os.path.abspath(output) == str(project / "out.json")
    assert os.path.abspath(absolute) == "/abs/x.html"
    assert values["reference"] == str(project / "ckpts" / "rank0.pth")
    write(project, "reference = '1'")
    assert config.load()[1]["reference"] == "1"


def test_files_without_the_table_are_not_parsed(project: Path) -> None:
    """A file without the word syncheck does not import tomllib."""
    (project / "pyproject.toml").write_text("[tool.ruff]\n")
    code = "import sys; from syncheck import config; config.load(); print('tomllib' in sys.modules)"
    for expected in ("False", "True"):
        done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
        write(project, "ulp = 3")


def test_folder_that_is_gone(project: Path) -> None:
    """A removed current folder has no file, and is not an error."""
    gone = project / "gone"
    gone.mkdir()
    code = "import os; from syncheck import config; os.rmdir(os.getcwd()); print(config.load())"
    # The current folder, which is removed, cannot be on the path of imports.
    environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(api.__file__))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=gone, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(None, {})")


# Values of another type or outside of the range, as Python prints them.
WRONG = [
    ("only", "'params'"), ("allow", "[201]"), ("checkpoints", "'ckpts'"), ("ulp", "1.5"), ("ulp", "False"),
    ("ulp", "-1"), ("group_by", "['x']"), ("jobs", "0"), ("jobs", "'all'"), ("reference", "[0]"),
    ("reference", "True"), ("quick", "1"), ("close", "'yes'"), ("tolerance", "0.001"), ("exit_zero", "1"),
    ("format", "'yaml'"), ("format", "3"), ("color", "True"), ("output", "'x.json'"), ("limit", "-1"),
    ("limit", "1.0"), ("limit", "True"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        *((f"{key} = {text.lower()}", [f"{key}={text}: must be"]) for key, text in WRONG),
        ("alow = ['SYN201']", ["tool.syncheck.alow: unknown key", "allow", "group_by"]),
        ("group_by = 'x'\ngroup-by = 'x'", ["tool.syncheck.group-by: the same option as group_by"]),
        ("rtol = '1e-3'\natol = 0", ["rtol='1e-3': must be"]),
        ("atol = true\nrtol = 0", ["atol=True: must be"]),
        ("[tool.syncheck.allow]\ncode = 1", ["allow={'code': 1}: must be"]),
        ("allow = ['SYN999']", ["allow='SYN999': no such code"]),
        ("only = ['weights']", ["only='weights': must be", "params"]),
        ("rtol = 0.1", ["rtol and atol belong together"]),
        ("rtol = 2\natol = 0", ["rtol=2.0 atol=0.0: must be"]),
        ("rtol = nan\natol = 0", ["rtol=nan"]),
        (f"rtol = 0\natol = 1{'0' * 400}", ["rtol=0.0 atol=inf"]),
        ("close = true\nulp = 1", ["cannot be combined"]),
        ("group_by = '('", ["group_by='(': not a regular expression"]),
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
    assert not list_absent(message, texts), message
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
    """A table of another type, or a file with invalid UTF-8, is an error if the file mentions syncheck."""
    (project / "pyproject.toml").write_bytes(content)
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        assert config.load(project) == (None, {})


def test_unreadable_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable file is an error, because its options could change the verdict."""
    path = write(project, "ulp = 3")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(UsageError, match="Permission denied") as caught:
        config.load(project)
    assert str(caught.value).startswith(str(path))
