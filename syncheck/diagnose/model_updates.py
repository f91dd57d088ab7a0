"""SYN301 to SYN303: B still holds an earlier model, or the base model of an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.measures import list_parameter, parameters_of
from syncheck.diagnose.rule import group_by_parameters, state_tensors
from syncheck.diagnose.statements import limit_facts
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff

# Statements about merged products.
_MOST_PRODUCTS = 6
# Parameters of a relation whose factor was fitted to the numbers; the bytes prove all other relations.
_FITTED = {"factor", "product"}


class NotUpdated(Sentence, topic="SYN301"):
    """B is the model before the update: it received none of the new weights.

    Signature: all tensors of B that differ from A equal those of the model before the update, bit by bit, and no tensor
    of B has a value that only the updated A has. The earlier model is the one given with `--base`, or an earlier step
    of A in its folder.

    Cause: the update never reached B. A merge wrote the base model again, an export read an old step, or an engine kept
    the weights with which it started.

    Fix: check that the code that merges, exports or sends the weights reads the new model, and that it stops if it does
    not. Compare again with the same `--base`.

    Incidents: verl-project/verl#7285 and verl-project/verl#4553 (the merged folder is byte-identical to the base
    model), verl-project/verl#7495 (an adapter was never delivered), huggingface/trl#5312 (sleep mode lost the
    synchronization).
    """

    CAUSE = "B is the model before the update: none of the new weights were delivered."
    FIX = "Check which model the merge, export or weight transfer reads, and run it again on the updated model."
    EQUAL = "{count:count tensor} of B {count:verb equals|equal} the earlier model {base}, and not A: {names:names}"
    NONE = "no tensor of B has an updated value"


def match_not_updated(case: Case) -> Match | None:
    """Match the tensors of the earlier model, if B has no updated tensor."""
    stale = case.related(RelationKind.BASE)
    # Any other difference shows that B has values that are not of the earlier model.
    has_other_values = len(stale) < len(case.tensors)
    exceptions = (not stale, has_other_values, case.group.evidence.updated)
    if any(exceptions):
        return None
    equal = state_tensors(NotUpdated.EQUAL, stale, base=case.group.evidence.base)
    return Match(
        tensors=stale,
        ranks=case.group.ranks,
        facts=[equal, NotUpdated.NONE()],
    )


class PartiallyUpdated(Sentence, topic="SYN302"):
    """Some tensors of B were updated, and some still have the values of the model before the update.

    Signature: some tensors of B equal the model before the update, bit by bit, while A has other values, and other
    tensors of B differ from that model. The earlier model is the one given with `--base`, or an earlier step of A in
    its folder.

    Cause: the update skipped tensors: names that a loader does not know, fused tensors that it never writes, parameters
    that were added or unfrozen later, or a transfer that stopped halfway.

    Fix: the finding lists all stale tensors. Add their names to the code that converts or sends the weights, and make
    it fail for names that it does not know (`strict=True`).

    Incidents: pytorch/torchtitan#3867 (a fused weight was never updated), vllm-project/vllm#42821 (a second
    load_weights corrupts experts), hao-ai-lab/FastVideo#1440 (averaged weights were dropped).
    """

    CAUSE = "The update reached only a part of B: the other tensors are those of the model before the update."
    FIX = (
        "Add the listed tensors to the code that converts or sends the weights, and let it fail for unknown names "
        "(`strict=True`)."
    )
    STALE = "{count:count tensor} of B {count:verb equals|equal} the earlier model {base}, and not A: {names:names 10}"
    UPDATED = "{count:count tensor} {count:verb was|were} updated"


def match_partially_updated(case: Case) -> Match | None:
    """Match the tensors of the earlier model, if other tensors of B were updated."""
    stale = case.related(RelationKind.BASE)
    if not stale:
        return None
    evidence = case.group.evidence
    facts = [state_tensors(PartiallyUpdated.STALE, stale, base=evidence.base)]
    if evidence.updated:
        facts.append(PartiallyUpdated.UPDATED(count=evidence.updated))
    return Match(stale, case.group.ranks, facts)


class AdapterNotMerged(Sentence, topic="SYN303"):
    """B is the base model: the product of the adapter is missing in some tensors, or tensors that it stores.

    Signature: A is a base model with a LoRA adapter, and tensors of B equal those of the base model, bit by bit, or
    contain another multiple of the product, the transposed product, or the product of another module. Merged tensors
    agree with `base + scale * (lora_B @ lora_A)` within the rounding of their dtype, and are not reported. Tensors that
    the adapter stores as a whole (`modules_to_save`) or in rows (`trainable_token_indices`) must be equal.

    Cause: the merge did not find the adapter (another path, prefix or name of the adapter), skipped some modules, or
    the merged model was never saved. Another multiple shows another scale: the merge read `lora_alpha` or the rank of
    another module (`alpha_pattern`, `rank_pattern`, `use_rslora`), or merged twice.

    Fix: load the adapter with the library that wrote it, merge it (`merge_and_unload` in PEFT), and check that each
    module of `target_modules` has changed before you save.

    Incidents: verl-project/verl#7285, verl-project/verl#3087 and verl-project/verl#4553 (the merged folder equals the
    base model), verl-project/verl#7495 (two months of training without the adapter).
    """

    CAUSE = "The adapter was not merged into these tensors of B: they are those of the base model."
    FIX = (
        "Merge the adapter again (for example with PEFT's merge_and_unload), check the names of the modules, and save"
        " the merged model."
    )
    CAUSE_SCALE = "The adapter was merged into these tensors of B with another scale than its configuration states."
    FIX_SCALE = (
        "Merge with the scale of each module: lora_alpha / r (or its root with use_rslora), with the exceptions of "
        "alpha_pattern and rank_pattern. The evidence states the factor by which B differs from it."
    )
    CAUSE_PRODUCT = "Another product than their adapter was merged into the listed tensors of B."
    FIX_PRODUCT = (
        "Add scale * (lora_B @ lora_A) of the same module and layer to each weight, transposed only for layers with "
        "fan_in_fan_out. Check the names and the order in which the merge reads the factors."
    )
    UNMERGED = "{count} of {total:count tensor} with an adapter {count:verb is|are} not merged in B: {names:names 10}"
    NOT_REPLACED = (
        "{count} of {total:count tensor} with an adapter {count:verb is|are} not replaced in B, although the adapter "
        "stores {count:verb it|them} (modules_to_save or trainable_token_indices): {names:names 10}"
    )
    SCALED = (
        "{count} of {total:count tensor} with an adapter contain {factor:number 3} times its product: {names:names}"
    )
    TRANSPOSED = "{count} of {total:count tensor} with an adapter contain its product transposed: {names:names}"
    OTHER = "{name} contains the product of {other}"
    MORE = "{count:count more statement}"


def match_unmerged(case: Case) -> Match | None:
    """Match the tensors of B without the product of the adapter, or without its values."""
    unmerged = case.related(RelationKind.ADAPTER)
    if not unmerged:
        return None
    total = max(case.group.evidence.adapted, len(unmerged))
    facts = []
    for tensors in group_by_parameters(unmerged, ("pattern", "factor", "product", "other")):
        facts.append(_state_unmerged(tensors, total))
    facts = limit_facts(facts, _MOST_PRODUCTS, AdapterNotMerged.MORE)
    fitted = [diff for diff in unmerged if _FITTED & parameters_of(diff).keys()]
    match = Match(
        unmerged,
        case.group.ranks,
        facts,
        certainty="likely" if fitted else "proved",
    )
    # The base model has some of the tensors.
    if len(fitted) < len(unmerged):
        return match
    if not any(list_parameter(unmerged, "product")):
        return match.with_cause(AdapterNotMerged.CAUSE_SCALE, AdapterNotMerged.FIX_SCALE)
    return match.with_cause(AdapterNotMerged.CAUSE_PRODUCT, AdapterNotMerged.FIX_PRODUCT)


def _state_unmerged(tensors: Sequence[TensorDiff], total: int) -> Message:
    """State what the tensors of B have instead of the adapter. total: number of tensors with an adapter."""
    parameters = parameters_of(tensors[0])
    if "other" in parameters:
        return AdapterNotMerged.OTHER(name=tensors[0].name, other=parameters["other"])
    if "product" in parameters:
        return state_tensors(AdapterNotMerged.TRANSPOSED, tensors, total=total)
    if "pattern" in parameters:
        return state_tensors(AdapterNotMerged.NOT_REPLACED, tensors, total=total)
    if "factor" not in parameters:
        return state_tensors(AdapterNotMerged.UNMERGED, tensors, total=total)
    return state_tensors(
        AdapterNotMerged.SCALED,
        tensors,
        total=total,
        factor=parameters["factor"],
    )
