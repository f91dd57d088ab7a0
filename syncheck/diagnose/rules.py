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
from syncheck.diagnose.selection import list_names, out_of_sync, problems_of, ranks_outside, select_counting
from syncheck.diagnose.sentences import choose_cause, choose_fix, describe_wrapper, for_two_models
from syncheck.diagnose.tied_names import add_copies, fold_ties
from syncheck.records import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.case import Match
    from syncheck.diagnose.rule import Rule
    from syncheck.records import Comparison, TensorDiff


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
    rules = list(REPLICA_RULES)
    codes = [rule.code for rule in rules]
    of_statistics = rules[codes.index("SYN201")]
    # Running statistics may be local beside another cause, so SYN201 runs again after the rules on parameters.
    rules.insert(codes.index("SYN299"), of_statistics)
    folded = fold_ties(group)
    steps = []
    for step in series:
        # The last step of the series is the group itself.
        steps.append(folded.group if step is group else fold_ties(step).group)
    findings = []
    for finding in _apply_rules(
        rules,
        folded.group,
        tuple(steps),
        allow,
    ):
        names = add_copies(finding.tensors, folded.copies)
        if names != finding.tensors:
            finding = replace(
                finding,
                tensors=names,
                history=history_of(frozenset(names), series),
            )
        findings.append(finding)
    return tuple(findings)


def diagnose_difference(pair: Comparison, allow: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Return findings for every difference of two models. SYN399 covers all unexplained differences."""
    findings = []
    for finding in _apply_rules(
        DIFF_RULES,
        pair,
        (),
        allow,
    ):
        finding_of_models = replace(
            finding,
            ranks=(),
            facts=tuple(map(for_two_models, finding.facts)),
            cause=for_two_models(finding.cause),
            fix=for_two_models(finding.fix),
        )
        findings.append(finding_of_models)
    return tuple(findings)


def _apply_rules(
    rules: Sequence[Rule], group: Comparison, series: tuple[Comparison, ...], allow: frozenset[str]
) -> tuple[Finding, ...]:
    """Return the findings of all matching rules, each of which covers what the earlier rules leave unexplained."""
    tensors = _list_problems(group)
    values = list_names(select_counting(group.values))
    findings = []
    for rule in rules:
        case = Case(
            group=group,
            tensors=tensors,
            values=values,
            series=series or (group,),
        )
        match = _find_match(rule, case)
        if match is None:
            continue
        agree = _find_agreeing(rule, match, group)
        tensors = find_unexplained_tensors(tensors, match.tensors, agree)
        values = find_unexplained_values(case, match.values, agree)
        finding = _make_finding(rule, match, case)
        finding = replace(
            finding,
            allowed=rule.code in allow,
            history=history_of(frozenset(finding.tensors), series),
        )
        findings.append(finding)
    return tuple(findings)


def _list_problems(group: Comparison) -> tuple[TensorDiff, ...]:
    """Return the differences of all tensors, one for each problem of a tensor."""
    problems: list[TensorDiff] = []
    for diff in out_of_sync(group):
        problems += problems_of(diff)
    return tuple(problems)


def _find_match(rule: Rule, case: Case) -> Match | None:
    """Return what a rule explains; less certain for causes of replicas that also explain two runs."""
    if not case.group.is_pair or rule.code not in two_runs.CODES:
        return rule.apply(case)
    if not two_runs.may_explain(rule.code, case):
        return None
    match = rule.apply(case)
    if match is None:
        return None
    certainty, alternatives = two_runs.limit_certainty(rule.code, match, case)
    return replace(match, certainty=certainty, alternatives=alternatives)


def _find_agreeing(rule: Rule, match: Match, group: Comparison) -> Sequence[Sequence[int]]:
    """Return the sets of ranks within which a match explains no difference, see `Match.agree`."""
    if match.agree is not None:
        return match.agree
    suspects = frozenset(match.ranks)
    unsuspected = ranks_outside(group.ranks, suspects)
    if rule.every_rank or not unsuspected:
        return ()
    return (unsuspected,)


def _make_finding(rule: Rule, match: Match, case: Case) -> Finding:
    """Return the finding of a match, without its history, and not allowed."""
    # A tensor with several problems occurs several times.
    names = dict.fromkeys(list_names(match.tensors))
    cause = choose_cause(rule, match, case)
    fix = choose_fix(rule, match, case)
    return Finding(
        code=rule.code,
        slug=rule.slug,
        severity="warning" if match.only_warns else rule.severity,
        ranks=tuple(sorted(match.ranks)),
        tensors=tuple(names),
        facts=(*match.facts, *describe_wrapper(rule, case)),
        cause=cause(),
        fix=fix(),
        values=match.values,
        counts=not match.only_warns,
        certainty=match.certainty or rule.certainty,
        alternatives=match.alternatives,
    )
