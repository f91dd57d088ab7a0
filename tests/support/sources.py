"""What the tests of the architecture know of each Python file. Each file is parsed once, and its tree is not kept."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Names of functions that create, write, move or remove a file. `open` counts if its mode is for writing.
WRITING = frozenset(
    "write_text write_bytes touch mkstemp NamedTemporaryFile TemporaryFile mkfifo mknod symlink symlink_to hardlink_to "
    "rename renames unlink truncate ftruncate copyfile copy copy2 copytree move save save_file savez tofile "
    "O_WRONLY O_RDWR O_CREAT O_APPEND O_TRUNC".split()
)
WRITING_MODULES = frozenset({"os", "shutil", "tempfile", "Path", "file", "path", "torch", "numpy", "np"})
PARSERS = ("argparse.ArgumentParser", "Parser")


@dataclass(frozen=True)
class SourceFunction:
    """A function or method of a file."""

    name: str
    lines: int
    """From `def` to the end, without the docstring."""
    is_documented: bool


@dataclass
class Source:
    """The contents of a file that the tests look at."""

    imported: set[str] = field(default_factory=set)
    """The absolute names of all modules and names imported, at any level."""
    called: set[str] = field(default_factory=set)
    """The names of called functions, with the names before their dots."""
    parsers: list[str] = field(default_factory=list)
    """The calls that build a parser of a command line."""
    writing: list[str] = field(default_factory=list)
    """The expressions that write files."""
    functions: list[SourceFunction] = field(default_factory=list)
    """At any level."""


@cache
def read_source(path: Path) -> Source:
    """Return the contents of a file. Fails for a relative import."""
    source = Source()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            _add_call(source, node)
        elif isinstance(node, ast.Attribute):
            if writes(node):
                source.writing.append(ast.unparse(node))
        elif isinstance(node, ast.Import):
            source.imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            source.imported.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = (node.end_lineno or 0) - node.lineno + 1 - len(docstring.splitlines())
            source.functions.append(SourceFunction(node.name, lines, bool(docstring)))
    return source


def _add_call(source: Source, call: ast.Call) -> None:
    name = dotted_name(call.func)
    source.called.add(name)
    if name in PARSERS:
        source.parsers.append(ast.unparse(call))
    if opens_for_writing(call):
        source.writing.append(ast.unparse(call))


def dotted_name(function: ast.expr) -> str:
    """Return a name and the names before its dots: `.read` for `open(p).read`."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        return f"{dotted_name(function.value)}.{function.attr}"
    return ""


def opens_for_writing(call: ast.Call) -> bool:
    """Whether a call is `open`, `path.open` or `os.fdopen` with a mode for writing."""
    if dotted_name(call.func).rpartition(".")[2] not in ("open", "fdopen"):
        return False
    arguments = [*call.args, *(word.value for word in call.keywords)]
    texts = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
    return any(isinstance(text, str) and re.fullmatch("[rwaxbt+]+", text) and set(text) & set("wax+") for text in texts)


def writes(attribute: ast.Attribute) -> bool:
    """Whether an attribute is a function or a flag that writes."""
    if attribute.attr not in WRITING:
        return False
    owner = ast.unparse(attribute.value)
    # Names such as `copy` and `rename` are also methods of other objects.
    return owner in WRITING_MODULES or attribute.attr.startswith(("write_", "O_", "touch")) or "Path(" in owner
