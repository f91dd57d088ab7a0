"""The code has the layout of CONTRIBUTING: layers of imports, lazy imports, and lengths of files and functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import syncheck
import syncheck.live
from syncheck.readers import READERS
from syncheck.readers.folders import FOLDERS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "syncheck").rglob("*.py"), *(ROOT / "train").rglob("*.py"), *(ROOT / "fuzz").rglob("*.py")])
FIXTURES = ROOT / "fixtures"
HEAVY = ("torch", "numpy", "rich", "pytest", "matplotlib")
RARELY_NEEDED = tuple(
    f"syncheck.{name}"
    for name in (
        "readers.folders",
        "readers.dcp",
        "kernel.digests",
        "kernel.strided",
        "differences",
        "baseline",
    )
)

# Layers and their allowed imports; `TYPE_CHECKING` imports count too. A package is either one layer, or each of its
# modules is a layer and the package's own name stands for its `__init__`.
LEAVES = {"errors", "dtypes"}
BASE = LEAVES | {"messages", "snapshots", "records", "relations", "rank_sets", "steps"}
BYTES = BASE | {"kernel.clustering", "kernel.blocks", "kernel.finiteness"}
ALLOWED = {
    "errors": {"records"},  # the type of OutOfSync's report
    "options": LEAVES | {"tolerance", "diagnose"},  # both imported when an option needs them
    "atomic": LEAVES,
    "outputs": LEAVES | {"atomic", "readers", "syncheck"},
    "dtypes": set(),
    "messages": {"errors"},
    "snapshots": {"messages"},
    "records": {"messages", "snapshots", "relations", "steps"},
    "relations": set(),
    "steps": set(),
    "rank_sets": set(),
    "names": LEAVES,
    "tensor_parallel": set(),
    "tolerance": LEAVES,
    "metadata_block": BASE,
    "kinds": BASE | {"names"},
    "value_kinds": BASE | {"names"},
    "layout.names": set(),
    "layout.groups": BASE | {"layout.names"},
    "layout.joining": BASE | {"layout.names", "layout.groups"},
    "layout.refining": BASE | {"names", "value_kinds", "layout.names", "layout.groups"},
    "layout.grouping": BASE | {"layout.names", "layout.groups", "layout.joining", "layout.refining"},
    "layout": set(),
    "logical": set(),
    "logical.boxes": BASE | {"kernel.pieces"},
    "logical.views": BASE | {"kernel.pieces"},
    "logical.dtensors": BASE | {"logical.boxes"},
    "logical.deepspeed": BASE | {"logical.boxes", "comparison.values"},
    "logical.megatron": BASE | {"names", "logical.boxes", "logical.views", "tensor_parallel"},
    "logical.labels": BASE,
    "logical.second_weights": BASE,
    "logical.progress": BASE | {"names", "value_kinds", "layout.names", "kernel.blocks"},
    "logical.model": BASE
    | {"names", "tensor_parallel", "logical.progress"}
    | {"logical.boxes", "logical.deepspeed", "logical.dtensors", "logical.megatron"}
    | {f"comparison.{part}" for part in ("copies", "optimizer_parts", "replica_groups", "ties", "values")},
    "conversion": set(),
    "conversion.casts": BYTES,
    "conversion.rows": BYTES,
    "conversion.templates": set(),
    "conversion.numbering": set(),
    "conversion.name_maps": BASE | {"logical.views", "conversion.templates"},
    "conversion.vocabularies": set(),
    "conversion.shared_weights": BASE | {"comparison.ties", "conversion.vocabularies"},
    "conversion.map_files": BASE
    | {"outputs", "syncheck"}
    | {f"conversion.{part}" for part in ("name_maps", "templates", "vocabularies")},
    "conversion.mapped_models": BYTES | {"logical.views", "conversion.name_maps", "conversion.rows"},
    "conversion.recognition": BYTES
    | {f"conversion.{part}" for part in ("map_files", "mapped_models", "name_maps", "templates")}
    | {"differences"},
    "conversion.patterns": set(),
    "conversion.adapter_targets": BASE | {"conversion.patterns"},
    "conversion.adapter_settings": BASE | {"readers", "conversion.patterns", "conversion.adapter_targets"},
    "conversion.merges": BYTES | {"conversion.casts", "conversion.recognition", "logical.views", "differences"},
    "conversion.adapter_parts": BASE | {"names"},
    "conversion.replacements": BYTES
    | {"logical.views", "conversion.casts", "conversion.merges", "conversion.recognition"},
    "conversion.adapters": BYTES
    | {"readers"}
    | {
        f"conversion.{part}"
        for part in ("adapter_parts", "adapter_settings", "merges", "name_maps", "recognition", "replacements")
    },
    "conversion.acceptance": BYTES | {f"conversion.{part}" for part in ("adapters", "casts", "merges", "recognition")},
    "conversion.scales": set(),
    "conversion.quantized": BYTES | {"conversion.recognition", "conversion.scales", "differences"},
    "conversion.pairings": BYTES | {"logical.views", "conversion.recognition", "conversion.rows"},
    "conversion.affine_parameters": BASE | {"conversion.pairings"},
    "conversion.layer_rules": BYTES | {f"conversion.{part}" for part in ("affine_parameters", "numbering", "pairings")},
    "conversion.guesses": BYTES
    | {
        f"conversion.{part}"
        for part in ("affine_parameters", "layer_rules", "numbering", "pairings", "shared_weights", "vocabularies")
    },
    "conversion.general_rules": BYTES
    | {f"conversion.{part}" for part in ("name_maps", "numbering", "pairings", "templates")},
    "conversion.causes": BYTES
    | {"logical.views"}
    | {f"conversion.{part}" for part in ("merges", "casts", "name_maps", "quantized", "recognition", "rows")},
    "conversion.inference": BYTES
    | {
        f"conversion.{part}"
        for part in (
            "casts",
            "general_rules",
            "guesses",
            "layer_rules",
            "map_files",
            "name_maps",
            "pairings",
            "recognition",
            "rows",
            "templates",
        )
    },
    "earlier_steps": BASE | {"paths", "syncheck", "layout.groups", "layout.grouping"},
    "sides": BASE
    | {"conversion.name_maps", "conversion.adapters", "earlier_steps", "options", "paths"}
    | {"layout.groups", "layout.grouping", "logical.model", "logical.second_weights", "logical.views"},
    "model_diff": BASE
    | {"diagnose", "sides"}
    | {
        f"conversion.{part}"
        for part in (
            "acceptance",
            "adapters",
            "causes",
            "inference",
            "map_files",
            "mapped_models",
            "merges",
            "name_maps",
            "quantized",
            "recognition",
        )
    }
    | {"baseline", "kernel.blocks", "kinds", "comparison.group", "comparison.copies"}
    | {"earlier_steps", "names", "outputs", "paths", "verdicts", "options", "api"}
    | {
        "logical.labels",
        "logical.model",
        "logical.progress",
        "logical.second_weights",
        "layout.groups",
        "layout.grouping",
    },
    "readers": BASE | {"logical.boxes", "names", "kinds", "value_kinds", "metadata_block", "readers"},
    "kernel.pieces": BASE,
    "kernel.open_files": BASE,
    "kernel.strided": BASE | {"kernel.pieces", "kernel.open_files"},
    "kernel.blocks": BASE | {"kernel.pieces", "kernel.open_files", "kernel.strided"},
    "kernel.shares": BASE | {"kernel.blocks"},
    "kernel.moments": BASE | {"kernel.blocks"},
    "kernel": set(),
    "kernel.finiteness": set(),
    "kernel.clustering": BASE | {"kernel.blocks", "kernel.shares", "kernel.finiteness"},
    "kernel.digests": BYTES | {"kernel.moments"},
    "differences": BASE | {"tolerance", "kernel.blocks", "kernel.shares"},
    "evidence.suspects": BASE | {"kinds"},
    "evidence": set(),
    "evidence.tensors": BASE | {"kernel.blocks", "differences", "evidence.suspects"},
    "evidence.histograms": BASE | {"kernel.blocks", "differences", "evidence.suspects"},
    "evidence.history": BASE | {"kinds", "evidence.suspects"},
    "evidence.stale": BYTES | {"names", "layout.groups", "kernel.digests", "comparison.copies"},
    "evidence.free_running": BASE | {"names", "kinds", "layout.groups", "kernel.blocks", "differences"},
    "comparison.ties": BASE,
    "comparison.copies": BASE | {"comparison.replica_groups", "comparison.values"},
    "comparison.owners": BASE | {"names"},
    "comparison.optimizer_parts": BASE | {"names", "kinds", "comparison.owners", "comparison.ties"},
    "comparison.attributes": BASE | {"names", "value_kinds", "comparison.replica_groups"},
    "comparison.model_values": BASE | {"names", "value_kinds", "comparison.replica_groups"},
    "comparison.values": BASE | {"names", "value_kinds", "comparison.model_values"},
    "comparison.replica_groups": BASE | {"tensor_parallel", "logical.dtensors"},
    "comparison.reference": BASE | {"tolerance", "layout.groups", "kernel.blocks", "differences"},
    "comparison.tensors": BYTES
    | {"tolerance", "kernel.digests", "differences", "comparison.replica_groups"}
    | {"logical.dtensors"},
    "comparison": set(),
    "comparison.group": BASE
    | {"names", "kinds", "tensor_parallel", "tolerance", "layout.groups", "kernel.blocks", "kernel.digests"}
    | {"kernel.finiteness", "evidence.tensors", "evidence.histograms", "logical.dtensors"}
    | {
        f"comparison.{part}"
        for part in (
            "attributes",
            "ties",
            "copies",
            "optimizer_parts",
            "values",
            "replica_groups",
            "reference",
            "tensors",
        )
    }
    | {"comparison.model_values"},
    "diagnose": BASE | {"evidence.suspects", "evidence.history", "kinds", "value_kinds", "diagnose", "tensor_parallel"},
    "verdicts": BASE | {"diagnose"},
    "baseline": BASE | {"outputs", "verdicts"},
    "series": BASE | {"kinds"},
    "report": BASE | {"kinds", "series", "outputs", "evidence.suspects", "options", "report"},
    "omissions": BASE | {"layout.groups", "readers"},
    "paths": BASE | {"readers", "omissions", "syncheck"},
    "contents": BASE | {"readers", "kinds", "kernel.blocks", "kernel.moments", "syncheck"},
    "fingerprint": BASE
    | {"readers", "kinds", "metadata_block", "kernel.blocks", "kernel.moments", "kernel.digests", "comparison.values"}
    | {"atomic", "outputs"},
    "config": LEAVES | {"options"},
    "live": BASE
    | {"names", "kinds", "tensor_parallel", "readers", "paths", "metadata_block", "layout.groups", "report", "api"}
    | {
        "kernel.blocks",
        "kernel.finiteness",
        "kernel.pieces",
        "kernel.shares",
        "value_kinds",
        "comparison.group",
        "comparison.copies",
        "live",
    }
    | {"logical.dtensors", "logical.model", "model_diff", "options", "outputs", "events", "sides"}
    | {"comparison.reference", "comparison.replica_groups", "comparison.ties", "comparison.values"},
    "event_consistency": BASE | {"diagnose"},
    "events": BASE | {"evidence.history", "event_consistency", "report", "series", "verdicts"},
    "testing": BASE | {"api", "options", "live", "report"},
    "pytest_plugin": BASE
    | {
        "api",
        "baseline",
        "readers",
        "options",
        "config",
        "live",
        "testing",
        "report",
        "pytest_plugin",
        "model_diff",
        "outputs",
    },
    "integrations": {"live", "integrations"},
}


def imported(source: Path) -> set[str]:
    """Return the absolute names of all modules and names imported in a file, at any level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(module: str) -> str:
    """Return the layer of a module: syncheck.kernel.blocks gives kernel.blocks, syncheck.readers.files readers."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((name for name in names if name in ALLOWED), names[-1] if names else "syncheck")


def test_imports_go_one_way() -> None:
    """Modules import only allowed layers: rules and reports never import readers or the kernel."""
    wrong = []
    for source in (ROOT / "syncheck").rglob("*.py"):
        own = layer(".".join(source.relative_to(ROOT).with_suffix("").parts))
        if own in ALLOWED:
            used = {layer(name) for name in imported(source) if name.startswith("syncheck")}
            wrong += [f"{source.relative_to(ROOT)} imports {name}" for name in sorted(used - ALLOWED[own])]
    assert wrong == []


def modules_of(package: Path) -> set[str]:
    """Return the names of a package's modules and packages."""
    return {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def test_every_module_has_a_layer() -> None:
    """Every module of syncheck has a layer, including the modules of packages with several layers."""
    layers = ALLOWED.keys() | {"api", "cli", "__init__", "__main__"}
    modules = modules_of(ROOT / "syncheck")
    for package in {name.partition(".")[0] for name in layers if "." in name}:
        modules |= {f"{package}.{name}" for name in modules_of(ROOT / "syncheck" / package) - {"__init__"}}
    assert modules == layers


def test_packages_share_only_public_names() -> None:
    """syncheck never imports train, and train imports only names in `__all__` of syncheck and syncheck.live."""
    for source in (ROOT / "syncheck").rglob("*.py"):
        assert not {name for name in imported(source) if name.partition(".")[0] == "train"}, source
    public = {f"syncheck.{name}" for name in syncheck.__all__}
    public |= {f"syncheck.live.{name}" for name in syncheck.live.__all__}
    for source in (ROOT / "train").rglob("*.py"):
        assert {name for name in imported(source) if name.startswith("syncheck")} <= public, source


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
    ("code", "forbidden"),
    [
        ("import syncheck", HEAVY),
        ("import syncheck.cli.parser; syncheck.cli.parser.build_parser()", HEAVY),
        ("from syncheck.cli import main; main(['compare', 'in_sync'])", HEAVY),
        ("import syncheck; syncheck.compare('in_sync/*/*.pth')", (*HEAVY, *RARELY_NEEDED)),
        ("from syncheck.cli import main; main(['compare', 'desync/bn_local_stats'])", ("torch", "rich", "ml_dtypes")),
        ("from syncheck.cli import main; main(['report', 'desync', '--format', 'json'])", ("torch", "rich")),
    ],
)
def test_unneeded_modules_are_not_imported(code: str, forbidden: tuple[str, ...]) -> None:
    """Importing, parsing and comparing load neither torch nor rich, and numpy only if bytes differ."""
    check = f"{code}\nimport sys\nprint('LOADED', [name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=FIXTURES)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_only_the_command_line_prints_and_exits() -> None:
    """Only cli/ and __main__.py call print and sys.exit."""
    for source in (ROOT / "syncheck").rglob("*.py"):
        if "cli" in source.parts or source.name == "__main__.py":
            continue
        calls = [node.func for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
        assert not [call for call in calls if ast.unparse(call) in ("print", "sys.exit", "exit")], source


# Modules that open files for writing, and the reason for those that write no output of a user.
WRITERS = {
    "syncheck/atomic.py": "the only module that opens outputs; only outputs.py and its errors are used elsewhere",
    "syncheck/cli/streams.py": "/dev/null in place of a closed stream",
    "syncheck/pytest_plugin/ranks/session.py": "streams and stacks of a rank, in a new folder of this pytest run",
    "syncheck/pytest_plugin/ranks/process.py": "streams of a rank, in a new folder of this pytest run",
    "syncheck/live/repair/state.py": "torch.save to a buffer in memory",
}
# Names of functions that create, write, move or remove a file. `open` counts if its mode is for writing.
WRITING = frozenset(
    "write_text write_bytes touch mkstemp NamedTemporaryFile TemporaryFile mkfifo mknod symlink symlink_to hardlink_to "
    "rename renames unlink truncate ftruncate copyfile copy copy2 copytree move save save_file savez tofile "
    "O_WRONLY O_RDWR O_CREAT O_APPEND O_TRUNC".split()
)
WRITING_MODULES = frozenset({"os", "shutil", "tempfile", "Path", "file", "path", "torch", "numpy", "np"})


def opens_for_writing(call: ast.Call) -> bool:
    """Whether a call is `open`, `path.open` or `os.fdopen` with a mode for writing."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name not in ("open", "fdopen"):
        return False
    strings = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    strings += [word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)]
    return any(
        isinstance(text, str) and re.fullmatch("[rwaxbt+]+", text) and set(text) & set("wax+") for text in strings
    )


def find_writing(source: Path) -> list[str]:
    """Return the expressions of a module that write files."""
    found = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and opens_for_writing(node):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Attribute) and node.attr in WRITING:
            owner = ast.unparse(node.value)
            # Names such as `copy` and `rename` are also methods of other objects.
            if owner in WRITING_MODULES or node.attr.startswith(("write_", "O_", "touch")) or "Path(" in owner:
                found.append(ast.unparse(node))
    return found


def test_one_module_opens_outputs() -> None:
    """Only atomic.py writes files, called by outputs.py, which refuses inputs and checkpoints."""
    modules = sorted((ROOT / "syncheck").rglob("*.py"))
    writing = {str(source.relative_to(ROOT)): find_writing(source) for source in modules}
    writing = {module: calls for module, calls in writing.items() if calls}
    assert {module: calls for module, calls in writing.items() if module not in WRITERS} == {}
    assert WRITERS.keys() - {"syncheck/live/repair/state.py"} <= writing.keys()
    for source in modules:
        if source.name not in ("outputs.py", "atomic.py"):
            used = {name.rpartition(".")[2] for name in imported(source) if name.startswith("syncheck.atomic")}
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
    assert find_writing(tmp_path / "writes.py")
    assert not find_writing(tmp_path / "reads.py")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_files_and_functions_are_short(source: Path) -> None:
    """Files have at most 500 lines, and functions at most 60 without their docstring."""
    text = source.read_text(encoding="utf-8")
    assert text.count("\n") <= 500
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    documented = {f: len((ast.get_docstring(f, clean=False) or "").splitlines()) for f in functions}
    lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 - lines for f, lines in documented.items()}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


def test_every_reader_is_in_the_table() -> None:
    """A module of readers/ with a FORMAT is in READERS or FOLDERS under this name."""
    table = READERS | FOLDERS
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "syncheck" / "readers").rglob("*.py")
        if "\nFORMAT = " in path.read_text(encoding="utf-8")
    }
    assert modules == {reader.__name__ for reader in table.values()}
    assert all(name == reader.FORMAT for name, reader in table.items())


def test_every_test_has_a_docstring() -> None:
    """Each test function has a docstring."""
    for source in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert ast.get_docstring(node), f"{source}: {node.name}"


def test_modules_of_tests_have_unique_names() -> None:
    """Modules in tests/ have unique names: all folders are on the path, and Python imports only the first match."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, times in names.items() if times > 1] == []
    assert [name for name in names if name.removesuffix(".py") in sys.stdlib_module_names] == []
