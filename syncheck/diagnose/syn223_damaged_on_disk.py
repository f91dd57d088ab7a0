"""The bytes of a file changed after torch.save wrote them.

Signature: the CRC-32 stored by torch.save does not match the bytes of a tensor in the file. syncheck checks it only for
differing tensors, and only if it was stored (not in safetensors, and not if checksums were switched off when saving,
which stores 0). torch.load does not check it, so the file loads without an error.

Cause: the bytes changed after they were written: a failing disk, a truncated copy or download, a full file system, or a
program writing into the file. The rank itself was in order when it saved.

Fix: replace the file by another copy, or by the file of a rank without damage. `python -m zipfile -t FILE` reads all
records and prints the first damaged record. Check the disk, and send a checksum (`sha256sum`) with every copy.

Incidents: NVIDIA/Megatron-LM#5281: a corrupt local checkpoint, fetched from a replica, caused NaN three steps after
loading; nothing checks the integrity of the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.selection import list_names
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.records import TensorDiff

CODE = "SYN223"
SLUG = "damaged-on-disk"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "The bytes changed after torch.save wrote them, on the disk or while copying; torch.load does not check them. "
        "The rank itself was in order when it saved."
    )
    DIFF_CAUSE = (
        "The bytes changed after torch.save wrote them, on the disk or while copying; torch.load does not check them."
    )
    DIFF_FIX = "Save or copy the damaged file again. python -m zipfile -t FILE checks a file. Check the disk too."
    FIX = (
        "Replace the file: copy it again, or use the file of a rank that the finding does not name. "
        "python -m zipfile -t FILE checks a file. Check the disk too."
    )
    FIX_PARTS = (
        "Replace the file: copy it again. The files of ranks with other shards cannot replace it. python -m zipfile -t "
        "FILE checks a file. Check the disk too."
    )
    CHANGED = "The {paths:verb file|files} {paths:names} changed after torch.save wrote {paths:verb it|them}"
    CHECKSUMS = "{count:count tensor} of {ranks:ranks} {count:verb does|do} not match the stored CRC-32: {names:names}"


def apply(case: Case) -> Match | None:
    """Match tensors whose stored checksum does not match. The suspects are the ranks of the damaged files."""
    damaged = []
    ranks_of_files: set[int] = set()
    for diff in case.tensors:
        ranks_of_tensor = evidence_of(diff).damaged
        if ranks_of_tensor:
            damaged.append(diff)
            ranks_of_files.update(ranks_of_tensor)
    if not damaged:
        return None
    ranks = tuple(sorted(ranks_of_files))
    facts = (
        Text.CHANGED(paths=_find_paths(case, damaged, ranks)),
        Text.CHECKSUMS(
            count=len(damaged),
            ranks=ranks,
            names=list_names(damaged),
        ),
    )
    return Match(tuple(damaged), ranks, facts)


def _find_paths(case: Case, damaged: Sequence[TensorDiff], ranks: Collection[int]) -> tuple[str, ...]:
    """Return the paths of the damaged files. ranks: that wrote them."""
    paths: list[str] = []
    # A model may have many files, of which the tensors have some. Only tensors of two models have places.
    for diff in damaged:
        places = diff.places
        paths += [places[rank].path for rank in evidence_of(diff).damaged if rank in places]
    # A replica has one file, and its record has the path.
    if not paths:
        paths = [replica.path for replica in case.group.replicas if replica.rank in ranks]
    return tuple(dict.fromkeys(paths))
