"""A file's bytes are not those that torch.save wrote.

Signature: the CRC-32 that torch.save stored for a tensor does not match its bytes in the file. It is computed for
tensors that differ between the ranks only, and proves nothing where none was stored (safetensors, or a 0 where saving
had it switched off). torch.load does not check it, so the file loads without a word.

Cause: the bytes changed after they were written: a failing disk, a copy or download that lost a part, a file system
that was full, or a program that wrote into the file. The rank itself was in order when it saved.

Fix: replace the file by another copy, or by the file of a rank that agrees with the majority. `python -m zipfile -t
FILE` reads all records and names the first that is damaged. Look after the disk, and send a checksum (`sha256sum`)
along with every copy.

Incidents: NVIDIA/Megatron-LM#5281: a corrupt local checkpoint, fetched from a replica, gave NaN three steps after it
was loaded; nothing checks such files' integrity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted
from syncheck.messages import names_text, ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN223"
SLUG = "damaged-on-disk"
SEVERITY: Severity = "error"
CAUSE = (
    "The bytes changed after torch.save wrote them, on the disk or on a copy's way; torch.load does not check. The "
    "rank itself was in order when it saved."
)
FIX = (
    "Replace the file: copy it again, or take the file of a rank that agrees with the others. "
    "python -m zipfile -t FILE checks a file; look after the disk."
)
_MOST = 3  # files that are named


def apply(case: Case) -> Match | None:
    """Fit tensors whose stored checksum does not match; the suspects are exactly the files of which that is true."""
    damaged = tuple(diff for diff in case.tensors if diff.evidence and diff.evidence.damaged)
    if not damaged:
        return None
    ranks = tuple(sorted({rank for diff in damaged for rank in (diff.evidence.damaged if diff.evidence else ())}))
    paths = [replica.path for replica in case.group.replicas if replica.rank in ranks]
    verb = "does" if len(damaged) == 1 else "do"
    return Match(
        damaged,
        ranks,
        f"{counted(len(damaged), 'tensor')} of {ranks_text(ranks)} {verb} not match the CRC-32 that torch.save stored: "
        f"{names_text([diff.name for diff in damaged])}, in {names_text(paths, _MOST)}",
    )
