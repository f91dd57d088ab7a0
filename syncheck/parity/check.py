"""Run one step of a parallel program, compare it with its definition, and report why it differs."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from syncheck.errors import SyncheckError, UsageError
from syncheck.findings import Finding
from syncheck.layout.boxes import count_indices
from syncheck.live.channel import Channel, world_size
from syncheck.messages import Note
from syncheck.parity.case import ParityCase
from syncheck.parity.causes import CAUSES, Cause, Explanation
from syncheck.parity.patterns import Situation, find_patterns, find_right
from syncheck.parity.precision import cast_batch, check_dtype
from syncheck.parity.program import build_program
from syncheck.parity.reference import make_reference
from syncheck.parity.refinement import refine
from syncheck.parity.step import explain_norm, explain_update, find_wrong_updates, take_step
from syncheck.parity.weights import Mechanism
from syncheck.records import Counts, Group, Replica, Report, TensorDiff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from syncheck.messages import Message
    from syncheck.parity.measurements import TensorWeights
    from syncheck.parity.patterns import Pattern
    from syncheck.parity.step import Step
    from syncheck.records import Verdict


class Alone:
    """The channel of a program without a process group."""

    rank = 0
    ranks = (0,)

    def gather(self, message: Any, _kind: str) -> dict[int, Any]:
        """Return the message of the only rank."""
        return {0: message}

    def run_together(self, work: Callable[[], Report]) -> Report:
        """Return the result of the work."""
        return work()


def check_parity(case: ParityCase, dtype: str = "float64", group: Any = None) -> Report:
    """Compare one step of a parallel program with the definition of its loss. A collective: call it on all ranks.

    dtype: of the parameters in both programs: float64, float32 or bfloat16. group: a process group of all ranks; the
    default group by default, and none for a program of one process.

    Returns a report with one finding for each cause. All ranks raise the same error. Raises UsageError if the loss is
    not a sum of terms, if a method of the case returns an invalid result, or if the program cannot be compared.
    """
    if not isinstance(case, ParityCase):
        raise UsageError(f"case of class {type(case).__name__}: expected an instance of a subclass of ParityCase")
    check_dtype(dtype)
    channel: Any = Channel(group) if world_size() else Alone()
    with _restored_settings():
        report: Report = channel.run_together(lambda: _check(case, dtype, channel))
    return report


@contextmanager
def _restored_settings() -> Iterator[None]:
    """Restore the random state after the block: a test continues as it would without the check."""
    import torch

    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _check(case: ParityCase, dtype: str, channel: Any) -> Report:
    reference = _call_user(case, lambda: make_reference(case, dtype))
    # A rank that has failed until here sends its error, before its peers wait in collectives of the program.
    channel.gather(None, "the definition exists")
    program = _call_user(case, lambda: build_program(reference, channel))
    mechanism = Mechanism(reference, program, channel)
    _call_user(case, mechanism.prepare)
    _call_user(case, lambda: program.backward(cast_batch(case.batch(), dtype)))
    tensors = mechanism.measure()
    _check_coverage(tensors, case.title)
    # From the simplest explanation to the most expensive one.
    mechanism.settle_small(tensors)
    mechanism.find_partial(tensors)
    refined = refine(mechanism, tensors)
    situation = Situation(
        tensors=tensors,
        order=reference.order,
        owners=reference.owners,
        right=find_right(tensors, mechanism.threshold),
        patterns=find_patterns(tensors, mechanism.threshold, refined),
        mesh=program.mesh,
        sizes=_list_sizes(mechanism),
        counts=_list_counts(mechanism),
        divisor=reference.divisor,
        refined=refined,
    )
    findings = []
    for pattern in situation.patterns:
        findings.append(explain_pattern(situation, pattern))
    wrong_updates: list[str] = []
    # A step with wrong gradients is wrong for a known reason.
    if not findings and type(case).finish is not ParityCase.finish:
        steps = channel.gather(_call_user(case, lambda: take_step(mechanism)), "steps")
        wrong_updates = find_wrong_updates(steps)
        findings = _explain_steps(steps, mechanism, wrong_updates)
    return _make_report(mechanism, tensors, tuple(findings), wrong_updates)


def _check_coverage(tensors: Mapping[str, TensorWeights], title: str) -> None:
    """Raise UsageError unless the ranks together hold each tensor once or several times."""
    for name, tensor in tensors.items():
        elements = 0
        # Ranks with the same box hold copies.
        for runs in set(tensor.boxes.values()):
            elements += math.prod(map(count_indices, runs))
        if elements < tensor.elements:
            raise UsageError(f"{title}: no rank has the gradient of all elements of {name}")


def _explain_steps(steps: dict[int, Step], mechanism: Mechanism, wrong_updates: list[str]) -> list[Finding]:
    """Return the finding about norm and clipping, else about the update, of a program with right gradients."""
    names = wrong_updates or list(mechanism.reference.names)
    explanation = explain_norm(steps, mechanism.program.mesh, mechanism.reference.case.max_norm)
    code = "SYN446"
    # A wrong clip changes the update too.
    if explanation is None:
        explanation, code = explain_update(steps), "SYN448"
    if explanation is None:
        return []
    cause = next(cause for cause in CAUSES if cause.code == code)
    return [make_finding(cause, explanation, names, tuple(steps))]


def _call_user(case: ParityCase, work: Callable[[], Any]) -> Any:
    """Return the result of code of the user. Its errors become one line, with their class."""
    try:
        return work()
    except SyncheckError:
        raise
    except NotImplementedError:
        raise UsageError(
            f"{case.title}: override build, batch, loss_terms, parallelize and backward of ParityCase"
        ) from None
    except Exception as error:
        raise UsageError(f"{case.title}: {type(error).__name__}: {error}") from error


def _list_sizes(mechanism: Mechanism) -> dict[str, float]:
    """Return the sizes of the mesh and of the accumulation, by name."""
    owners = mechanism.reference.owners
    sizes: dict[str, float] = dict(mechanism.program.mesh)
    sizes["accumulation"] = len({owner.micro_batch for owner in owners})
    data_ranks = len({owner.rank for owner in owners})
    # The dimensions of a mesh need not divide the data.
    if data_ranks not in sizes.values():
        sizes["data ranks"] = data_ranks
    return sizes


def _list_counts(mechanism: Mechanism) -> dict[str, float]:
    """Return the numbers of terms and samples, by name."""
    reference = mechanism.reference
    counts = {"terms": reference.divisor}
    if reference.samples != reference.divisor:
        counts["samples"] = reference.samples
    if reference.positions not in (reference.divisor, reference.samples):
        counts["terms with ignored terms"] = reference.positions
    return counts


def explain_pattern(situation: Situation, pattern: Pattern) -> Finding:
    """Return the finding of the first cause in the table that matches."""
    for cause in CAUSES:
        if cause.match is None:
            continue
        explanation = cause.match(situation, pattern)
        if explanation is not None:
            names = situation.sort(pattern.names)
            ranks: set[int] = set()
            for name in names:
                ranks |= situation.tensors[name].solutions.keys()
            return make_finding(cause, explanation, names, tuple(sorted(ranks)))
    raise AssertionError("the last cause matches all patterns")


def make_finding(cause: Cause, explanation: Explanation, names: list[str], ranks: tuple[int, ...]) -> Finding:
    """Return the finding of a cause. names: of its tensors. ranks: all ranks."""
    members = cause.sentences.__members__
    return Finding(
        code=cause.code,
        slug=cause.slug,
        severity="error",
        ranks=explanation.ranks or ranks,
        tensors=tuple(names),
        facts=tuple(explanation.facts),
        cause=members["CAUSE"](**explanation.parameters),
        fix=members["FIX"](),
        certainty=explanation.certainty,
        alternatives=explanation.alternatives,
    )


def _make_report(
    mechanism: Mechanism,
    tensors: dict[str, TensorWeights],
    findings: tuple[Finding, ...],
    wrong_updates: list[str],
) -> Report:
    """Return the report: one group, with one replica for each rank, and the tensors that differ."""
    case = mechanism.reference.case
    differing = []
    for tensor in tensors.values():
        is_wrong = tensor.is_wrong(mechanism.threshold)
        # Either the gradient or the parameter after the step.
        if is_wrong or tensor.name in wrong_updates:
            description = _describe(tensor, mechanism, is_wrong=is_wrong)
            differing.append(description)
    different = len(differing)
    # Gradients of two programs are never bitwise equal for a reason, so right tensors are close.
    close = len(tensors) - different
    counts = Counts(
        tensors=len(tensors),
        close=close,
        different=different,
    )
    verdict: Verdict = "out_of_sync" if findings else "in_sync"
    replicas = _list_replicas(mechanism, tensors)
    note: Message = Note.PARITY(
        terms=int(mechanism.reference.masks.sum()),
        owners=len(mechanism.reference.owners),
        ranks=len(replicas),
        dtype=mechanism.reference.dtype,
        threshold=mechanism.threshold,
        floor=mechanism.floor,
    )
    notes = [note]
    # Nobody should rely on a check that was not made.
    if mechanism.reference.separable is None:
        notes.append(Note.PARITY_NOT_SEPARATED())
    group = Group(
        name=case.title,
        run=case.title,
        step=None,
        replicas=replicas,
        counts=counts,
        tensors=tuple(differing),
        kinds={"parameter": counts},
        notes=tuple(notes),
        verdict=verdict,
        findings=findings,
    )
    return Report(verdict, (group,), command="parity")


def _list_replicas(mechanism: Mechanism, tensors: dict[str, TensorWeights]) -> tuple[Replica, ...]:
    """Return one record for each rank with tensors."""
    counts: dict[int, int] = {}
    for tensor in tensors.values():
        for rank in tensor.solutions:
            counts[rank] = counts.get(rank, 0) + 1
    title = mechanism.reference.case.title
    replicas = []
    for rank, count in sorted(counts.items()):
        replica = Replica(
            path=title,
            rank=rank,
            format="memory",
            tensors=count,
            bytes=0,
        )
        replicas.append(replica)
    return tuple(replicas)


def _describe(tensor: TensorWeights, mechanism: Mechanism, *, is_wrong: bool) -> TensorDiff:
    """Return the record of a wrong tensor. Its largest difference is that of the gradient."""
    ranks_of_result: dict[bool, list[int]] = {}
    for rank, solution in tensor.solutions.items():
        is_right = solution.error <= mechanism.threshold
        ranks_of_result.setdefault(is_right, []).append(rank)
    clusters = [tuple(ranks) for _, ranks in sorted(ranks_of_result.items(), reverse=True)]
    return TensorDiff(
        name=tensor.name,
        kind="parameter",
        dtype=mechanism.reference.dtype,
        shape=tensor.shape,
        status="different",
        mismatched=tensor.differing,
        numel=tensor.elements,
        max_abs=tensor.max_error if is_wrong else None,
        clusters=tuple(clusters) if len(clusters) > 1 else (),
    )
