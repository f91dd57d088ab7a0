"""Recognize the role of a tensor in attention or in a gated layer by its name: query, key, value, gate, up and others.

Each library has its own spelling of a role, and none uses the word of another role.
"""

from __future__ import annotations

import re

# The words of each role, after words without a meaning have been removed. Roles of one table exclude each other.
_ATTENTION = {
    "query": ("q", "query", "queries", "wq"),
    "key": ("k", "key", "keys", "wk"),
    "value": ("v", "value", "values", "wv"),
    "output": ("o", "out", "output", "wo"),
}
_GATED = {"gate": ("gate",), "up": ("up",), "down": ("down",)}
# Words around a role: `to_q.weight`, `linear_k.bias`, `v_proj.kernel`, `k_norm`; and numbers, as in `to_out.0`.
_PLAIN = frozenset(
    "weight bias kernel w b scale to proj projection c lin linear layer norm layernorm ln fc net attn attention self"
    " ffn mlp".split()
)


def have_other_roles(name: str, partner: str) -> bool:
    """Whether the names of two tensors state two roles that exclude each other."""
    word, partner_word = _find_word(name), _find_word(partner)
    for table in (_ATTENTION, _GATED):
        roles = {_find_role(text, table) for text in (word, partner_word)}
        if "" not in roles and len(roles) > 1:
            return True
    return False


def _find_word(name: str) -> str:
    """Return the last word of a name that has a meaning; of its words between two dots, it must be the only one."""
    for component in reversed(re.split(r"[./]", name.lower())):
        words = [word for word in component.split("_") if word not in _PLAIN and not word.isdecimal()]
        if words:
            return "_".join(words)
    return ""


def _find_role(word: str, table: dict[str, tuple[str, ...]]) -> str:
    """Return the role of a word in a table; empty if it has none."""
    roles = [role for role, spellings in table.items() if word in spellings]
    return next(iter(roles), "")
