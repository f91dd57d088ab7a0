"""The code has the layout of CONTRIBUTING: layers of imports, lazy imports, and lengths of files and functions."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support.listings import find_texts, list_fields
from support.sources import read_source
from support.states import omit

import syncheck
import syncheck.live
from syncheck.cli.parser import build_parser
from syncheck.readers.folders import FOLDERS
from syncheck.readers.formats import READERS
from tools.house import House, measure

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "syncheck").rglob("*.py"), *(ROOT / "train").rglob("*.py"), *(ROOT / "fuzz").rglob("*.py")])
FIXTURES = ROOT / "fixtures"
HEAVY = ("torch", "numpy", "rich", "pytest", "matplotlib")
RARELY_NEEDED = tuple(
    f"syncheck.{name}"
    for name in (
        "readers.folders",
        "readers.dcp",
        "tensors.digests",
        "tensors.moments",
        "tensors.strided",
        "tensors.differences",
        "diagnose.baseline",
    )
)

# What a comparison of replicas that differ in BatchNorm statistics does not need.
FOR_OTHER_DIFFERENCES = tuple(
    f"syncheck.{name}"
    for name in (
        "conversion",
        "live",
        "diagnose.conversion_rules",
        "diagnose.counters",
        "diagnose.syn107_settings_differ",
        "diagnose.syn211_gradients_not_reduced",
        "report.events",
        "report.terminal",
    )
)
# Libraries that take more than a millisecond each.
SLOW_LIBRARIES = ("torch", "rich", "ml_dtypes", "hashlib", "statistics", "tempfile", "importlib.metadata")

# A room is a module or a package directly below syncheck/. A module imports only rooms to the left of its own, also in
# functions and below `if TYPE_CHECKING`. Rooms between `|` do not import each other.
LAYERS = (
    "text | loaded | suggestions | versions | frozen | option_kinds < errors < sentences | atomic < messages < "
    "snapshots < findings < records < tensors < layout < settings < comparison | readers | diagnose < options < "
    "config | conversion | report < api < live < parity < testing < __init__ | cli | integrations | pytest_plugin < "
    "__main__"
)


@cache
def measure_house(package: str) -> House:
    """Return the measurements of a package, which several tests look at."""
    return measure(ROOT / package)


def find_levels() -> dict[str, int]:
    """Return the position of each room in the line of layers."""
    levels = {}
    for level, rooms in enumerate(LAYERS.split(" < ")):
        for room in rooms.split(" | "):
            levels[room] = level
    return levels


def test_modules_import_only_from_the_left() -> None:
    """Modules import only rooms to the left: for example, rules and reports never import live checks."""
    levels = find_levels()
    edges = measure_house("syncheck").edges
    wrong = [(room, target) for room, target in edges if levels[target] >= levels[room]]
    assert wrong == []


@pytest.mark.parametrize("package", ["syncheck", "train"])
def test_no_modules_import_each_other(package: str) -> None:
    """There is no circle of imports, also none inside a package, and not through several modules."""
    assert measure_house(package).circles_of_modules == []


def test_every_room_has_a_layer() -> None:
    """The line of layers lists every module and package of syncheck once."""
    house = measure_house("syncheck")
    assert sorted(find_levels()) == sorted(house.modules + house.packages)


def test_packages_share_only_public_names() -> None:
    """syncheck never imports train, and train imports only names in `__all__` of syncheck and syncheck.live."""
    for source in (ROOT / "syncheck").rglob("*.py"):
        assert not {name for name in read_source(source).imported if name.partition(".")[0] == "train"}, source
    public = {f"syncheck.{name}" for name in syncheck.__all__}
    public |= {f"syncheck.live.{name}" for name in syncheck.live.__all__}
    for source in (ROOT / "train").rglob("*.py"):
        assert set(find_texts(read_source(source).imported, start="syncheck")) <= public, source


def test_public_names_resolve() -> None:
    """Every name in `__all__` exists, and no submodule replaces a function of the same name."""
    code = (
        "import syncheck, importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(syncheck.__path__, 'syncheck.'):\n"
        "    if module.name.endswith('__main__'): continue\n"
        "    if module.name.startswith('syncheck.integrations.'): continue\n"  # requires a library; tested separately
        "    importlib.import_module(module.name)\n"
        "assert all(hasattr(syncheck, name) for name in syncheck.__all__)\n"
        "assert callable(syncheck.compare) and callable(syncheck.metadata) and callable(syncheck.read)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = syncheck.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("syncheck", "compare diff read metadata Options DiffOptions Report OutOfSync UsageError CheckpointError"),
        ("syncheck.api", "compare find judge Options"),
        ("syncheck.errors", "SyncheckError UsageError OptionError CheckpointError OutOfSync RankFailed"),
        ("syncheck.records", "Report Group Finding TensorDiff Evidence History Histogram Reason OutOfSync"),
        ("syncheck.options", "Options DiffOptions RunOptions"),
        ("syncheck.live", "check SyncMonitor resync Resync"),
        ("syncheck.testing", "assert_in_sync assert_same_model assert_parallel_equals_single ParityCase"),
        ("syncheck.config", "load"),
        ("syncheck.integrations", ""),
    ],
)
def test_import_paths_of_users_stay(module: str, names: str) -> None:
    """Names that users import from these modules in version 0.2 are still there."""
    missing = [name for name in names.split() if not hasattr(importlib.import_module(module), name)]
    assert missing == []


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import syncheck", HEAVY),
        ("import syncheck.cli.parser; syncheck.cli.parser.build_parser()", HEAVY),
        ("from syncheck.cli import main; main(['compare', 'in_sync'])", HEAVY),
        ("import syncheck; syncheck.compare('in_sync/*/*.pth')", (*HEAVY, *RARELY_NEEDED)),
        ("from syncheck.cli import main; main(['compare', 'in_sync', '--quick'])", HEAVY),
        ("from syncheck.cli import main; main(['compare', 'desync/bn_local_stats', '--quick'])", HEAVY),
        (
            "from syncheck.cli import main; main(['compare', 'desync/bn_local_stats'])",
            (*SLOW_LIBRARIES, *FOR_OTHER_DIFFERENCES),
        ),
        ("from syncheck.cli import main; main(['report', 'desync', '--format', 'json'])", ("torch", "rich")),
    ],
)
def test_unneeded_modules_are_not_imported(code: str, forbidden: tuple[str, ...]) -> None:
    """Importing, parsing and comparing load neither torch nor rich, numpy only if bytes differ, and few rules."""
    check = f"{code}\nimport sys\nprint('LOADED', [name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=FIXTURES)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_only_the_command_line_prints_and_exits() -> None:
    """Only cli/ and __main__.py call print and sys.exit."""
    for source in (ROOT / "syncheck").rglob("*.py"):
        if "cli" in source.parts or source.name == "__main__.py":
            continue
        assert not read_source(source).called & {"print", "sys.exit", "exit"}, source


PROGRAMS = ("syncheck", "train", "benchmarks", "fuzz", "docs", "tools", "fixtures")


def test_no_program_accepts_the_start_of_an_option() -> None:
    """Every parser refuses abbreviations: they would mean another option as soon as one with this start is added."""
    for source in sorted(path for folder in PROGRAMS for path in (ROOT / folder).rglob("*.py")):
        assert all("allow_abbrev=False" in call for call in read_source(source).parsers), source

    parser = build_parser()
    (commands,) = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    assert not any(each_parser.allow_abbrev for each_parser in (parser, *commands.values()))


# Modules that open files for writing, and the reason for those that write no output of a user.
WRITERS = {
    "syncheck/atomic.py": "the only module that opens outputs; only outputs.py and its errors are used elsewhere",
    "syncheck/cli/streams.py": "/dev/null in place of a closed stream",
    "syncheck/pytest_plugin/ranks/session.py": "streams and stacks of a rank, in a new folder of this pytest run",
    "syncheck/pytest_plugin/ranks/process.py": "streams of a rank, in a new folder of this pytest run",
    "syncheck/live/watching/full_checks.py": "checkpoints of `--on-desync save`, in new files of a folder of its own",
    "syncheck/live/repair/state.py": "torch.save to a buffer in memory",
}


def test_one_module_opens_outputs() -> None:
    """Only atomic.py writes files, called by outputs.py, which refuses inputs and checkpoints."""
    modules = sorted((ROOT / "syncheck").rglob("*.py"))
    writing = {str(source.relative_to(ROOT)): read_source(source).writing for source in modules}
    writing = {module: calls for module, calls in writing.items() if calls}
    assert omit(writing, *WRITERS) == {}
    assert WRITERS.keys() - {"syncheck/live/repair/state.py"} <= writing.keys()
    for source in modules:
        if source.name not in ("outputs.py", "atomic.py"):
            names = find_texts(read_source(source).imported, start="syncheck.atomic")
            used = {name.rpartition(".")[2] for name in names}
            assert used <= {"convert_errors"}, source


@pytest.mark.parametrize(
    "line",
    [
        "open(p, 'w')",
        "open(p, mode='ab')",
        "Path(p).open('x')",
        "p.write_text(t)",
        "os.open(p, os.O_WRONLY)",
        "Path(p).touch()",
        "os.rename(a, b)",
        "shutil.copy(a, b)",
        "tempfile.mkstemp()",
        "os.fdopen(1, 'r+b')",
    ],
)
def test_every_way_to_write_is_found(line: str, tmp_path: Path) -> None:
    """The search for modules that write files finds each of these lines, and no line that reads."""
    (tmp_path / "writes.py").write_text(line)
    (tmp_path / "reads.py").write_text("open(p, 'rb'); Path(p).open(); os.open(p, os.O_RDONLY); a.copy()")
    assert read_source(tmp_path / "writes.py").writing
    assert not read_source(tmp_path / "reads.py").writing


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_files_and_functions_are_short(source: Path) -> None:
    """Files have at most 500 lines, and functions at most 60 without their docstring."""
    text = source.read_text(encoding="utf-8")
    assert text.count("\n") <= 500
    lengths = {function.name: function.lines for function in read_source(source).functions}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


def test_every_reader_is_in_the_table() -> None:
    """A module of readers/ with a FORMAT is in READERS or FOLDERS under this name."""
    table = READERS | FOLDERS
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "syncheck" / "readers").rglob("*.py")
        if "\nFORMAT = " in path.read_text(encoding="utf-8")
    }
    assert modules == set(list_fields(table.values(), "__name__"))
    assert all(name == reader.FORMAT for name, reader in table.items())


def test_every_test_has_a_docstring() -> None:
    """Each test function has a docstring."""
    for source in (ROOT / "tests").rglob("test_*.py"):
        tests = [function for function in read_source(source).functions if function.name.startswith("test_")]
        assert not [test.name for test in tests if not test.is_documented], source


def test_modules_of_tests_have_unique_names() -> None:
    """Modules in tests/ have unique names: all folders are on the path, and Python imports only the first match."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, times in names.items() if times > 1] == []
    assert [name for name in names if name.removesuffix(".py") in sys.stdlib_module_names] == []
