"""The table of defaults agrees with the configuration classes of the installed transformers."""

from __future__ import annotations

from typing import Any

import pytest

from syncheck.settings.defaults import KNOWN_TYPES, UNKNOWN, find_default

transformers = pytest.importorskip("transformers")
KEYS = (
    "tie_word_embeddings sliding_window attn_logit_softcapping final_logit_softcapping rope_theta rms_norm_eps "
    "hidden_act num_key_value_heads partial_rotary_factor num_experts_per_tok query_pre_attn_scalar clip_qkv rotary_dim"
).split()


def read_default(model_type: str, key: str) -> Any:
    """Return the default in the class of a type, before other settings change it; None if it has no such setting."""
    kind = transformers.CONFIG_MAPPING[model_type]
    rope = getattr(kind(), "rope_parameters", None) or {}
    if key in rope:
        return rope[key]

    # The older name of the setting.
    if key == "hidden_act" and not hasattr(kind, key):
        key = "activation_function"

    # Some classes set this default in each object.
    return getattr(kind() if key == "tie_word_embeddings" else kind, key, None)


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_defaults_are_those_of_transformers(key: str) -> None:
    """Each known default is that of the installed class; a wrong type or value in the table is found."""
    wrong = []
    for model_type in sorted(KNOWN_TYPES):
        # Older versions lack the newest types.
        if model_type in transformers.CONFIG_MAPPING:
            default = find_default(key, model_type)
            if default is not UNKNOWN and default != read_default(model_type, key):
                wrong.append((model_type, default, read_default(model_type, key)))

    assert wrong == []
