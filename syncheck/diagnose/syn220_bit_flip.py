"""A single element differs, and all else agrees.

Signature: one element of one tensor of the model, and perhaps the same element of its optimizer's state. One bit
between the replicas' elements proves it, in this file or in that of an earlier step. With more bits it is
consistent with a flip before a later update: averaged gradients move the element on all ranks alike, so the gap stays
where it is. SGD keeps it, AdamW shrinks it by (1 - lr x weight decay) a step; a weight decay that goes into the
gradients (SGD, Adam) takes it to the same element of the moments, and a flip in a first moment reaches the weight one
step later. A tensor of one element (a step counter, a temperature) that differs is no bit flip by that alone, and no
single element is one where other parameters or states differ too.

Cause: a bit of that rank's memory or of a register flipped (a failing memory cell or core, rarely a particle), or one
value was written by mistake. What a flip does before the gradients are averaged reaches all ranks alike and cannot be
seen here.

Fix: take the parameters and the optimizer's state of a rank that agrees with the others (load its file on that rank)
and test the host's memory. If the same rank shows up again, leave the host out.

Incidents: silent data corruption interrupted Llama 3's training 6 times in 54 days; ByteRobust (arXiv 2509.16293)
isolates the machines outside the dominant group of equal signatures; 15 bad nodes are studied in arXiv 2502.12340.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, number_text, place_text, ranks_by
from syncheck.diagnose.spots import agreeing_text, also_there_text, one_bit, spots
from syncheck.evidence.suspects import suspects
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.diagnose.spots import Spot
    from syncheck.records import Severity, TensorDiff

CODE = "SYN220"
SLUG = "bit-flip"
SEVERITY: Severity = "error"
CAUSE = (
    "One value went wrong on one rank: a bit flipped in its memory or in a computation, or one element was "
    "overwritten. Averaged gradients keep such a gap where it is."
)
FIX = (
    "Load the file of a rank that agrees with the others on the odd one: "
    "model.load_state_dict(torch.load(FILE)['model']), its optimizer too. Test that host's memory."
)
IN_A_JOB = (
    "Copy from a rank that agrees with the others: syncheck.live.resync(model, optimizer) on all ranks, with "
    "source=RANK where there is no majority. Test that host's memory."
)
# dtype: (bits of the mantissa, bits of the exponent), from the lowest; the sign, if any, is above.
_FORMATS = {
    "float64": (52, 11),
    "float32": (23, 8),
    "float16": (10, 5),
    "bfloat16": (7, 8),
    "float8_e4m3fn": (3, 4),
    "float8_e4m3fnuz": (3, 4),
    "float8_e5m2": (2, 5),
    "float8_e5m2fnuz": (2, 5),
    "float8_e8m0fnu": (0, 8),
}


def apply(case: Case) -> Match | None:
    """Fit single elements that differ alone."""
    found = spots(case)
    if not found or any(spot.hit.extent != "one" for spot in found):
        return None
    tensors = tuple(diff for spot in found for diff in spot.tensors)
    text = "; ".join(_text(spot, case) for spot in found)
    return Match(
        tensors,
        suspects(tensors, case.group),
        f"{text}{agreeing_text(case)}{agreement_text(tensors, case.group)}",
        fix=IN_A_JOB if case.in_memory else "",
    )


def _text(spot: Spot, case: Case) -> str:
    proof = next((diff for diff in spot.tensors if one_bit(diff)), None)
    shown = proof or spot.hit
    text = f"one element of {shown.numel} differs in {place_text(shown)}{_values(shown)}"
    if proof is not None:
        return f"{text}: in one bit, {_bit_text(proof)}{also_there_text(spot)}"
    bits = shown.evidence.flipped_bits if shown.evidence else None
    text += f"{f': in {bits} bits' if bits else ''}{also_there_text(spot)}"
    for earlier in case.series:
        names = {diff.name for diff in spot.tensors} | {
            name for name in earlier.evidence.names if name.startswith(f"optimizer.{spot.hit.name}.")
        }
        for diff in earlier.tensors:
            if diff.name in names and diff.index == spot.hit.index and one_bit(diff):
                return f"{text}; at step {earlier.step} {place_text(diff)} differed in one bit, {_bit_text(diff)}"
    return f"{text}, which is consistent with a flip before a later update"


def _bit_text(diff: TensorDiff) -> str:
    """Name the bit that was flipped: 'bit 29 (exponent)'."""
    bit = diff.evidence.bit if diff.evidence else None
    if bit is None:
        return "of unknown place"
    if diff.dtype not in _FORMATS:
        return f"bit {bit}"
    mantissa, exponent = _FORMATS[diff.dtype]
    part = "mantissa" if bit < mantissa else "exponent" if bit < mantissa + exponent else "sign"
    return f"bit {bit} ({part})"


def _values(diff: TensorDiff) -> str:
    """Say what each rank holds: ', 0.08 on ranks 0, 1, 2 and 1e-22 on rank 3'."""
    sets = ranks_by(diff.evidence.values if diff.evidence else {})
    # As few digits as tell them apart.
    digits = next((n for n in (6, 9) if len({f"{v:.{n}g}" for v in sets if isinstance(v, float)}) == len(sets)), 17)
    texts = [
        f"{number_text(value, digits) if isinstance(value, float) else value} on {ranks_text(ranks)}"
        for value, ranks in sorted(sets.items(), key=lambda found: -len(found[1]))
    ]
    return f", {' and '.join(texts)}" if texts else ""
