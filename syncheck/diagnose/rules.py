"""All rules in the order of precedence, and the findings of a comparison: the first matching rule covers a tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

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
    two_runs,
)
from syncheck.diagnose.case import Case
from syncheck.diagnose.conversion_rules import CONVERSION_RULES
from syncheck.diagnose.history import history_of
from syncheck.diagnose.remainder import find_unexplained_tensors, find_unexplained_values
from syncheck.diagnose.rule import Turn, replica_rule
from syncheck.diagnose.sentences import choose_cause, choose_fix, describe_wrapper, for_two_models
from syncheck.diagnose.tied_names import add_copies, fold_ties
from syncheck.records import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.rule import Rule
    from syncheck.records import Comparison


# In the order of precedence. SYN103, SYN104 and SYN105 cover no tensor, so their position does not matter.
REPLICA_RULES = (
    replica_rule(syn108_different_runs),
    replica_rule(syn206_metric_states, every_rank=True),
    replica_rule(syn225_not_updated_on_some_ranks),
    replica_rule(syn101_missing_tensors, every_rank=True, two_models=Turn.REPLICAS),
    replica_rule(syn102_shape_or_dtype_mismatch, every_rank=True, two_models=Turn.REPLICAS),
    replica_rule(syn223_damaged_on_disk, two_models=Turn.DAMAGE),
    replica_rule(syn222_nonfinite_on_some_ranks),
    replica_rule(syn220_bit_flip, two_models=Turn.REPLICAS),
    replica_rule(syn221_contiguous_corruption),
    replica_rule(syn217_stale_replica),
    replica_rule(syn106_different_progress, two_models=Turn.REPLICAS),
    replica_rule(syn215_optimizer_state_not_restored),
    replica_rule(syn214_step_skipped, two_models=Turn.REPLICAS),
    replica_rule(syn216_grad_scaler_diverged),
    replica_rule(syn107_settings_differ, every_rank=True, two_models=Turn.REPLICAS),
    replica_rule(syn224_contents_exchanged),
    replica_rule(syn226_masked_on_some_ranks, every_rank=True),
    replica_rule(syn231_tensor_parallel_replicated, every_rank=True),
    replica_rule(syn230_differs_by_node),
    replica_rule(syn240_rounding_only, every_rank=True),
    replica_rule(syn205_buffer_local_state, every_rank=True),
    replica_rule(syn203_bn_count_mismatch),
    replica_rule(syn204_bn_variance_only, every_rank=True),
    replica_rule(syn202_bn_drift_growing, every_rank=True),
    replica_rule(syn201_bn_local_stats, every_rank=True),
    replica_rule(syn219_averaged_copy_stale),
    replica_rule(syn218_frozen_not_broadcast),
    replica_rule(syn212_outside_the_wrapper),
    replica_rule(syn213_per_rank_gradient_scale, two_models=Turn.REPLICAS),
    replica_rule(syn210_init_not_broadcast),
    replica_rule(syn211_gradients_not_reduced),
    replica_rule(syn241_periodic_averaging, every_rank=True),
    replica_rule(syn299_unexplained_difference, every_rank=True),
    replica_rule(syn103_prefix_normalized, two_models=Turn.INFORMATION),
    replica_rule(syn104_sharded_by_design),
    replica_rule(syn105_tie_broken),
)
RULES = (*REPLICA_RULES, *CONVERSION_RULES)
DIFF_RULES = tuple(rule for turn in Turn for rule in RULES if rule.two_models is turn)


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
    codes = [rule.code for rule in rules]
    rules.insert(codes.index("SYN299"), rules[codes.index("SYN201")])
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
        of_runs = group.is_pair and rule.code in two_runs.CODES
        if of_runs and not two_runs.may_explain(rule.code, case):
            continue
        match = rule.apply(case)
        if match is None:
            continue
        if of_runs:
            certainty, alternatives = two_runs.limit_certainty(rule.code, match, case)
            match = replace(match, certainty=certainty, alternatives=alternatives)
        agree = match.agree
        if agree is None:
            suspects = frozenset(match.ranks)
            unsuspected = tuple(rank for rank in group.ranks if rank not in suspects)
            agree = (unsuspected,) if unsuspected and not rule.every_rank else ()
        tensors = find_unexplained_tensors(tensors, match.tensors, agree)
        values = find_unexplained_values(values, match.values, by_rank, agree)
        findings.append(
            Finding(
                code=rule.code,
                slug=rule.slug,
                severity="warning" if match.only_warns else rule.severity,
                ranks=tuple(sorted(match.ranks)),
                tensors=tuple(dict.fromkeys(diff.name for diff in match.tensors)),
                facts=(*match.facts, *describe_wrapper(rule, case)),
                cause=choose_cause(rule, match, case)(),
                fix=choose_fix(rule, match, case)(),
                values=match.values,
                counts=not match.only_warns,
                certainty=match.certainty or rule.certainty,
                alternatives=match.alternatives,
                allowed=rule.code in allow,
                history=history_of({diff.name for diff in match.tensors}, series),
            )
        )
    return tuple(findings)
