"""All rules in the order of precedence, and the findings of a comparison: the first matching rule covers a tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from syncheck.diagnose import (
    syn101_missing_tensors,
    syn102_shape_or_dtype_mismatch,
    syn103_prefix_normalized,
    syn104_sharded_by_design,
    syn105_tie_broken,
    syn106_different_progress,
    syn107_settings_differ,
    syn108_different_runs,
    syn201_bn_local_stats,
    syn202_bn_drift_growing,
    syn203_bn_count_mismatch,
    syn204_bn_variance_only,
    syn205_buffer_local_state,
    syn206_metric_states,
    syn210_init_not_broadcast,
    syn211_gradients_not_reduced,
    syn212_outside_the_wrapper,
    syn213_per_rank_gradient_scale,
    syn214_step_skipped,
    syn215_optimizer_state_not_restored,
    syn216_grad_scaler_diverged,
    syn217_stale_replica,
    syn218_frozen_not_broadcast,
    syn219_averaged_copy_stale,
    syn220_bit_flip,
    syn221_contiguous_corruption,
    syn222_nonfinite_on_some_ranks,
    syn223_damaged_on_disk,
    syn224_contents_exchanged,
    syn225_not_updated_on_some_ranks,
    syn226_masked_on_some_ranks,
    syn230_differs_by_node,
    syn231_tensor_parallel_replicated,
    syn240_rounding_only,
    syn241_periodic_averaging,
    syn299_unexplained_difference,
    syn301_not_updated,
    syn302_partially_updated,
    syn303_adapter_not_merged,
    syn304_transposed,
    syn305_fused_order,
    syn306_rotary_permuted,
    syn307_cast,
    syn308_quantized,
    syn309_padded,
    syn310_expert_misplaced,
    syn311_unrelated,
    syn312_scaled,
    syn313_wrong_shard,
    syn314_tie_changed,
    syn315_offset,
    syn316_scales_missing,
    syn317_repeated,
    syn399_unexplained_model_difference,
    two_runs,
)
from syncheck.diagnose.case import Case, Rule
from syncheck.diagnose.history import history_of
from syncheck.diagnose.sentences import choose_cause, choose_fix, describe_wrapper, for_two_models
from syncheck.diagnose.tied_names import add_copies, fold_ties
from syncheck.records import Finding, largest_first, minority_of, sets_within

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncheck.records import Comparison, TensorDiff

    Blocks = Sequence[Sequence[int]]


def left_of(tensors: Sequence[TensorDiff], covered: Sequence[TensorDiff], agree: Blocks) -> tuple[TensorDiff, ...]:
    """Return the differences left unexplained by a finding. covered: its tensors. agree: see `Match`."""
    names = {(diff.name, diff.reason) for diff in covered}
    left = (_remainder(diff, agree) if (diff.name, diff.reason) in names else diff for diff in tensors)
    return tuple(diff for diff in left if diff is not None)


def names_left(
    values: Sequence[str], covered: Sequence[str], by_rank: Mapping[str, Mapping[int, Any]], agree: Blocks
) -> tuple[str, ...]:
    """Return the Python values left unexplained by a finding. covered: its values. agree: see `Match`."""
    names = frozenset(covered)
    return tuple(
        name
        for name in values
        if name not in names or any(_unequal([by_rank[name].get(rank) for rank in block]) for block in agree)
    )


def _unequal(values: Sequence[Any]) -> bool:
    return any(value != values[0] and not (value != value and values[0] != values[0]) for value in values[1:])


def _remainder(diff: TensorDiff, agree: Blocks) -> TensorDiff | None:
    """Return the difference within the blocks of ranks, or None if the ranks of each block agree.

    Its size is unknown, because a difference was measured over all ranks.
    """
    whole = sets_within(diff)
    inside = [_inside(sets, frozenset(block)) for sets in whole for block in agree]
    inside = [sets for sets in inside if len(sets) > 1]
    if not inside:
        return None
    if sum(map(len, inside)) == sum(map(len, whole)) and all(sets in whole for sets in inside):
        return diff
    clusters = largest_first(ranks for sets in inside for ranks in sets)
    remaining = {rank for ranks in clusters for rank in ranks}
    return replace(
        diff,
        replica_groups=tuple(tuple(sorted(rank for ranks in sets for rank in ranks)) for sets in inside),
        clusters=clusters,
        minority=tuple(sorted(rank for sets in inside for rank in minority_of(sets))),
        nonfinite={rank: count for rank, count in diff.nonfinite.items() if rank in remaining},
        mismatched=None, max_abs=None, max_rel=None, max_ulp=None, index=None, extent=None, evidence=None,
        histogram=None,
    )  # fmt: skip


def _inside(sets: Sequence[tuple[int, ...]], block: Collection[int]) -> list[tuple[int, ...]]:
    """Return the ranks of each set in the block, largest set first."""
    kept = (tuple(rank for rank in ranks if rank in block) for ranks in sets)
    return list(largest_first(ranks for ranks in kept if ranks))


# These rules explain a difference between any two ranks. All other rules explain how the suspects differ from the rest.
_EVERY_RANK = frozenset(
    "SYN101 SYN102 SYN107 SYN201 SYN202 SYN204 SYN205 SYN206 SYN226 SYN231 SYN240 SYN241 SYN299 SYN399".split()
) | {f"SYN{code}" for code in range(301, 318)}
# In the order of precedence. SYN103, SYN104 and SYN105 cover no tensor, so their position does not matter.
RULES: tuple[Rule, ...] = cast(
    "tuple[Rule, ...]",
    (
        syn108_different_runs,
        syn206_metric_states,
        syn225_not_updated_on_some_ranks,
        syn101_missing_tensors,
        syn102_shape_or_dtype_mismatch,
        syn223_damaged_on_disk,
        syn222_nonfinite_on_some_ranks,
        syn220_bit_flip,
        syn221_contiguous_corruption,
        syn217_stale_replica,
        syn106_different_progress,
        syn215_optimizer_state_not_restored,
        syn214_step_skipped,
        syn216_grad_scaler_diverged,
        syn107_settings_differ,
        syn224_contents_exchanged,
        syn226_masked_on_some_ranks,
        syn231_tensor_parallel_replicated,
        syn230_differs_by_node,
        syn240_rounding_only,
        syn205_buffer_local_state,
        syn203_bn_count_mismatch,
        syn204_bn_variance_only,
        syn202_bn_drift_growing,
        syn201_bn_local_stats,
        syn219_averaged_copy_stale,
        syn218_frozen_not_broadcast,
        syn212_outside_the_wrapper,
        syn213_per_rank_gradient_scale,
        syn210_init_not_broadcast,
        syn211_gradients_not_reduced,
        syn241_periodic_averaging,
        syn299_unexplained_difference,
        syn103_prefix_normalized,
        syn104_sharded_by_design,
        syn105_tie_broken,
        syn310_expert_misplaced,
        syn301_not_updated,
        syn302_partially_updated,
        syn303_adapter_not_merged,
        syn304_transposed,
        syn305_fused_order,
        syn306_rotary_permuted,
        syn307_cast,
        syn308_quantized,
        syn309_padded,
        syn312_scaled,
        syn313_wrong_shard,
        syn314_tie_changed,
        syn315_offset,
        syn316_scales_missing,
        syn317_repeated,
        syn311_unrelated,
        syn399_unexplained_model_difference,
    ),
)
# The rules for two models, A and B.
DIFF_RULES: tuple[Rule, ...] = cast(
    "tuple[Rule, ...]",
    (
        syn223_damaged_on_disk,
        syn310_expert_misplaced,
        syn301_not_updated,
        syn302_partially_updated,
        syn303_adapter_not_merged,
        syn304_transposed,
        syn305_fused_order,
        syn306_rotary_permuted,
        syn307_cast,
        syn308_quantized,
        syn309_padded,
        syn312_scaled,
        syn313_wrong_shard,
        syn314_tie_changed,
        syn315_offset,
        syn316_scales_missing,
        syn317_repeated,
        syn311_unrelated,
        syn101_missing_tensors,
        syn102_shape_or_dtype_mismatch,
        syn220_bit_flip,
        syn106_different_progress,
        syn214_step_skipped,
        syn107_settings_differ,
        syn213_per_rank_gradient_scale,
        syn399_unexplained_model_difference,
        syn103_prefix_normalized,
    ),
)
REPLICA_RULES = tuple(rule for rule in RULES if not rule.CODE.startswith("SYN3"))


def diagnose(
    group: Comparison, series: tuple[Comparison, ...] = (), allow: frozenset[str] = frozenset()
) -> tuple[Finding, ...]:
    """Return findings for every difference of a group. SYN299 covers all unexplained differences.

    A finding covers only differences explained by its evidence. Later rules see the rest of the same tensor: how other
    ranks differ in it, or its values if some ranks lack it.

    series: the groups of the same run by step, for rules about growth. allow: codes of allowed findings.
    """
    # Running statistics may be local beside another cause, so SYN201 runs again after the rules on parameters.
    rules = list(REPLICA_RULES)
    rules.insert(rules.index(cast("Rule", syn299_unexplained_difference)), cast("Rule", syn201_bn_local_stats))
    folded = fold_ties(group)
    steps = tuple(folded.group if step is group else fold_ties(step).group for step in series)
    findings: list[Finding] = []
    for finding in _apply_rules(rules, folded.group, steps, allow):
        names = add_copies(finding.tensors, folded.copies)
        if names != finding.tensors:
            finding = replace(finding, tensors=names, history=history_of(frozenset(names), series))
        findings.append(finding)
    return tuple(findings)


def diagnose_difference(pair: Comparison, allow: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Return findings for every difference of two models. SYN399 covers all unexplained differences."""
    findings = []
    for finding in _apply_rules(DIFF_RULES, pair, (), allow):
        facts = tuple(map(for_two_models, finding.facts))
        cause, fix = for_two_models(finding.cause), for_two_models(finding.fix)
        findings.append(replace(finding, ranks=(), facts=facts, cause=cause, fix=fix))
    return tuple(findings)


