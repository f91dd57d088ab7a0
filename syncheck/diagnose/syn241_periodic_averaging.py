"""Local SGD: the ranks train on their own and average their parameters now and then.

Signature: the metadata says that parameters are averaged every so many steps. Between two averages all trained
parameters differ; right after one they agree, and only the optimizer's state (and BatchNorm's statistics) differ, for
these are not averaged. Parameters that differ right after an average, in the warm-up, or when an average is overdue,
are not of this finding, and nor are frozen ones.

Cause: by design. The files are no replicas all the same: which rank's file is kept decides which model it is.

Fix: save right after an averaging step, and evaluate and keep that; or average once more before the last save.
(`averager.average_parameters()` averages when its own count says so and not whenever it is called.) To let a check
pass: `--allow SYN241`. The momentum may be averaged too, which most recipes leave out.

Incidents: none known; measured with torch's PostLocalSGDOptimizer and PeriodicModelAverager: with a period of 4, ranks
are equal at steps 5, 9 and 13, and differ at 6 to 8 and 10 to 12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.averaging import averaging_of
from syncheck.diagnose.case import Match, counted, differ, gap_text, parameter_of
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.averaging import Averaging
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN241"
SLUG = "periodic-averaging"
SEVERITY: Severity = "warning"
CAUSE = "Local SGD: ranks train on their own between two averages of the parameters, and never average the momentum."


class Text(Sentence):
    """The sentences of this finding."""

    FIX = (
        "Save right after an averaging step: if (averager.step - 1 - averager.warmup_steps) % averager.period == 0: "
        "torch.save(...). Or average before the last save: for p in model.parameters(): "
        "dist.all_reduce(p.data.div_(dist.get_world_size())). To accept the finding: {allow:option=SYN241}."
    )
    IN_A_JOB = (
        "No fix is needed; to accept the finding: {allow:option=SYN241}. Parameters are equal only right after an "
        "averaging step, momentum and BatchNorm statistics never."
    )


FIX = Text.FIX


def apply(case: Case) -> Match | None:
    """Fit what local SGD leaves apart at this step: all that is trained, or right after an average all but that."""
    averaging = averaging_of(case.group)
    if averaging is None or not case.agrees("optimizer_step"):
        return None
    trained = {parameter_of(name) for name, kind in case.group.evidence.names.items() if kind == "optimizer"}
    frozen = case.frozen
    parameters = tuple(d for d in case.of_kind("parameter") if (d.name in trained if trained else d.name not in frozen))
    # A difference that outlasts the average may have brought about all others.
    if averaging.just_averaged and not case.agrees("parameter"):
        return None
    statistics = case.of_kind(*BN_STATISTICS) if case.agrees("bn_count") else ()
    state = case.of_kind("optimizer")
    if not parameters and not state:
        return None
    text = _text(case, averaging, parameters, statistics)
    fix = Text.IN_A_JOB() if case.in_memory else ""
    return Match((*parameters, *state, *statistics), case.group.ranks, text, fix=fix)


def _text(case: Case, at: Averaging, parameters: tuple[TensorDiff, ...], statistics: tuple[TensorDiff, ...]) -> str:
    when = f"were averaged last after step {at.last}" if at.last else "have not been averaged yet"
    if at.just_averaged:
        when = "were averaged after this one"
    if not at.last:
        when += f", {counted(at.warmup, 'step')} of warm-up aside"
    texts = [
        f"step {at.step}, parameters are averaged every {counted(at.period, 'step')} and {when}",
        f"{len(parameters)} of {case.compared('parameter')} parameters differ after {counted(at.own_steps, 'step')} of "
        f"each rank on its own, {gap_text(parameters)}"
        if parameters
        else "all parameters agree",
    ]
    state = case.of_kind("optimizer")
    if state:
        texts.append(f"{counted(len(state), 'tensor')} of the optimizer {differ(len(state))}, never averaged")
    if statistics:
        texts.append(f"{counted(len(statistics), 'running statistic')} differ, each of its rank's own batches")
    return "; ".join(texts)
