"""`assert a == b` of two state dicts: what differs, where Python would say nothing or that it cannot tell."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# Of torch and of numpy, when a dict asks whether two of its values are equal.
_AMBIGUOUS = ("Boolean value of Tensor with more than one value is ambiguous", "truth value of an array with more than")
HINT = (
    "== of tensors, or of dicts of them, has no single answer. Instead:\n"
    "    from syncheck.testing import assert_in_sync\n"
    "    assert_in_sync(a, b)    # names the tensors that differ, by how much and why\n"
)


def explain(left: Any, right: Any) -> list[str] | None:
    """Return the lines that pytest shows for a failed `==` of two state dicts, None for anything else."""
    try:
        return _explain(left, right)
    except Exception:  # noqa: BLE001 - the objects are anyone's; then pytest's own explanation stands
        return None


def _explain(left: Any, right: Any) -> list[str] | None:
    if not (_is_state_dict(left) and _is_state_dict(right)):
        return None
    title = f"{type(left).__name__} == {type(right).__name__}"
    from syncheck import testing
    from syncheck.errors import SyncheckError

    try:
        report = testing.compare(left, right, across_ranks=False)
    except SyncheckError as error:
        return [title, str(error)]
    # Pytest shows the first eight lines unless it is asked for more.
    findings = [f"{f.code}: {f.evidence}" for group in report.groups for f in group.findings if f.fails]
    said, *table = testing.message(report).splitlines()
    return [title, said, *findings[:3], *table]


def help_for(excinfo: pytest.ExceptionInfo[BaseException]) -> str | None:
    """Return what to say of a test that failed because == of state dicts has no answer, None for other failures."""
    if not any(text in str(excinfo.value) for text in _AMBIGUOUS):
        return None
    entry = excinfo.traceback[-1]
    try:
        statement = ast.parse(str(entry.statement).strip()).body[0]
    except (SyntaxError, IndexError):
        return None
    compared = statement.test if isinstance(statement, ast.Assert) else None
    if not isinstance(compared, ast.Compare) or not isinstance(compared.ops[0], ast.Eq):
        return HINT if "==" in str(entry.statement) else None
    names = {**entry.frame.f_globals, **entry.frame.f_locals}
    # Only plain names are looked at: anything else would be computed once more.
    sides = [names.get(side.id) for side in (compared.left, *compared.comparators) if isinstance(side, ast.Name)]
    lines = explain(*sides) if len(sides) == 2 else None
    return HINT if lines is None else "\n".join([*lines, "", HINT])


def _is_state_dict(thing: Any) -> bool:
    """Whether a mapping holds tensors or arrays, at any depth; told without importing what makes them."""
    if not isinstance(thing, Mapping):
        return False
    return any(_is_tensor(value) or _is_state_dict(value) for value in thing.values())


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