def _apply_rules(
    rules: Sequence[Rule], group: Comparison, series: tuple[Comparison, ...], allow: frozenset[str]
) -> tuple[Finding, ...]:
    tensors = tuple(fact for diff in group.tensors if diff.out_of_sync for fact in diff.facts or (diff,))
    by_rank = {diff.name: diff.by_rank for diff in group.values}
    values = tuple(diff.name for diff in group.values if diff.counts)
    findings: list[Finding] = []
    for rule in rules:
        case = Case(group, tensors, values, series or (group,))
        of_runs = group.is_pair and rule.CODE in two_runs.CODES
        if of_runs and not two_runs.may_explain(rule.CODE, case):
            continue
        match = rule.apply(case)
        if match is None:
            continue
        if of_runs:
            certainty, alternatives = two_runs.limit_certainty(rule.CODE, match, case)
            match = replace(match, certainty=certainty, alternatives=alternatives)
        agree = match.agree
        if agree is None:
            odd = frozenset(match.ranks)
            agree = () if rule.CODE in _EVERY_RANK else (tuple(rank for rank in group.ranks if rank not in odd),)
        tensors = left_of(tensors, match.tensors, agree)
        values = names_left(values, match.values, by_rank, agree)
        findings.append(
            Finding(
                code=rule.CODE,
                slug=rule.SLUG,
                severity="warning" if match.only_warns else rule.SEVERITY,
                ranks=tuple(sorted(match.ranks)),
                tensors=tuple(dict.fromkeys(diff.name for diff in match.tensors)),
                facts=(*match.facts, *describe_wrapper(rule, case)),
                cause=choose_cause(rule, match, case)(),
                fix=choose_fix(rule, match, case)(),
                values=match.values,
                counts=not match.only_warns,
                certainty=match.certainty or rule.CERTAINTY,
                alternatives=match.alternatives,
                allowed=rule.CODE in allow,
                history=history_of({diff.name for diff in match.tensors}, series),
            )
        )
    return tuple(findings)
