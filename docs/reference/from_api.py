"""The Python API: signatures, fields and docstrings of public names."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import sources
from from_schema import RECORDS, WORDS
from marks import code, paragraphs, phrase, table, told

from syncheck.errors import PYTHON
from syncheck.options import Options, list_options

if TYPE_CHECKING:
    from collections.abc import Callable

# Modules of syncheck.integrations that users import from; each needs its library, so they are read only.
LIBRARIES = ("lightning", "transformers", "accelerate")
_FIXTURE = "pytest.fixture"


def package(name: str) -> str:
    """Return a module's docstring, and a section for each name in its `__all__`."""
    parts = [paragraphs(sources.docstring(sources.parsed(name)))]
    main = set(sources.listed("syncheck"))
    for public in sorted(sources.listed(name), key=_functions_first(name)):
        module, node = sources.home(name, public)
        if name != "syncheck" and public in main and sources.home("syncheck", public)[0] == module:
            parts.append(f"### {name}.{public}\n\nIs [syncheck.{public}](#{_anchor(f'syncheck.{public}')}).")
        else:
            parts.append(section(f"{name}.{public}", module, node))
    return "\n\n".join(parts)


def integrations() -> str:
    """Return a section for each library: its module's docstring, and the public names defined there."""
    parts = []
    for library in LIBRARIES:
        name = f"syncheck.integrations.{library}"
        module = sources.parsed(name)
        parts.append(f"### {name}\n\n{paragraphs(sources.docstring(module))}")
        defined = [node for node in module.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        public = [node for node in defined if not node.name.startswith("_")]
        parts += [section(f"{name}.{node.name}", name, node, level=4) for node in public]
    return "\n\n".join(parts)


def fixtures() -> str:
    """Return the plugin's marker and fixtures."""
    plugin = sources.parsed("syncheck.pytest_plugin")
    markers = [
        ast.literal_eval(node.args[1])
        for node in ast.walk(plugin)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "config.addinivalue_line"
    ]
    parts = []
    for text in markers:
        call, _, says = text.partition(": ")
        name = call.partition("(")[0]
        parts.append(f"### @pytest.mark.{name}\n\n```python\n@pytest.mark.{call}\n```\n\n{phrase(says)}.")
    for node in plugin.body:
        if isinstance(node, ast.FunctionDef) and _FIXTURE in sources.decorators(node) and node.name[0] != "_":
            returns = ast.unparse(node.returns) if node.returns is not None else ""
            parts.append(f"### fixture {node.name}\n\n```python\n{node.name}: {returns}\n```")
            parts.append(paragraphs(sources.docstring(node)))
    helper = sources.home("syncheck.pytest_plugin.fixture", "Syncheck")
    parts.append(section("Syncheck", *helper, level=4, constructor=False))
    return "\n\n".join(parts)


def literals() -> str:
    """Return the words that fields such as a verdict may hold."""
    rows = []
    for module in ("syncheck.clues", "syncheck.records"):
        for node in sources.parsed(module).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
                words = ast.literal_eval(node.value.slice) if isinstance(node.value, ast.Subscript) else ()
                rows.append((code(ast.unparse(node.targets[0])), ", ".join(code(f'"{word}"') for word in words)))
    return table(("type", "one of"), sorted(rows))


def section(title: str, module: str, node: sources.Definition, level: int = 3, *, constructor: bool = True) -> str:
    """Return a heading, how it is called, and what it says of itself; of a class also fields, properties and methods.

    module: where it is defined. constructor: whether users make one themselves.
    """
    head = f"{'#' * level} {title}"
    name = title.rpartition(".")[2]
    if isinstance(node, ast.FunctionDef):
        says = paragraphs(sources.docstring(node), sources.parameters(node))
        return f"{head}\n\n```python\n{sources.signature(module, node, name)}\n```\n\n{says}"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    called = f"class {name}({bases})" if bases and "(" not in bases else f"class {name}"
    made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if made and constructor:
        called += "\n\n" + sources.signature(module, made[0], name, method=True)
    fields = sources.attributes(node)
    says, of_fields = told(sources.docstring(node), [field.name for field in fields])
    names = [name for method in made for name in sources.parameters(method)]
    parts = [head, f"```python\n{called}\n```", paragraphs(says, names)]
    shared = next((key for key, record in RECORDS.items() if record == name), "")
    rows = []
    declared = list_options(PYTHON, Options) if name == "Options" else {}
    for f in fields:
        if f.name in declared:
            default, about = repr(declared[f.name].default), declared[f.name].help
        else:
            default, about = f.default, f.says or of_fields[f.name] or WORDS.get(f"{shared}.{f.name}", "")
        rows.append((code(f.name), code(f.type) if f.type else "", code(default) if default else "", phrase(about)))
    if rows:
        parts.append(table(("field", "type", "default", "is"), rows))
    return "\n\n".join([*parts, *_members(module, node)])


def _members(module: str, node: ast.ClassDef) -> list[str]:
    """Return the public properties and methods of a class; what a library calls itself, `on_...`, is left out."""
    parts = []
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith(("_", "on_")):
            continue
        says = paragraphs(sources.docstring(member), sources.parameters(member))
        if "property" in sources.decorators(member):
            returns = ast.unparse(member.returns) if member.returns is not None else ""
            parts.append(f"**`.{member.name}: {returns}`** {says}")
        else:
            parts.append(f"**`{sources.signature(module, member, f'.{member.name}', method=True)}`** {says}")
    return parts


def _functions_first(module: str) -> Callable[[str], tuple[bool, str]]:
    def key(name: str) -> tuple[bool, str]:
        return isinstance(sources.home(module, name)[1], ast.ClassDef), name.lower()

    return key


def _anchor(heading: str) -> str:
    return heading.lower().replace(".", "")
