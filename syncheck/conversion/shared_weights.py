"""Recognize weights that a model uses under several names, so that a file may store one of them for all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.conversion.name_maps import read_settings
from syncheck.conversion.vocabularies import classify_vocabulary
from syncheck.layout.copies import find_shared_tensors
from syncheck.settings.defaults import find_default

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.snapshots import Tensor

# The settings of several libraries that state whether the output layer uses the weight of the embedding, and the value
# with which it does.
_TYING = {
    "tie_word_embeddings": True,
    "share_embeddings_and_output_weights": True,
    "enable_weight_tying": True,
    "untie_embeddings_and_output_weights": False,
}


def is_shared_weight(names: Sequence[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors of a model with equal data are normally one weight.

    Equal data alone is no evidence: a layer that a conversion lost may be a copy of another layer.
    """
    return _share_memory(names, tensors) or _is_tied_vocabulary(names) or _is_tied_bias(names)


def _share_memory(names: Sequence[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the same bytes in a file, as torch.save stores them."""
    named_tensors = [replace(tensors[name], name=name) for name in names]
    sizes = [len(shared_names) for shared_names in find_shared_tensors(named_tensors)]
    return sizes == [len(names)]


def _is_tied_vocabulary(names: Sequence[str]) -> bool:
    """Whether the names are an embedding and its output layer, or the embeddings of an encoder and a decoder."""
    allowed_kinds = ["output", "embedding", "encoder or decoder", "encoder or decoder"]
    for name in names:
        kind = classify_vocabulary(name)
        # Two models in one file, like teacher and student, have two embeddings.
        if kind not in allowed_kinds:
            return False
        allowed_kinds.remove(kind)
    return True


def _is_tied_bias(names: Sequence[str]) -> bool:
    """Whether the names are the bias of an output layer, and the same bias in its inner layer, as in BERT."""
    shorter, *longer = sorted(names, key=len)
    container = shorter.removesuffix(".bias")
    return container != shorter and longer == [f"{container}.decoder.bias"]


def find_output_tie(paths: Sequence[str], values: Mapping[str, Any]) -> bool | None:
    """Return whether the output layer of a model uses the weight of its embedding, None if it is not known.

    A configuration without a statement has the default of its type of model.

    Parameters as for `name_maps.find_variables`.
    """
    statements = set()
    defaults = []
    for settings in read_settings(paths, values):
        if "model_type" in settings:
            defaults.append(find_default("tie_word_embeddings", settings["model_type"]))

        for name, tying_value in _TYING.items():
            if name in settings:
                value = settings[name]
                statements.add(value is tying_value if isinstance(value, bool) else None)

    # The outer configuration comes before that of its language model.
    ties = (statements or {*defaults[:1]}) & {True, False}
    # Configurations that contradict each other state nothing.
    return ties.pop() if len(ties) == 1 else None


def is_output_tie(name: str, other: str) -> bool:
    """Whether a single name of two is an output layer, so that a configuration may state a tie of both."""
    return (classify_vocabulary(name) == "output") != (classify_vocabulary(other) == "output")
