"""The checkpoints that were found under the paths of a user, and how many other files are beside them."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from syncheck.frozen import mutable_record

if TYPE_CHECKING:
    from syncheck.records import Alias, Unreadable
    from syncheck.snapshots import Snapshot

# A report names so many of the files that are not checkpoints.
_MOST_NAMED = 3
# Extensions of files that usually lie beside checkpoints: notes, pictures and programs.
NOTES = tuple(".log .txt .out .err .csv .tsv .jsonl .md .yaml .yml .toml .html .png .jpg .svg .pdf .py .sh".split())
# Settings and tokenizers, of which every published model has some.
_COMPANIONS = (*NOTES, ".json", ".jinja", "tokenizer.model", "license", ".gitattributes", "latest")


@mutable_record
class Opened:
    """Checkpoints found under the given paths."""

    snapshots: list[Snapshot] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    roots: dict[str, str] = field(default_factory=dict)
    """The folder in which a checkpoint was found, by its path."""
    skipped: int = 0
    """Number of files in folders that are not checkpoints."""
    skipped_paths: list[str] = field(default_factory=list)
    """The paths of the first skipped files that may have been meant as checkpoints."""
    aliases: list[Alias] = field(default_factory=list)
    """Links to folders that were also reached by another path."""

    def skip(self, path: str) -> None:
        """Count a file that is not a checkpoint. A folder may have millions of them, so only the first are named."""
        self.skipped += 1
        is_expected = path.lower().endswith(_COMPANIONS)
        if not is_expected and len(self.skipped_paths) < _MOST_NAMED:
            self.skipped_paths.append(path)
