"""Measure how densely code is written.

    python tools/density.py --max syncheck/* train       # each path is measured alone; exit code 1 beyond a limit
    python tools/density.py --list 20 syncheck/readers   # the densest functions, to open first

Rates are per 100 lines of function bodies without docstrings, or in percent. A high rate is a symptom. Rewrite the
function with named steps, a helper with a purpose, or a table instead of branches. Line breaks, lambdas or `match` in
the place of branches meet a rate and help no reader.
"""

from __future__ import annotations

import argparse
import ast
import io
import operator
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    Function = ast.FunctionDef | ast.AsyncFunctionDef


class Limit(NamedTuple):
    """The limits of a rate."""

    lowest: float
    highest: float


# The limits are about twice the highest rates of pip-audit, structlog, pytest-xdist, torchsnapshot and nanochat.
LIMITS = {
    "comprehensions": Limit(0, 5),
    "nested": Limit(0, 0.3),
    "conditionals": Limit(0, 2.5),
    "branches": Limit(0, 22),
    "empty names": Limit(0, 1),
    "comments": Limit(3, 100),
    "over 12": Limit(0, 0),
}
MOST_BRANCHES = 12
SHORTEST = 8  # lines; a shorter function is no room to open

# Names that do not tell what a variable holds.
EMPTY_NAMES = frozenset(
    "apart asked at came far found given held here inside kept known left listed made near odd of one one_ other others"
    " own own_ place rest same seen sent shown some stored taken there thing things told wanted whole".split()
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class MeasuredFunction(NamedTuple):
    """The counts of one function, with the functions inside it."""

    place: str
    """File, line and name."""
    lines: int
    """Lines of the body without the docstring."""
    comprehensions: int
    """Comprehensions, lambdas, and calls of `map` and `filter`."""
    nested: int
    """Comprehensions with several `for`, or with a comprehension inside."""
    conditionals: int
    """Conditional expressions."""
    branches: int
    """Statements that branch or loop."""
    operands: int
    """Operands of `and` and `or` after the first."""

    @property
    def density(self) -> float:
        """Constructs per 100 lines."""
        constructs = self.comprehensions + 4 * self.nested + self.conditionals + self.branches + self.operands
        return 100 * constructs / max(self.lines, 1)


class Density(NamedTuple):
    """The measurements of a file or folder."""

    rates: dict[str, float]
    """By name of LIMITS."""
    functions: list[MeasuredFunction]
    """The outer functions, the densest first."""
    empty_names: Counter[str]
    """How often each empty name is bound."""


def measure(*paths: Path) -> Density:
    """Measure files and all Python files of folders together. Raises SyntaxError for a file that Python cannot read."""
    functions: list[MeasuredFunction] = []
    names: Counter[str] = Counter()
    lines = comments = 0
    for file in find_files(paths):
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        functions += [measure_function(function, file) for function in find_outer_functions(tree)]
        names.update(list_bound_names(tree))
        lines += source.count("\n")
        comments += count_comments(source)
    functions.sort(key=operator.attrgetter("density"), reverse=True)
    empty_names = Counter({name: count for name, count in names.items() if name in EMPTY_NAMES})
    rates = compute_rates(functions)
    rates["empty names"] = 100 * empty_names.total() / max(names.total(), 1)
    rates["comments"] = 100 * comments / max(lines, 1)
    return Density({name: rates[name] for name in LIMITS}, functions, empty_names)


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files at or below the paths."""
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob("*.py"))
        else:
            yield path


def compute_rates(functions: Collection[MeasuredFunction]) -> dict[str, float]:
    """Return the rates that follow from functions alone."""
    lines = max(sum(function.lines for function in functions), 1)
    return {
        "comprehensions": 100 * sum(function.comprehensions for function in functions) / lines,
        "nested": 100 * sum(function.nested for function in functions) / lines,
        "conditionals": 100 * sum(function.conditionals for function in functions) / lines,
        "branches": 100 * sum(function.branches + function.operands for function in functions) / lines,
        "over 12": float(sum(function.branches > MOST_BRANCHES for function in functions)),
    }


def find_outer_functions(tree: ast.Module) -> Iterator[Function]:
    """Yield the functions and methods that are not inside another function."""
    # A function inside is counted with the function around it.
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not isinstance(node, _FUNCTIONS) or node in inner:
            continue
        inner.update(child for child in ast.walk(node) if child is not node)
        yield node


def measure_function(function: Function, file: Path) -> MeasuredFunction:
    """Count the constructs of a function. file: its file, for messages."""
    comprehensions = nested = conditionals = branches = operands = 0
    for node in ast.walk(function):
        if isinstance(node, _COMPREHENSIONS):
            comprehensions += 1
            nested += is_nested(node)
        elif is_lambda_or_map(node):
            comprehensions += 1
        elif isinstance(node, ast.IfExp):
            conditionals += 1
        elif isinstance(node, ast.BoolOp):
            operands += len(node.values) - 1
        elif isinstance(node, _BRANCHES):
            branches += 1
    place = f"{file}:{function.lineno} {function.name}"
    lines = count_body_lines(function)
    return MeasuredFunction(place, lines, comprehensions, nested, conditionals, branches, operands)


def is_nested(comprehension: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> bool:
    """Return whether a comprehension has several `for`, or contains a comprehension."""
    if len(comprehension.generators) > 1:
        return True
    return any(isinstance(node, _COMPREHENSIONS) and node is not comprehension for node in ast.walk(comprehension))


def is_lambda_or_map(node: ast.AST) -> bool:
    """Return whether a node is a lambda, or a call of `map` or `filter`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("map", "filter")
    return isinstance(node, ast.Lambda)


def count_body_lines(function: Function) -> int:
    """Return the number of lines of a function's body without its docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    # The method of a protocol has a docstring only.
    if not body:
        return 0
    last = body[-1].end_lineno
    assert last is not None
    return last - body[0].lineno + 1


def list_bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of variables, at each assignment, and of parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def count_comments(source: str) -> int:
    """Return the number of lines that hold a comment only."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return sum(not token.line[: token.start[1]].strip() for token in comments)


def find_exceeded(rates: Mapping[str, float], limits: Mapping[str, Limit] = LIMITS) -> list[str]:
    """Return the names of the rates that are beyond a limit."""
    exceeded = []
    for name, rate in rates.items():
        if not limits[name].lowest <= rate <= limits[name].highest:
            exceeded.append(name)
    return exceeded


def main(arguments: Sequence[str]) -> int:
    """Print the rates of each path."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--max", action="store_true", help="exit with 1 beyond a limit")
    parser.add_argument("--list", type=int, default=0, metavar="N", help="print the N densest functions")
    options = parser.parse_args(arguments)
    any_exceeded = False
    for path in options.paths:
        density = measure(path)
        exceeded = find_exceeded(density.rates)
        any_exceeded = any_exceeded or bool(exceeded)
        print(path)
        for name, rate in density.rates.items():
            mark = "!" if name in exceeded else " "
            print(f"{mark} {name:15} {rate:5.1f}   {LIMITS[name].lowest:g} to {LIMITS[name].highest:g}")
        long_enough = [function for function in density.functions if function.lines >= SHORTEST]
        for function in long_enough[: options.list]:
            print(f"  {function.density:4.0f} {function.place} ({function.lines} lines, {function.branches} branches)")
        for name, count in density.empty_names.most_common(options.list):
            print(f"  {count:4} times {name}")
    return int(options.max and any_exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
