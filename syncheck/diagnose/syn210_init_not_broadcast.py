"""The ranks did not start from the same model: parameters differ by a constant gap, the optimizer's state does not.

Signature: parameters differ in nearly every element, with tensors of unlike direction (median cosine under 0.9), while
the optimizer's state, made of averaged gradients, agrees; what starts from constants (norm weights, zero biases) agrees
too. Over several steps the gap stays, or shrinks by (1 - lr x weight decay) a step; of one tensor alone that must be
seen, for it may as well have been overwritten.

SGD's momentum holds the weight decay of unequal parameters, so it differs too: at most by wd / (1 - momentum) times
their gap (measured: 0.27 to 1.04 times that, over 3 to 200 steps; with unreduced gradients 6 times that and more).
The cosine of such parameters rises as both take the same steps: from 0.02 at the start to 0.95 after 600 steps of SGD
at lr 0.1, 0.39 with AdamW; a step that one rank left out leaves 0.999. Where no optimizer state is saved it must be
under 0.5, with parameters that agree beside it, or under 0.2, or the gap must be seen not to grow.

Cause: unequal seeds with nothing that sends rank 0's parameters (`DDP(init_sync=False)`, HSDP without
`sync_module_states`), or weights that are loaded after the wrap, on rank 0 only. Averaged gradients then move all
ranks alike, each from its own start, by the gradients of models that they are not.

Fix: load before wrapping, leave `init_sync` on, or send the parameters yourself after loading. FSDP1 sends them with
`sync_module_states=True`; `fully_shard` sends nothing, so give all ranks one seed, or load on every rank.

Incidents: mosaicml/llm-foundry#830, pytorch/pytorch#75870, pytorch/pytorch#140183, pytorch/torchtitan#1777,
pytorch/xla#3216.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted, parameters_text
from syncheck.diagnose.gradients import (
    agreed_before,
    cosines,
    course,
    decay_share,
    followers_text,
    in_step,
    only_decay,
    parameters_apart,
    touched,
    with_followers,
)
from syncheck.evidence.suspects import suspects
from syncheck.messages import names_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN210"
SLUG = "init-not-broadcast"
SEVERITY: Severity = "error"
CAUSE = "The ranks did not start from the same parameters: nothing sent rank 0's, or some rank loaded others later."
FIX = (
    "Load weights before wrapping and leave DDP's init_sync on (FSDP1: sync_module_states=True; fully_shard sends "
    "nothing: one seed on all ranks), or send them after loading: for t in model.state_dict().values(): "
    "dist.broadcast(t, 0)."
)

# Unequal starts differ nearly everywhere.
WHOLE = 0.9
# Cosines above which tensors are of one start: where the optimizer's state agrees; where it is apart by weight decay
# alone; where none is saved, with parameters beside them that agree, and with none.
UNLIKE, UNLIKE_BUT_DECAY, UNLIKE_WITHOUT_STATE, UNLIKE_ALONE = 0.9, 0.97, 0.5, 0.2


def apply(case: Case) -> Match | None:
    """Fit parameters that differ from the start while what the gradients made agrees."""
    apart = list(parameters_apart(case).values())
    # Another learning rate or decay on a rank moves parameters apart as well, and leaves Adam's moments equal.
    if not apart or not in_step(case):
        return None
    state = _state(case)
    trend, since = course(case, "parameter")
    if state is None or trend == "growing" or not _unequal_start(case, apart, bool(state), trend):
        return None
    found, agreeing = cosines(apart), sorted(case.agreeing("parameter"))
    text = parameters_text(case, apart)
    share = touched(apart)
    if share is not None:
        text += f", in {share:.0%} of their elements"
    if found:
        text += f", median cosine {median(found):.2f}"
    if agreeing:
        text += f"; {len(agreeing)} agree ({names_text(agreeing)})"
    text += f"; {state}" if state else "; no optimizer state was compared: consistent with unequal starts"
    if share is None:
        text += "; consistent with unequal starts, by digests alone"
    covered = with_followers(case, apart)
    text += since + followers_text(covered, "parameter", "optimizer")
    return Match(covered, suspects(apart, case.group), text + agreement_text(apart, case.group))


def _state(case: Case) -> str | None:
    """Say how the optimizer's state agrees; '' where there is none to compare, None where it does not."""
    if case.agrees("optimizer"):
        number = case.compared("optimizer")
        return f"all {counted(number, 'tensor')} of the optimizer agree" if number else ""
    if not only_decay(case):
        return None
    return (
        "the momentum differs by no more than the weight decay of the parameters' gap explains "
        f"(wd / (1 - momentum) = {decay_share(case):.3g} of it)"
    )


def _unequal_start(case: Case, apart: list[TensorDiff], has_state: bool, trend: str | None) -> bool:
    """Whether the parameters are of unequal starts: by their direction, or by a gap that stays."""
    share, found = touched(apart), cosines(apart)
    agreeing = bool(case.agreeing("parameter"))
    if share is None:
        # Digests: many that differ beside some that do not, and nothing of the optimizer.
        return has_state and agreeing and len(apart) > 1
    if share < WHOLE:
        return False
    stays = trend in ("constant", "shrinking") and not agreed_before(case)
    decay = UNLIKE if case.agrees("optimizer") else UNLIKE_BUT_DECAY
    unlike = decay if has_state else UNLIKE_WITHOUT_STATE if agreeing else UNLIKE_ALONE
    # One tensor in another direction, at one step, may as well have been overwritten.
    return stays or (len(apart) > 1 and bool(found) and median(found) < unlike)
