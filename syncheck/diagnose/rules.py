"""All rules in the order of precedence, and the findings of a comparison: the first matching rule covers a tensor."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import filterfalse
from typing import TYPE_CHECKING

from syncheck.diagnose import preconditions as needs
from syncheck.diagnose import two_runs
from syncheck.diagnose.case import Case
from syncheck.diagnose.history import history_of
from syncheck.diagnose.remainder import find_unexplained_tensors, find_unexplained_values
from syncheck.diagnose.rule import RuleModule, Turn
from syncheck.diagnose.selection import list_names, out_of_sync, problems_of, ranks_outside, select_counting
from syncheck.diagnose.sentences import choose_cause, choose_fix, describe_wrapper, for_two_models
from syncheck.diagnose.tied_names import add_copies, fold_ties
from syncheck.diagnose.witnessed import cover_witnessed, join_findings
from syncheck.records import Finding
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.case import Match
    from syncheck.diagnose.rule import Rule
    from syncheck.messages import Message
    from syncheck.records import Comparison, TensorDiff


# In the order of precedence, each with a necessary condition. SYN103, SYN104, SYN105 and SYN405 cover no tensor, so
# their position does not matter.
REPLICA_RULES = (
    RuleModule("syn108_different_runs", needs.records_runs),
    RuleModule("syn206_metric_states", needs.differs("parameter", "buffer"), every_rank=True),
    RuleModule("syn225_not_updated_on_some_ranks", needs.differs_by_training),
    RuleModule("syn101_missing_tensors", needs.lacks_tensor_or_value, every_rank=True, two_models=Turn.REPLICAS),
    RuleModule(
        "syn102_shape_or_dtype_mismatch",
        needs.has_reason("shape", "dtype"),
        every_rank=True,
        two_models=Turn.REPLICAS,
    ),
    RuleModule("syn223_damaged_on_disk", needs.is_damaged, two_models=Turn.DAMAGE),
    RuleModule("syn222_nonfinite_on_some_ranks", needs.has_nonfinite),
    RuleModule("syn220_bit_flip", needs.may_be_damage, two_models=Turn.REPLICAS),
    RuleModule("syn221_contiguous_corruption", needs.may_be_damage),
    RuleModule("syn217_stale_replica", needs.differs_by_training),
    RuleModule("syn106_different_progress", needs.differs_by_training, two_models=Turn.REPLICAS),
    RuleModule("syn215_optimizer_state_not_restored", needs.differs_by_training),
    RuleModule("syn214_step_skipped", needs.differs_by_training, two_models=Turn.REPLICAS),
    RuleModule("syn216_grad_scaler_diverged", needs.differs_by_training),
    RuleModule("syn107_settings_differ", needs.differs_by_training, every_rank=True, two_models=Turn.REPLICAS),
    RuleModule("syn224_contents_exchanged", needs.holds_other_tensor),
    RuleModule("syn226_masked_on_some_ranks", needs.differs("parameter", "buffer"), every_rank=True),
    RuleModule("syn231_tensor_parallel_replicated", needs.has_mesh, every_rank=True),
    RuleModule("syn230_differs_by_node", needs.has_ranks_of_two_nodes),
    RuleModule("syn240_rounding_only", needs.any_difference, every_rank=True),
    RuleModule("syn205_buffer_local_state", needs.any_difference, every_rank=True),
    RuleModule("syn203_bn_count_mismatch", needs.differs("bn_count")),
    RuleModule("syn204_bn_variance_only", needs.variances_differ_alone, every_rank=True),
    RuleModule("syn202_bn_drift_growing", needs.differs(*BN_STATISTICS), every_rank=True),
    RuleModule("syn201_bn_local_stats", needs.differs(*BN_STATISTICS), every_rank=True),
    RuleModule("syn219_averaged_copy_stale", needs.differs("ema")),
    RuleModule("syn218_frozen_not_broadcast", needs.differs("parameter", "buffer")),
    RuleModule("syn212_outside_the_wrapper", needs.differs_by_training),
    RuleModule("syn213_per_rank_gradient_scale", needs.differs_by_training, two_models=Turn.REPLICAS),
    RuleModule("syn210_init_not_broadcast", needs.differs_by_training),
    RuleModule("syn211_gradients_not_reduced", needs.differs_by_training),
    RuleModule("syn241_periodic_averaging", needs.averages_periodically, every_rank=True),
    RuleModule("syn299_unexplained_difference", needs.any_difference, every_rank=True),
    RuleModule("syn103_prefix_normalized", needs.has_prefixes, two_models=Turn.INFORMATION),
    RuleModule("syn104_sharded_by_design", needs.has_shards),
    RuleModule("syn105_tie_broken", needs.has_broken_ties),
    RuleModule("syn405_equal_shards", needs.has_equal_shards),
)
# Causes by unequal gradients, which no rule may state if a watched run saw equal ones.
_OF_GRADIENTS = frozenset({"SYN211", "SYN213"})


@cache
def list_rules() -> tuple[Rule, ...]:
    """Return all rules: the rules for replicas in the order of precedence, then the rules for two models."""
    from syncheck.diagnose.conversion_rules import CONVERSION_RULES  # only for two models

    return (*(module.load() for module in REPLICA_RULES), *CONVERSION_RULES)


@cache
def name_rules() -> dict[str, str]:
    """Return the name of each finding by its code, without importing the rules for replicas."""
    from syncheck.diagnose.conversion_rules import CONVERSION_RULES

    names: dict[str, str] = {}
    for rule in (*REPLICA_RULES, *CONVERSION_RULES):
        names[rule.code] = rule.slug
    return names


def find_sentence(code: str, text: str) -> Message | None:
    """Return the sentence of a finding whose plain text is `text`; None without one, or if it has parameters.

    The text of a file gets back the marks of its code in this way.
    """
    for rule in list_rules():
        if rule.code != code:
            continue
        for sentence in rule.sentences:
            message = sentence()
            try:
                if str(message) == text:
                    return message
            except KeyError:
                # A sentence with parameters.
                continue

    return None


@cache
def list_diff_rules() -> tuple[Rule, ...]:
    """Return the rules for two models, in the order of precedence."""
    return tuple(rule for turn in Turn for rule in list_rules() if rule.two_models is turn)


def diagnose(
    group: Comparison,
    series: tuple[Comparison, ...] = (),
    allow: frozenset[str] = frozenset(),
    witnessed: Sequence[Finding] = (),
    impossible: frozenset[str] = frozenset(),
) -> tuple[Finding, ...]:
    """Return findings for every difference of a group. SYN299 covers all unexplained differences.

    A finding covers only differences explained by its evidence. Later rules see the rest of the same tensor: how other
    ranks differ in it, or its values if some ranks lack it.

    series: the groups of the same run by step, for rules about growth. allow: codes of allowed findings.
    witnessed: findings of a watched run before this comparison, which explain differences before any rule.
    impossible: codes of causes that a watched run excludes.
    """
    rules = list(REPLICA_RULES)
    codes = [rule.code for rule in rules]
    # Running statistics may be local beside another cause, and averaged copies stale on other ranks, so their rules run
    # again after the rules on parameters. Each is inserted before the earlier ones, so SYN202 precedes SYN201.
    for code in ("SYN201", "SYN202", "SYN219"):
        repeated = rules[codes.index(code)]
        rules.insert(codes.index("SYN299"), repeated)
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
        witnessed,
        impossible,
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
        list_diff_rules(),
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
    rules: Sequence[Rule | RuleModule],
    group: Comparison,
    series: tuple[Comparison, ...],
    allow: frozenset[str],
    witnessed: Sequence[Finding] = (),
    impossible: frozenset[str] = frozenset(),
) -> tuple[Finding, ...]:
    """Return the findings of all matching rules, each of which covers what the earlier rules leave unexplained."""
    counting = select_counting(group.values)
    tensors, witnessed_findings = cover_witnessed(_list_problems(group), group.ranks, witnessed, counting)
    explained: set[str] = set()
    for witnessed_finding in witnessed_findings:
        explained.update(witnessed_finding.values)
    values = tuple(filterfalse(explained.__contains__, list_names(counting)))
    findings = []
    for candidate in rules:
        # The watched run compared all gradients.
        if candidate.code in _OF_GRADIENTS & impossible:
            continue
        case = Case(
            group=group,
            tensors=tensors,
            values=values,
            series=series or (group,),
            impossible=impossible,
        )
        rule = candidate.select(case)
        match = None if rule is None else _find_match(rule, case)
        if rule is None or match is None:
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
    return join_findings(witnessed_findings, findings)


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
