"""Recognize the tensors with a row for each token of a vocabulary by their names."""

from __future__ import annotations

import re

_OUTPUT = re.compile(r"\w*(?:head|output|embed_out|unembed|decoder|logits|classifier|cls|score)\w*")
_EMBEDDING = re.compile(r"\w*(?:embed|token|vocab|wte|shared)\w*")
# Embeddings of positions and segments have other rows.
_OTHER_EMBEDDING = re.compile(r"\w*(?:posi|type|segment)\w*")
# The embeddings of an encoder and a decoder that use a third one, as in T5 and BART.
_STACK_EMBEDDING = re.compile(r"(?:.*\.)?(?:encoder|decoder)\.embed_tokens\.weight")


def get_module(name: str) -> str:
    """Return the last part of the name of the module of a tensor; the name itself if it has one part."""
    return name.split(".")[-2:][0]


def has_vocabulary(name: str) -> bool:
    """Whether a tensor has the name of an embedding or of an output layer, so that its rows may be padded."""
    module = get_module(name)
    return bool(_OUTPUT.fullmatch(module) or _EMBEDDING.fullmatch(module))


def classify_vocabulary(name: str) -> str:
    """Return which matrix of a vocabulary has this name: "output", "embedding", "encoder or decoder", or empty."""
    module = get_module(name)
    # `embed_out` is an output layer.
    if _OUTPUT.fullmatch(module):
        return "output"
    if _STACK_EMBEDDING.fullmatch(name):
        return "encoder or decoder"
    # Embeddings of positions have rows for other things than tokens.
    if _OTHER_EMBEDDING.fullmatch(module):
        return ""
    return "embedding" if _EMBEDDING.fullmatch(module) else ""
