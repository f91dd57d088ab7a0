"""The record of a rule: its code, its sentences, and how it recognizes the differences that it explains."""

from __future__ import annotations

from collections import defaultdict
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.case import Match
from syncheck.diagnose.measures import parameters_of
from syncheck.diagnose.selection import list_names
from syncheck.diagnose.statements import limit_facts
from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from types import ModuleType

    from syncheck.diagnose.case import Case
    from syncheck.findings import Certainty, RelationKind
    from syncheck.messages import Message, Sentence
    from syncheck.records import Severity, TensorDiff

# Number of statements of one finding, if its sentences have MORE.
MOST_FACTS = 4


class Turn(IntEnum):
    """When a rule is applied to two models. Within one turn, the order of the rules is their precedence."""

    DAMAGE = 1
    """Damaged files explain a difference before any relation does."""
    RELATION = 2
    """The tensors of B follow from those of A."""
    REPLICAS = 3
    """Rules for replicas, which also explain how two models differ."""
    REMAINDER = 4
    """All differences that no other rule explains."""
    INFORMATION = 5
    """Rules that cover no difference."""


def keep_match(match: Match, _: Case | None = None) -> Match:
    """Return the match of a rule that amends nothing."""
    return match


@record
class Rule:
    """A rule: it calls `match`, or it covers the tensors of two models that have a `relation`."""

    code: str
    """The code of the finding: 'SYN304'."""
    slug: str
    """The name of the finding: 'transposed'."""
    sentences: type[Sentence]
    """The sentences of the finding. CAUSE and FIX are part of every finding, see also `diagnose.sentences`."""
    docstring: str | None = None
    """The text of `syncheck explain`. None: the docstring of the sentences."""
    severity: Severity = "error"
    """The severity of the finding, unless its `Match` only warns."""
    certainty: Certainty = "proved"
    """The certainty of the finding, unless its `Match` has another certainty."""
    every_rank: bool = False
    """Whether the rule explains a difference between any two ranks, not only how suspects differ from all others."""
    two_models: Turn | None = None
    """When the rule is applied to two models; None for rules that explain replicas only."""
    match: Callable[[Case], Match | None] | None = None
    """Returns the explained differences. None for rules that the remaining fields describe."""
    relation: RelationKind | None = None
    """The relation of the covered tensors of two models."""
    key: tuple[str, ...] | None = None
    """Parameters of the relation. One statement is about all tensors with equal values; None: about one tensor each."""
    state: Callable[[Sequence[TensorDiff]], Message] | None = None
    """Returns the statement about the tensors of one key."""
    amend: Callable[[Match], Match] = keep_match
    """Replaces cause, fix or certainty of the match, or adds statements, if the tensors require it."""
    weigh: Callable[[Match, Case], Match] = keep_match
    """The same, if the tensors that agree require it."""

    def select(self, case: Case) -> Rule:  # noqa: ARG002 - as for `RuleModule`
        """Return this rule."""
        return self

    def apply(self, case: Case) -> Match | None:
        """Return the explained differences, or None if the rule explains none."""
        if self.match is not None:
            return self.match(case)
        return self._cover_relation(case)

    def _cover_relation(self, case: Case) -> Match | None:
        """Return the match of all tensors with the relation; None without any."""
        if self.relation is None or self.state is None:
            return None
        tensors = case.related(self.relation)
        if not tensors:
            return None
        facts = []
        for similar in group_by_parameters(tensors, self.key):
            fact = self.state(similar)
            facts.append(fact)
        more = self.sentences.__members__.get("MORE")
        if more is not None:
            facts = limit_facts(facts, MOST_FACTS, more)
        match = Match(
            tensors=tensors,
            # Two models have no suspects: a difference is between A and B.
            ranks=case.group.ranks,
            facts=facts,
        )
        return self.weigh(self.amend(match), case)

    @property
    def explanation(self) -> str:
        """The text of `syncheck explain`: a line that summarizes the finding, and paragraphs. Empty under `-OO`."""
        import textwrap  # only `syncheck explain` formats paragraphs

        docstring = self.docstring or self.sentences.__doc__ or ""
        summary, _, details = docstring.strip().partition("\n")
        return f"{summary}\n{textwrap.dedent(details)}".strip()


@record
class RuleModule:
    """A rule for replicas in a module of its own, which is imported only if the rule may match."""

    name: str
    """The module in this package: 'syn201_bn_local_stats'."""
    may_match: Callable[[Case], bool]
    """A condition without which the rule does not match; see `preconditions`."""
    every_rank: bool = False
    two_models: Turn | None = None
    """As for `Rule`."""

    @property
    def code(self) -> str:
        """The code of the finding: 'SYN201'."""
        return self.name.partition("_")[0].upper()

    @property
    def slug(self) -> str:
        """The name of the finding: 'bn-local-stats'."""
        return self.name.partition("_")[2].replace("_", "-")

    def select(self, case: Case) -> Rule | None:
        """Return the rule, or None if it cannot match."""
        return self.load() if self.may_match(case) else None

    def load(self) -> Rule:
        """Return the rule of the imported module."""
        module = import_module(f"syncheck.diagnose.{self.name}")
        return replica_rule(module, every_rank=self.every_rank, two_models=self.two_models)


def replica_rule(module: ModuleType, *, every_rank: bool = False, two_models: Turn | None = None) -> Rule:
    """Return the rule of a module of this package: its constants, the function `apply`, and its docstring."""
    return Rule(
        code=module.CODE,
        slug=module.SLUG,
        sentences=module.Text,
        docstring=module.__doc__,
        severity=module.SEVERITY,
        certainty=module.CERTAINTY,
        every_rank=every_rank,
        two_models=two_models,
        match=module.apply,
    )


def group_by_parameters(tensors: Iterable[TensorDiff], key: tuple[str, ...] | None) -> list[list[TensorDiff]]:
    """Group tensors by these parameters of their relation; without a key, each tensor is a group.

    Floats are equal if they have the same three digits.
    """
    if key is None:
        return [[diff] for diff in tensors]
    groups: dict[tuple[Hashable, ...], list[TensorDiff]] = defaultdict(list)
    for diff in tensors:
        parameters = parameters_of(diff)
        values = []
        for name in key:
            values.append(_round_number(parameters.get(name)))
        groups[tuple(values)].append(diff)
    return list(groups.values())


def _round_number(value: Hashable) -> Hashable:
    """Return three digits of a float: factors of several tensors differ by their rounding."""
    return f"{value:.3g}" if isinstance(value, float) else value


def state_tensors(sentence: Sentence, tensors: Sequence[TensorDiff], **parameters: Any) -> Message:
    """Return a sentence about tensors, with their number, their names, and these parameters."""
    return sentence(
        count=len(tensors),
        names=list_names(tensors),
        **parameters,
    )


def other_model(side: str) -> str:
    """Return the other one of the models A and B."""
    return "A" if side == "B" else "B"
