"""Choose the cause and the fix of a finding for the case at hand: a running job, a sharded model, no majority.

A rule may have these sentences besides CAUSE and FIX:

- CAUSE_NO_SYNC, FIX_NO_SYNC: `no_sync()` of DDP is active in a running job. The fix also applies if it was active
  during the last forward pass.
- FIX_SHARDED: the model is sharded, by FSDP or HSDP.
- IN_A_JOB: the ranks of a running job, without files.
- FIX_PARTS: the files of the ranks hold different shards, so that no rank can load the file of another rank.
- FIX_NO_MAJORITY, IN_A_JOB_NO_MAJORITY: no majority shows which ranks are healthy.

A sentence NAME of a rule or of its evidence may have a twin DIFF_NAME for two models.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from syncheck.layout.replica_groups import TENSOR_PARALLEL
from syncheck.messages import Message, Sentence
from syncheck.records import sets_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.diagnose.case import Case, Match
    from syncheck.diagnose.rule import Rule
    from syncheck.records import Comparison, TensorDiff

# A mesh dimension along which a DTensor is sharded, with its name if it has one: see `layout.dtensors.layout_text`.
_SHARDED_ALONG = r"divided in \d+(?: along ([^(]+))? \(dimension (\d+)"


class Wrapper(Sentence):
    """Statements about the parallel wrapper of a running job."""

    NO_SYNC = "`no_sync()` of DDP is active, so backward passes do not reduce gradients"
    LAST_FORWARD = (
        "the last forward pass of DDP's wrapper was within `no_sync()` or `torch.no_grad()`, so its backward pass does "
        "not reduce gradients"
    )


def choose_cause(rule: Rule, match: Match, case: Case) -> Sentence:
    """Return the sentence of the cause."""
    if match.cause is not None:
        return match.cause
    sentences = rule.sentences.__members__
    metadata = case.group.evidence.metadata
    name = "CAUSE_NO_SYNC" if metadata.no_sync == "active" else "CAUSE"
    # Only rules on gradients have a cause of their own for `no_sync()`.
    return sentences.get(name, sentences["CAUSE"])


def choose_fix(rule: Rule, match: Match, case: Case) -> Sentence:
    """Return the sentence of the fix."""
    if match.fix is not None:
        return match.fix
    sentences = rule.sentences.__members__
    # Two models have neither ranks nor a wrapper.
    if case.group.is_pair:
        return sentences["FIX"]
    name = _name_fix(sentences, case)
    without_majority = sentences.get(f"{name}_NO_MAJORITY")
    if without_majority is None or has_majority(match.tensors):
        return sentences[name]
    return without_majority


def choose_unsure_fix(sentences: type[Sentence], case: Case) -> Sentence:
    """Return the sentence FIX_UNSURE, or its variant for a job or for files with shards: the cause is not certain."""
    members = sentences.__members__
    name = _name_fix(members, case)
    return members[f"{name}_UNSURE"]


def _name_fix(sentences: Mapping[str, Sentence], case: Case) -> str:
    """Return the name of the fix for the wrapper, the sharding and the files of the ranks. sentences: by name."""
    conditions = (
        ("FIX_NO_SYNC", bool(case.group.evidence.metadata.no_sync)),
        ("FIX_SHARDED", is_sharded(case.group)),
        ("IN_A_JOB", case.in_running_job),
        # The whole checkpoint of another rank has the shards of that rank.
        ("FIX_PARTS", bool(case.group.shards)),
        # Every rule has this fix.
        ("FIX", True),
    )
    applicable = [name for name, does_apply in conditions if does_apply]
    return next(name for name in applicable if name in sentences)


def describe_wrapper(rule: Rule, case: Case) -> tuple[Message, ...]:
    """State whether DDP's `no_sync()` is or was active, for rules on gradients."""
    no_sync = case.group.evidence.metadata.no_sync
    is_of_gradients = "FIX_NO_SYNC" in rule.sentences.__members__
    if not no_sync or not is_of_gradients:
        return ()
    sentence = Wrapper.NO_SYNC if no_sync == "active" else Wrapper.LAST_FORWARD
    return (sentence(),)


def for_two_models(message: Message) -> Message:
    """Replace a sentence, and the sentences inside, by their twins for two models, if they have any."""
    twin = type(message.code).__members__.get(f"DIFF_{message.code.name}", message.code)
    parameters = {name: _parameter_for_two_models(value) for name, value in message.parameters.items()}
    return Message(twin, parameters)


def _parameter_for_two_models(value: Any) -> Any:
    """Replace the sentences inside the value of a parameter."""
    if isinstance(value, Message):
        return for_two_models(value)
    if isinstance(value, tuple):
        return tuple(map(_parameter_for_two_models, value))
    return value


def is_sharded(group: Comparison) -> bool:
    """Whether FSDP or HSDP shards the model. Shards of tensor parallelism alone do not count."""
    dimensions: list[tuple[str, str]] = []
    for shards in group.shards:
        if shards.kind == "DTensor":
            dimensions += re.findall(_SHARDED_ALONG, shards.layout)
    return any(_is_data_parallel(name, dimension) for name, dimension in dimensions)


def _is_data_parallel(name: str, dimension: str) -> bool:
    """Whether a mesh dimension shards tensors over data-parallel ranks.

    name: of the mesh dimension, empty if it has none. dimension: of the tensor.
    """
    if name:
        return name.lower() not in TENSOR_PARALLEL
    # fully_shard divides the first dimension of a tensor, along a mesh that needs no names.
    return dimension == "0"


def has_majority(tensors: Iterable[TensorDiff]) -> bool:
    """Whether more than half of the ranks of each replica group agree in every tensor."""
    clusters_of_groups = chain.from_iterable(map(sets_within, tensors))
    for clusters in clusters_of_groups:
        number_of_ranks = sum(map(len, clusters))
        largest = clusters[0]
        if 2 * len(largest) <= number_of_ranks:
            return False
    return True
