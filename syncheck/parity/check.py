"""Run one step of a parallel program, compare it with its definition, and report why it differs."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.errors import OptionError, UsageError
from syncheck.findings import Finding
from syncheck.layout.boxes import count_indices
from syncheck.messages import Note
from syncheck.parity.case import ParityCase
from syncheck.parity.causes import CAUSES, Cause
from syncheck.parity.measurements import CLEAR
from syncheck.parity.patterns import Situation, find_patterns, find_right
from syncheck.parity.phases import open_channel, run_user_code
from syncheck.parity.precision import cast_batch, check_dtype, size_of_element
from syncheck.parity.program import build_program, list_indices
from syncheck.parity.reference import make_reference
from syncheck.parity.refinement import refine
from syncheck.parity.resolution import find_doubt, list_tiny
from syncheck.parity.scope import has_step, list_scope
from syncheck.parity.step import explain_norm, explain_update, find_other_settings, find_wrong_updates, take_step
from syncheck.parity.trained import explain_tied
from syncheck.parity.validation import check_case
from syncheck.parity.weights import Mechanism
from syncheck.records import Counts, Group, GroupEvidence, Replica, Report, TensorDiff

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.parity.measurements import TensorWeights
    from syncheck.parity.patterns import Pattern
    from syncheck.parity.step import Step
    from syncheck.parity.trained import Explanation
    from syncheck.records import Verdict


def check_parity(
    case: ParityCase, dtype: str = "float64", group: Any = None, allow: str | Sequence[str] = ()
) -> Report:
    """Compare one step of a parallel program with the definition of its loss. A collective: call it on all ranks.

    dtype: of the parameters in both programs: float64, float32 or bfloat16. group: a process group of all ranks; the
    default group by default, and none for a program of one process. allow: codes of findings that do not count, or one
    code.

    Returns a report with one finding for each cause. All ranks raise the same error. Raises UsageError if the loss is
    not a sum of terms, if a method of the case returns an invalid result, or if the program cannot be compared.
    """
    if not isinstance(case, ParityCase):
        raise UsageError(f"case of class {type(case).__name__}: expected an instance of a subclass of ParityCase")
    check_dtype(dtype)
    allowed_codes = _check_codes(allow)
    check_case(case)
    with _restored_settings(), open_channel(group) as channel:
        report: Report = channel.run_together(lambda: _check(case, dtype, allowed_codes, channel))
    return report


def _check_codes(allow: str | Sequence[str]) -> frozenset[str]:
    """Return codes in upper case. Raises OptionError for a code that no finding of parity has."""
    codes = [allow] if isinstance(allow, str) else list(allow)
    known = [cause.code for cause in CAUSES]
    for code in codes:
        if code.upper() not in known:
            raise OptionError(f"no such code of parity; must be one of {', '.join(sorted(known))}", allow=code)
    return frozenset(map(str.upper, codes))


@contextmanager
def _restored_settings() -> Iterator[None]:
    """Restore the random state after the block: a test continues as it would without the check."""
    import torch

    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _check(case: ParityCase, dtype: str, allow: frozenset[str], channel: Any) -> Report:
    reference = run_user_code(case, lambda: make_reference(case, dtype))
    # A rank that has failed until here sends its error, before its peers wait in collectives of the program.
    channel.gather(None, "the definition exists")
    program = run_user_code(case, lambda: build_program(reference, channel))
    mechanism = Mechanism(reference, program, channel)
    run_user_code(case, mechanism.prepare)
    run_user_code(case, lambda: program.backward(cast_batch(case.batch(), dtype)))
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
        threshold=mechanism.threshold,
    )
    findings = _explain_ties(channel.gather(program.tied, "tied weights"), tuple(channel.ranks))
    # All gradients may be wrong because of a tie. One that is allowed hides no other fault.
    if not findings or "SYN445" in allow:
        findings += map(partial(explain_pattern, situation), situation.patterns)
    steps: dict[int, Step] = {}
    # A step with wrong gradients is wrong for a known reason.
    if not findings and has_step(case):
        steps = channel.gather(run_user_code(case, lambda: take_step(mechanism)), "steps")
        findings = _explain_steps(steps, mechanism)
    findings = [replace(finding, allowed=finding.code in allow) for finding in findings]
    return _make_report(mechanism, tensors, tuple(findings), steps)


def _check_coverage(tensors: Mapping[str, TensorWeights], title: str) -> None:
    """Raise UsageError unless the ranks together hold each element of each tensor."""
    for name, tensor in tensors.items():
        # Boxes may overlap, so their sizes show no hole.
        is_held = np.zeros(tensor.shape, dtype=bool)
        # Ranks with the same box hold copies.
        for runs in set(tensor.boxes.values()):
            is_held[np.ix_(*map(list_indices, runs))] = True
        if not is_held.all():
            raise UsageError(
                f"{title}: no rank has the gradient of all elements of {name}; yield the parameter from "
                "`named_parameters`, and return from `box` which part it is"
            )


def _explain_ties(tied: dict[int, dict[str, str]], ranks: tuple[int, ...]) -> list[Finding]:
    """Return the finding about weights that the program ties and the definition does not; none without any."""
    if not any(tied.values()):
        return []
    names: dict[str, None] = {}
    for first_names in tied.values():
        names.update(dict.fromkeys([*first_names.values(), *first_names]))
    return [make_finding(_find_cause("SYN445"), explain_tied(tied), list(names), ranks)]


def _explain_steps(steps: dict[int, Step], mechanism: Mechanism) -> list[Finding]:
    """Return the finding about norm and clipping, else about the update, of a program with right gradients."""
    names = find_wrong_updates(steps) or list(mechanism.reference.names)
    explanation = explain_norm(steps, mechanism.program.mesh, mechanism.reference.case.max_norm)
    code = "SYN446"
    # A wrong clip changes the update too.
    if explanation is None:
        explanation, code = explain_update(steps), "SYN448"
        names = find_wrong_updates(steps) or find_other_settings(steps)
    if explanation is None:
        return []
    return [make_finding(_find_cause(code), explanation, names, tuple(steps))]


def _find_cause(code: str) -> Cause:
    """Return the first cause in the table with a code, for its sentences."""
    return next(cause for cause in CAUSES if cause.code == code)


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
            # Evidence with large rounding errors excludes no other cause.
            if situation.is_coarse:
                explanation = replace(explanation, certainty="consistent")
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
        cause=members[f"CAUSE{explanation.variant}"](**explanation.parameters),
        fix=members[f"FIX{explanation.variant}"](),
        certainty=explanation.certainty,
        alternatives=explanation.alternatives,
    )


def _make_report(
    mechanism: Mechanism,
    tensors: dict[str, TensorWeights],
    findings: tuple[Finding, ...],
    steps: dict[int, Step],
) -> Report:
    """Return the report: one group, with one replica for each rank, and the tensors that differ."""
    case = mechanism.reference.case
    dtype = mechanism.reference.dtype
    wrong_updates = find_wrong_updates(steps)
    differing = []
    for tensor in tensors.values():
        # Either the gradient or the parameter after the step.
        if tensor.is_wrong(mechanism.threshold):
            differing.append(_describe(tensor, dtype, mechanism.threshold))
        elif tensor.name in wrong_updates:
            differing.append(_describe_update(tensor, steps, dtype))
    different = len(differing)
    # Gradients of two programs are never bitwise equal for a reason, so right tensors are close.
    close = len(tensors) - different
    counts = Counts(
        tensors=len(tensors),
        close=close,
        different=different,
    )
    is_wrong = any(finding.fails for finding in findings)
    verdict: Verdict = "out_of_sync" if is_wrong else "in_sync"
    doubt = None
    # A program is right only if the dtype would have shown a fault.
    if not is_wrong:
        doubt = find_doubt(tensors, steps, mechanism.threshold, dtype)
    if doubt is not None:
        verdict = "undecided"
    replicas = _list_replicas(mechanism, tensors)
    # Neither an allowed finding nor a case without a step may hide that nobody has looked at the step.
    notes = (*_list_notes(mechanism, tensors, len(replicas)), *list_scope(case, steps))
    group = Group(
        name=case.title,
        run=case.title,
        step=None,
        replicas=replicas,
        counts=counts,
        tensors=tuple(differing),
        kinds={"parameter": counts},
        notes=notes,
        verdict=verdict,
        findings=findings,
        evidence=GroupEvidence(doubt=doubt),
    )
    return Report(verdict, (group,), command="parity")


def _list_notes(mechanism: Mechanism, tensors: dict[str, TensorWeights], ranks: int) -> tuple[Message, ...]:
    """Return the notes about precision and checks that were not made. ranks: number of ranks with tensors."""
    dtype = mechanism.reference.dtype
    note: Message = Note.PARITY(
        terms=int(mechanism.reference.masks.sum()),
        owners=len(mechanism.reference.owners),
        ranks=ranks,
        dtype=dtype,
        threshold=mechanism.threshold,
        floor=mechanism.floor,
    )
    notes = [note]
    # Nobody should rely on a check that was not made.
    if mechanism.reference.separable is None:
        notes.append(Note.PARITY_NOT_SEPARATED())
    tiny = list_tiny(tensors, mechanism.threshold)
    if mechanism.threshold > CLEAR:
        notes.append(Note.PARITY_COARSE(name=dtype))
    elif tiny:
        notes.append(Note.PARITY_TINY(count=len(tiny), names=tiny, dtype=dtype))
    return tuple(notes)


def _list_replicas(mechanism: Mechanism, tensors: dict[str, TensorWeights]) -> tuple[Replica, ...]:
    """Return one record for each rank with tensors."""
    counts: dict[int, int] = defaultdict(int)
    elements: dict[int, int] = defaultdict(int)
    for tensor in tensors.values():
        for rank in tensor.solutions:
            counts[rank] += 1
            elements[rank] += math.prod(map(count_indices, tensor.boxes[rank]))
    title = mechanism.reference.case.title
    replicas = []
    for rank, count in sorted(counts.items()):
        replica = Replica(
            path=title,
            rank=rank,
            format="memory",
            tensors=count,
            bytes=elements[rank] * size_of_element(mechanism.reference.dtype),
        )
        replicas.append(replica)
    return tuple(replicas)


def _describe(tensor: TensorWeights, dtype: str, threshold: float) -> TensorDiff:
    """Return the record of a tensor with a wrong gradient. The largest difference is of the gradient."""
    wrong_ranks = tensor.list_wrong_ranks(threshold)
    largest = tensor.max_error if tensor.is_finite else None
    return _make_record(tensor, dtype, wrong_ranks, tensor.differing, largest)


def _describe_update(tensor: TensorWeights, steps: Mapping[int, Step], dtype: str) -> TensorDiff:
    """Return the record of a tensor with a right gradient and a wrong update."""
    wrong_ranks = set()
    differing, largest = 0, 0.0
    for rank, step in steps.items():
        if tensor.name in step.errors:
            wrong_ranks.add(rank)
            differing_on_rank, largest_on_rank = step.errors[tensor.name]
            differing = max(differing, differing_on_rank)
            largest = max(largest, largest_on_rank)
    return _make_record(tensor, dtype, wrong_ranks, differing, largest)


def _make_record(
    tensor: TensorWeights, dtype: str, wrong_ranks: set[int], differing: int, largest: float | None
) -> TensorDiff:
    """Return the record of a wrong tensor. Right and wrong ranks are two clusters, or wrong ranks are the only one."""
    right_ranks = tensor.solutions.keys() - wrong_ranks
    clusters = tuple(sorted(right_ranks)), tuple(sorted(wrong_ranks))
    return TensorDiff(
        name=tensor.name,
        kind="parameter",
        dtype=dtype,
        shape=tensor.shape,
        status="different",
        mismatched=differing,
        numel=tensor.elements,
        max_abs=largest,
        clusters=tuple(filter(None, clusters)),
    )
