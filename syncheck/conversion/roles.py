"""Recognize the role of a tensor in attention or in a gated layer by its name, like query or gate.

Each library has its own spelling of a role, and none uses the word of another role.
"""

from __future__ import annotations

import re

# The part of a layer and the role of each word, after words without a meaning have been removed.
_ROLES = dict.fromkeys(("q", "query", "queries", "wq"), ("attention", "query"))
_ROLES |= dict.fromkeys(("k", "key", "keys", "wk"), ("attention", "key"))
_ROLES |= dict.fromkeys(("v", "value", "values", "wv"), ("attention", "value"))
_ROLES |= dict.fromkeys(("o", "out", "output", "wo"), ("attention", "output"))
_ROLES |= {word: ("gated", word) for word in ("gate", "up", "down")}
# Words around a role: `to_q.weight`, `linear_k.bias`, `v_proj.kernel`, `k_norm`; and numbers, as in `to_out.0`.
_PLAIN = frozenset(
    "weight bias kernel w b scale to proj projection c lin linear layer norm layernorm ln fc net attn attention self"
    " ffn mlp".split()
)


def have_other_roles(name: str, partner: str) -> bool:
    """Whether the names of two tensors state two roles that exclude each other."""
    # A name without a role is in no part of a layer.
    part, role = _ROLES.get(_find_word(name), ("", ""))
    other_part, other_role = _ROLES.get(_find_word(partner), ("none", ""))
    return part == other_part and role != other_role


def _find_word(name: str) -> str:
    """Return the last word of a name that has a meaning; of its words between two dots, it must be the only one."""
    for component in reversed(re.split(r"[./]", name.lower())):
        words = [word for word in component.split("_") if word not in _PLAIN and not word.isdecimal()]
        if words:
            return "_".join(words)
    return ""
