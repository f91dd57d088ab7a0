"""Detect folders whose model-parallel parts are not joined: their tensors have names like `mp_rank_00.weight`.

Examples are GPT-NeoX (`layer_02-model_00.attention.dense.weight`), DeepSpeed with tensor parallelism, and Megatron's
experts with their own degree of tensor parallelism. Such a part is no tensor of the model: it is a slice, or a partial
sum. GPT-NeoX adds the biases of row-parallel layers over the tensor-parallel ranks and averages the norms, when it
converts a model (tools/ckpts/convert_neox_to_hf.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.snapshots import Snapshot

# The group is the model-parallel rank, or the rank with a copy of the model states.
_LABELS = (
    re.compile(r"layer_\d+-model_(\d+)\."),
    re.compile(r"layer_\d+_expert_\d+_mp_rank_(\d+)(?:_\d+)*\."),
    re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+(?:_\d+)*)\."),
)


def check_layouts(models: Sequence[Snapshot], labels: Sequence[str]) -> None:
    """Raise UsageError if one model has unjoined model-parallel parts, and the other has not the same parts.

    labels: of the sides. Folders of one layout have equal names, so their parts can be compared.
    """
    parts = [_list_parts(model) for model in models]
    if parts[0].keys() == parts[1].keys():
        return
    for model, label, of_model in zip(models, labels, parts, strict=True):
        ranks = set(of_model.values())
        if len(ranks) > 1:
            example = next(iter(of_model))
            raise UsageError(
                f"{label}: {model.path}: the files hold slices or partial sums of {len(ranks)} model-parallel ranks, "
                f"which syncheck does not join (such as {example}); convert the model to one file per tensor, or pass "
                "two folders of this layout"
            )


def _list_parts(model: Snapshot) -> dict[str, str]:
    """Return the model-parallel rank by the label at the start of the names. States of the optimizer do not count."""
    parts: dict[str, str] = {}
    if model.format not in ("deepspeed", "megatron"):
        return parts
    for name in model.tensors:
        for pattern in _LABELS:
            if match := pattern.match(name):
                parts[match[0].rstrip(".")] = match[1]
                break
    return parts
