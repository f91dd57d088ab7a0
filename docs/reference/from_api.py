"""The Python API: signatures, fields and docstrings of the public names."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import sources
from from_schema import RECORDS, WORDS
from marks import code, paragraphs, phrase, split_fields, table

from syncheck.options import PYTHON, DiffOptions, Options, list_options

if TYPE_CHECKING:
    from collections.abc import Callable

# Public modules of syncheck.integrations. Each imports its library, so they are parsed and never imported.
LIBRARIES = ("lightning", "transformers", "accelerate")
_FIXTURE = "pytest.fixture"


# Names of `syncheck` on pages of their own.
TESTING_OF = {"parity": frozenset("ParityCase assert_parallel_equals_single sampler_order".split())}
RECORDS_OF = {
    "records": frozenset("Closure Counts DriftPoint Finding Group Replica Report Shards Unreadable".split()),
    "tensors": frozenset("Place Snapshot Tensor TensorDiff Tie ValueDiff".split()),
}


def package(name: str, page: str = "") -> str:
    """Return a module's docstring, and a section for each name in its `__all__`.

    page: for `syncheck`, a page of `RECORDS_OF`, for `syncheck.testing` one of `TESTING_OF`, without the docstring; by
    default all names on no such page.
    """
    parts = [] if page else [paragraphs(sources.docstring(sources.parsed(name)))]
    main = set(sources.listed("syncheck"))
    elsewhere = frozenset().union(*RECORDS_OF.values())
    if name == "syncheck":
        names = [public for public in sources.listed(name) if public in RECORDS_OF.get(page, main - elsewhere)]
    elif name == "syncheck.testing":
        other_pages = frozenset().union(*TESTING_OF.values())
        all_names = frozenset(sources.listed(name))
        names = [public for public in sources.listed(name) if public in TESTING_OF.get(page, all_names - other_pages)]
    else:
        names = list(sources.listed(name))
    for public in sorted(names, key=_functions_first(name)):
        module, node = sources.home(name, public)
        if name != "syncheck" and public in main and sources.home("syncheck", public)[0] == module:
            parts.append(f"### {name}.{public}\n\nSee [syncheck.{public}](api.md#{_anchor(f'syncheck.{public}')}).")
        else:
            parts.append(section(f"{name}.{public}", module, node))
    return "\n\n".join(parts)


def integrations() -> str:
    """Return a section for each library: the docstring of its module, and the public names defined there."""
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
    """Return the marker and the fixtures of the pytest plugin."""
    plugin = sources.parsed("syncheck.pytest_plugin")
    markers = [
        ast.literal_eval(node.args[1])
        for node in ast.walk(plugin)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "config.addinivalue_line"
    ]
    parts = []
    for text in markers:
        call, _, meaning = text.partition(": ")
        name = call.partition("(")[0]
        parts.append(f"### @pytest.mark.{name}\n\n```python\n@pytest.mark.{call}\n```\n\n{phrase(meaning)}.")
    for node in plugin.body:
        if isinstance(node, ast.FunctionDef) and _FIXTURE in sources.decorators(node) and node.name[0] != "_":
            returns = ast.unparse(node.returns) if node.returns is not None else ""
            parts.append(f"### fixture {node.name}\n\n```python\n{node.name}: {returns}\n```")
            parts.append(paragraphs(sources.docstring(node)))
    helper = sources.home("syncheck.pytest_plugin.fixture", "Syncheck")
    parts.append(section("Syncheck", *helper, level=4, constructor=False))
    return "\n\n".join(parts)


def literals() -> str:
    """Return the allowed values of `verdict` and similar fields."""
    rows = []
    for module in ("syncheck.records",):
        for node in sources.parsed(module).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
                words = ast.literal_eval(node.value.slice) if isinstance(node.value, ast.Subscript) else ()
                rows.append((code(ast.unparse(node.targets[0])), ", ".join(code(f'"{word}"') for word in words)))
    return table(("type", "values"), sorted(rows))


def section(title: str, module: str, node: sources.Definition, level: int = 3, *, constructor: bool = True) -> str:
    """Return heading, signature and docstring of a public name, and for a class its fields, properties and methods.

    module: the module with the definition. constructor: whether users create objects of a class themselves.
    """
    head = f"{'#' * level} {title}"
    name = title.rpartition(".")[2]
    if isinstance(node, ast.FunctionDef):
        text = paragraphs(sources.docstring(node), sources.parameters(node))
        return f"{head}\n\n```python\n{sources.signature(module, node, name)}\n```\n\n{text}"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    called = f"class {name}({bases})" if bases and "(" not in bases else f"class {name}"
    made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if made and constructor:
        called += "\n\n" + sources.signature(module, made[0], name, method=True)
    fields = sources.attributes(node)
    text, of_fields = split_fields(sources.docstring(node), [field.name for field in fields])
    names = [name for method in made for name in sources.parameters(method)]
    parts = [head, f"```python\n{called}\n```", paragraphs(text, names)]
    shared = next((key for key, record in RECORDS.items() if record == name), "")
    rows = []
    classes = {"Options": Options, "DiffOptions": DiffOptions}
    declared = list_options(PYTHON, classes[name]) if name in classes else {}
    for f in fields:
        if f.name in declared:
            default, about = repr(declared[f.name].default), declared[f.name].help
        else:
            default, about = f.default, f.text or of_fields[f.name] or WORDS.get(f"{shared}.{f.name}", "")
        rows.append((code(f.name), code(f.type) if f.type else "", code(default) if default else "", phrase(about)))
    if rows:
        parts.append(table(("field", "type", "default", "meaning"), rows))
    return "\n\n".join([*parts, *_members(module, node)])


def _members(module: str, node: ast.ClassDef) -> list[str]:
    """Return the public properties and methods of a class, without the hooks `on_...` that its library calls."""
    parts = []
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith(("_", "on_")):
            continue
        text = paragraphs(sources.docstring(member), sources.parameters(member))
        if "property" in sources.decorators(member):
            returns = ast.unparse(member.returns) if member.returns is not None else ""
            parts.append(f"**`.{member.name}: {returns}`** {text}")
        else:
            parts.append(f"**`{sources.signature(module, member, f'.{member.name}', method=True)}`** {text}")
    return parts


def _functions_first(module: str) -> Callable[[str], tuple[bool, str]]:
    def key(name: str) -> tuple[bool, str]:
        return isinstance(sources.home(module, name)[1], ast.ClassDef), name.lower()

    return key


def _anchor(heading: str) -> str:
    return heading.lower().replace(".", "")
