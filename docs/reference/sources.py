"""Signatures and docstrings of public names, read with `ast`: no module is imported, no library is needed."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Attribute:
    """A field of a dataclass, or an attribute set in `__init__` with a docstring below. default: may be empty."""

    name: str
    type: str
    default: str
    text: str


@cache
def parsed(module: str) -> ast.Module:
    """Parse a module or package by its dotted name. Raises FileNotFoundError if it does not exist."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def docstring(node: ast.Module | Definition) -> str:
    """Return a docstring without its indentation, or an empty text."""
    return ast.get_docstring(node) or ""


def listed(module: str) -> list[str]:
    """Return the names in `__all__` of a module."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise KeyError(f"{module} has no __all__")


def home(module: str, name: str) -> tuple[str, Definition]:
    """Return the module that defines a name, and the definition. Follows imports; raises KeyError."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name and node in parsed(module).body:
            return module, node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return home(str(node.module), name)
    raise KeyError(f"{module}.{name}")


def decorators(node: Definition) -> set[str]:
    """Return the names of the decorators of a definition, without arguments."""
    return {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}


def signature(module: str, node: ast.FunctionDef, name: str, *, method: bool = False) -> str:
    """Return the signature as Python code, without `self`, folded if it is longer than 100 columns."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    parts = _parts(module, node.args)[1 if method else 0 :]
    whole = f"{name}({', '.join(parts)}){returns}"
    return whole if len(whole) <= 100 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def parameters(node: ast.FunctionDef) -> list[str]:
    """Return the names of the arguments of a function."""
    return [node.arg for node in ast.walk(node.args) if isinstance(node, ast.arg)]


def _parts(module: str, args: ast.arguments) -> list[str]:
    """Return each parameter as Python code, with the star before keyword-only parameters."""
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    parts = [_parameter(module, *pair) for pair in zip(plain, [*defaults, *args.defaults], strict=True)]
    if args.vararg is not None:
        parts.append("*" + _parameter(module, args.vararg, None))
    elif args.kwonlyargs:
        parts.append("*")
    parts += [_parameter(module, *pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return parts + (["**" + _parameter(module, args.kwarg, None)] if args.kwarg is not None else [])


def _parameter(module: str, arg: ast.arg, default: ast.expr | None) -> str:
    typed = f": {ast.unparse(arg.annotation)}" if arg.annotation is not None else ""
    if default is None:
        return arg.arg + typed
    value = ast.unparse(_value(module, default.id) if isinstance(default, ast.Name) else default)
    return f"{arg.arg}{typed} = {value}" if typed else f"{arg.arg}={value}"


def _value(module: str, constant: str) -> ast.expr:
    """Return the value of a module constant. Follows imports; raises KeyError."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant:
            return node.value
        if isinstance(node, ast.ImportFrom) and any(alias.name == constant for alias in node.names):
            return _value(str(node.module), constant)
    raise KeyError(f"{module}.{constant}")


def attributes(node: ast.ClassDef) -> list[Attribute]:
    """Return the public fields of a class body, and attributes set in `__init__` with a docstring below."""
    found = _annotated(node.body, documented=False)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            found += _annotated(method.body, documented=True)
    return found


def _annotated(body: list[ast.stmt], *, documented: bool) -> list[Attribute]:
    found = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        text = _text(following)
        if not isinstance(node, ast.AnnAssign) and not (documented and isinstance(node, ast.Assign)):
            continue
        if documented and not text:
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
        if not name.startswith("_"):
            kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            found.append(Attribute(name, kind, "" if documented else _default(node), text))
    return found


def _default(node: ast.stmt) -> str:
    value = getattr(node, "value", None)
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        return "empty"
    return ast.unparse(value)


def _text(node: ast.stmt | None) -> str:
    """Return the text of a string statement, or an empty text."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(inspect.cleandoc(node.value.value).split())
    return ""
