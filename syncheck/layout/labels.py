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

# Labels of the parts of one checkpoint. The group is the model-parallel rank.
_LABEL = re.compile(
    r"(?:layer_\d+-model_|layer_\d+_expert_\d+_mp_rank_|(?:zero_pp_rank_\d+_)?mp_rank_)(\d+(?:_\d+)*)\."
)
# Other formats have no labels, and a module of a model may have any name.
_FORMATS = ("deepspeed", "megatron")


def check_layouts(models: Sequence[Snapshot], labels: Sequence[str]) -> None:
    """Raise UsageError if one model has unjoined model-parallel parts, and the other has not the same parts.

    labels: of the sides. Folders of one layout have equal names, so their parts can be compared.
    """
    first, second = _list_parts(models[0]), _list_parts(models[1])
    if first.keys() == second.keys():
        return

    for model, label, parts in zip(models, labels, (first, second), strict=True):
        ranks = len(set(parts.values()))
        # Parts of one model-parallel rank are whole tensors, like the layers of a pipeline.
        if ranks > 1:
            example = next(iter(parts))
            problem = f"the files hold slices or partial sums of {ranks} model-parallel ranks (such as {example})"
            raise UsageError(
                f"{label}: {model.path}: {problem}, which syncheck does not join; convert the model to one file per "
                "tensor, or pass two folders of this layout"
            )


def _list_parts(model: Snapshot) -> dict[str, str]:
    """Return the model-parallel rank by the label at the start of the names.

    States of the optimizer do not count: `--only-params` skips them, and they keep their labels in joined folders.
    """
    parts: dict[str, str] = {}
    if model.format not in _FORMATS:
        return parts

    matches = [match for name in model.tensors if (match := _LABEL.match(name))]
    for match in matches:
        label = match[0].removesuffix(".")
        parts[label] = match[1]

    return parts
