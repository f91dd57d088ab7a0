"""B is the base model: the product of the adapter is missing in some tensors, or tensors that it stores.

Signature: A is a base model with a LoRA adapter, and tensors of B equal those of the base model, bit by bit, or contain
another multiple of the product. Merged tensors agree with `base + scale * (lora_B @ lora_A)` within the rounding of
their dtype, and are not reported. Tensors that the adapter stores as a whole (`modules_to_save`) or in rows
(`trainable_token_indices`) must be equal.

Cause: the merge did not find the adapter (another path, prefix or name of the adapter), skipped some modules, or the
merged model was never saved. Another multiple shows another scale: the merge read `lora_alpha` or the rank of another
module (`alpha_pattern`, `rank_pattern`, `use_rslora`), or merged twice.

Fix: load the adapter with the library that wrote it, merge it (`merge_and_unload` in PEFT), and check that each module
of `target_modules` has changed before you save.

Incidents: verl-project/verl#7285, verl-project/verl#3087 and verl-project/verl#4553 (the merged folder equals the base
model), verl-project/verl#7495 (two months of training without the adapter).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN303"
SLUG = "adapter-not-merged"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

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
    UNMERGED = "{count} of {total:count tensor} with an adapter {count:verb is|are} not merged in B: {names:names 10}"
    NOT_REPLACED = (
        "{count} of {total:count tensor} with an adapter {count:verb is|are} not replaced in B, although the adapter "
        "stores {count:verb it|them} (modules_to_save or trainable_token_indices): {names:names 10}"
    )
    SCALED = (
        "{count} of {total:count tensor} with an adapter contain {factor:number 3} times its product: {names:names}"
    )


def apply(case: Case) -> Match | None:
    """Match the tensors of B without the product of the adapter, or without its values."""
    unmerged = case.related(RelationKind.ADAPTER)
    if not unmerged:
        return None
    total = max(case.group.evidence.adapted, len(unmerged))
    diffs_by_kind: dict[tuple[bool, str], list[TensorDiff]] = defaultdict(list)
    for diff in unmerged:
        parameters = parameters_of(diff)
        diffs_by_kind["pattern" in parameters, f"{parameters.get('factor', 0.0):.3g}"].append(diff)
    facts = []
    for (replaced, _), diffs in diffs_by_kind.items():
        factor, names = parameters_of(diffs[0]).get("factor"), tuple(diff.name for diff in diffs)
        if replaced:
            facts.append(Text.NOT_REPLACED(count=len(diffs), total=total, names=names))
        elif factor is None:
            facts.append(Text.UNMERGED(count=len(diffs), total=total, names=names))
        else:
            facts.append(Text.SCALED(count=len(diffs), total=total, names=names, factor=factor))
    # Each tensor has the product of the adapter, but another multiple of it.
    scaled = all("factor" in parameters_of(diff) for diff in unmerged)
    cause, fix = (Text.CAUSE_SCALE, Text.FIX_SCALE) if scaled else (None, None)
    return Match(unmerged, case.group.ranks, facts, cause=cause, fix=fix)
