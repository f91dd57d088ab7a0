"""The errors that a user can mend: run.py prints them as one line and exits with 2."""

from __future__ import annotations


class UserError(Exception):
    """An option, file or environment that cannot be used; raised on all ranks alike, printed by rank 0."""


class RankError(UserError):
    """Concerns the rank that raises it and maybe no other, so that rank prints it itself."""
