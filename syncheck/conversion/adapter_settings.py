"""The settings of an adapter, adapter_config.json: the scale of its products, and settings that change a merge.

Names and meanings are those of PEFT's `LoraConfig` (peft/tuners/lora/config.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.conversion.patterns import Budget, UnsupportedPatternError, find_pattern
from syncheck.errors import brief
from syncheck.messages import AdapterProblem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.messages import Message

# Settings that are read here, or that do not change which weights a merge writes: the file shows the adapted modules.
_HARMLESS = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules fan_in_fan_out "
    "inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_bias "
    "lora_dropout lora_ga_config megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern "
    "revision runtime_config target_modules task_type token_indices trainable_token_indices use_rslora".split()
)
# Initial values that leave the base model as it is. PiSSA, OLoRA and similar values change the base model at load.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")
_FLAGS = ("fan_in_fan_out", "use_rslora", "lora_bias")
# Settings that change the function of a model with this adapter.
_MEANING = (
    "peft_type", "lora_alpha", "r", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "trainable_token_indices", "token_indices", "layer_replication",
)  # fmt: skip
_LORA, _TOKENS = "LORA", "TRAINABLE_TOKENS"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The content of an adapter_config.json; empty if it is missing or cannot be read."""

    content: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    """Steps to match patterns to the names of modules."""

    @property
    def transposed(self) -> bool:
        """Whether the weights of adapted linear layers are stored as (columns, rows)."""
        return self.content.get("fan_in_fan_out") is True

    def find_problem(self) -> Message | None:
        """Return the reason not to merge products of factors, None if there is none."""
        if not self.content:
            return AdapterProblem.NO_CONFIG()
        kind = self.content.get("peft_type", _LORA)
        if kind != _LORA:
            return AdapterProblem.KIND(kind=brief(kind))
        for name, value in self.content.items():
            # Unknown settings may change the merge, unless they are off.
            harmless = name in _HARMLESS or not value
            if name == "init_lora_weights":
                harmless = value in _INITIAL
            elif name in _FLAGS:
                harmless = isinstance(value, bool)
            if not harmless:
                return AdapterProblem.SETTING(name=brief(name), value=brief(value))
        return None

    def find_scale(self, module: str, rank: int) -> float | Message:
        """Return the scale of a module's product, or the reason why it is unknown. rank: of its factors."""
        try:
            alpha = self._find_value("alpha_pattern", module, self.content.get("lora_alpha"))
            expected_rank = self._find_value("rank_pattern", module, self.content.get("r", rank))
        except UnsupportedPatternError as error:
            return AdapterProblem.PATTERN(problem=str(error))
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or expected_rank != rank or not rank:
            return AdapterProblem.SCALE(alpha=brief(alpha), rank=brief(expected_rank), shape=rank)
        divisor = float(rank)
        if self.content.get("use_rslora"):
            divisor = math.sqrt(rank)
        try:
            scale = float(alpha) / divisor
        except OverflowError:  # the integers of JSON have no bound
            scale = math.inf
        if not math.isfinite(scale):
            return AdapterProblem.SCALE(alpha=brief(alpha), rank=rank, shape=rank)
        return scale

    def _find_value(self, name: str, module: str, default: object) -> object:
        patterns = self.content.get(name) or {}
        if not isinstance(patterns, dict):
            raise UnsupportedPatternError(f"{name} is no table")
        pattern = find_pattern(patterns, module, self.budget)
        if pattern is None:
            return default
        return patterns[pattern]

    def find_tokens(self, module: str) -> list[int] | None:
        """Return the rows of an embedding that the adapter replaces, None if they are unknown."""
        tokens = self.content.get("trainable_token_indices")
        if self.content.get("peft_type") == _TOKENS:
            tokens = self.content.get("token_indices")
        if isinstance(tokens, dict):
            # Keys are ends of the names of modules.
            rows = [tokens[name] for name in tokens if module.endswith(name)]
            if len(rows) != 1:
                return None
            tokens = rows[0]
        if not isinstance(tokens, list):
            return None
        for token in tokens:
            if type(token) is not int or token < 0:
                return None
        # A row that is listed twice has two values.
        if len(set(tokens)) < len(tokens):
            return None
        return tokens

    def find_difference(self, partner: AdapterSettings) -> str | None:
        """Return a setting that makes two models with the same parts different; None without one of the files."""
        if not (self.content and partner.content):
            return None
        for name in _MEANING:
            # Older files lack settings, which are off.
            if (self.content.get(name) or None) != (partner.content.get(name) or None):
                return name
        return None
