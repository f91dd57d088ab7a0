"""Explanations of `assert a == b` for two state dicts."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# Messages of torch and numpy if a dict compares two tensors or arrays.
_AMBIGUOUS = ("Boolean value of Tensor with more than one value is ambiguous", "truth value of an array with more than")
HINT = (
    "== does not compare tensors or dicts of tensors as a whole. Instead:\n"
    "    from syncheck.testing import assert_in_sync\n"
    "    assert_in_sync(a, b)    # reports which tensors differ, by how much and why\n"
)


def explain(left: Any, right: Any) -> list[str] | None:
    """Return pytest's explanation of a failed `==` of two state dicts; None for other objects."""
    try:
        return _explain(left, right)
    except Exception:  # noqa: BLE001 - user objects may raise anything; pytest then prints its own explanation
        return None


def _explain(left: Any, right: Any) -> list[str] | None:
    """Return the explanation of `explain`. Raises errors of the objects."""
    if not (_is_state_dict(left) and _is_state_dict(right)):
        return None

    title = f"{type(left).__name__} == {type(right).__name__}"
    from syncheck import testing
    from syncheck.errors import SyncheckError

    try:
        report = testing.compare(left, right, across_ranks=False)
    except SyncheckError as error:
        return [title, str(error)]

    # Without -v, pytest shows the first eight lines only, so findings come first.
    findings = []
    for group in report.groups:
        failing = [finding for finding in group.findings if finding.fails]
        findings += [f"{finding.code} ({finding.certainty}): {finding.evidence}" for finding in failing]

    summary, *table = testing.message(report).splitlines()
    return [title, summary, *findings[:3], *table]


def explain_error(excinfo: pytest.ExceptionInfo[BaseException]) -> str | None:
    """Return help for a test in which == of state dicts raised an error; None for other errors."""
    if not any(text in str(excinfo.value) for text in _AMBIGUOUS):
        return None

    entry = excinfo.traceback[-1]
    source = str(entry.statement).strip()
    try:
        statement = ast.parse(source).body[0]
    except (SyntaxError, IndexError):
        return None

    compared = _find_equality(statement)
    if compared is None:
        return HINT if "==" in source else None

    # Only plain names, because other expressions would have to be evaluated again.
    names = [side.id for side in (compared.left, *compared.comparators) if isinstance(side, ast.Name)]
    if len(names) != 2:
        return HINT

    values = {**entry.frame.f_globals, **entry.frame.f_locals}
    lines = explain(values.get(names[0]), values.get(names[1]))
    return HINT if lines is None else "\n".join([*lines, "", HINT])


def _find_equality(statement: ast.stmt) -> ast.Compare | None:
    """Return the comparison of `assert a == b`; None for another statement."""
    if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
        return None
    return statement.test if isinstance(statement.test.ops[0], ast.Eq) else None


def _is_state_dict(value: Any) -> bool:
    """Whether a mapping holds tensors or arrays at any depth. Imports neither torch nor numpy."""
    if not isinstance(value, Mapping):
        return False
    return any(_is_tensor(entry) or _is_state_dict(entry) for entry in value.values())


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
