"""What would decide between causes that fit the files alike: one table for all findings.

Files show differences, and not what happened between two of them. The witnesses of `syncheck watch` prove their
findings at the step of the fault; see `live.watching.causes` for what they see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.sentences import Sentence

if TYPE_CHECKING:
    from syncheck.records import Finding, Group
    from syncheck.sentences import Message


class Decision(Sentence):
    """What to do in the next run, so that it shows which cause it was."""

    WATCH = (
        "run `torchrun --nproc-per-node 2 -m syncheck watch train.py` next time, which compares gradients, settings "
        "and steps of all ranks at each step: it shows whether it is {codes:either}"
    )
    SAVE_AT_START = (
        "save on every rank before the first step, or right after a resume: the files show whether it is {codes:either}"
    )
    RECORD_RUN = (
        "save `syncheck.metadata(run_id=...)` in each file, which shows whether the files are of one run ({codes:list})"
    )
    RECORD_WRAPPER = (
        "save `syncheck.metadata(model=ddp_model)` in each file, with DDP's wrapper, which shows whether buffers are "
        "synchronized ({codes:list})"
    )
    RECORD_MESH = (
        "save `syncheck.metadata(mesh=...)` in each file, which shows whether the files are parts of one model "
        "({codes:list})"
    )
    ALL = "{sentences:statements}"


# By what the files cannot show. A code is in one row.
_TABLE = (
    (Decision.WATCH, frozenset({"SYN107", "SYN211", "SYN212", "SYN213", "SYN214", "SYN216"})),
    (Decision.SAVE_AT_START, frozenset({"SYN210", "SYN215"})),
    (Decision.RECORD_RUN, frozenset({"SYN108"})),
    (Decision.RECORD_WRAPPER, frozenset({"SYN202"})),
    (Decision.RECORD_MESH, frozenset({"SYN104"})),
)


def list_decisions(finding: Finding, group: Group) -> list[Message]:
    """Return what would decide between the causes of a finding in files of ranks; empty for a cause that is likely."""
    # A running job is watched already, or could be.
    conditions = (finding.fails, finding.certainty == "consistent", group.has_files, not group.is_pair)
    if not all(conditions):
        return []
    decisions = []
    # Metadata with the wrapper has not decided.
    is_recorded = group.evidence.metadata.buffers_synced is not None
    decided = {Decision.RECORD_WRAPPER} if is_recorded else set()
    for sentence, deciding_codes in _TABLE:
        if sentence in decided:
            continue
        codes = tuple(filter(deciding_codes.__contains__, (finding.code, *finding.alternatives)))
        if codes:
            decisions.append(sentence(codes=codes))
    return decisions
