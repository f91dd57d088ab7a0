"""Lists of notes that apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncheck.messages import Message


def note_if(applies: object, note: Message) -> list[Message]:
    """Return a list of the note, or an empty list.

    applies: a condition, or the ranks or names that the note lists.
    """
    return [note] if applies else []
