"""The settings of an adapter, adapter_config.json: the scale of its products, and settings that change a merge.

Names and meanings are those of PEFT's `LoraConfig` (peft/tuners/lora/config.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.conversion.adapter_problems import AdapterProblem
from syncheck.conversion.adapter_targets import Targets
from syncheck.conversion.patterns import Budget, UnsupportedPatternError, find_pattern
from syncheck.readers.adapter_config import INITIAL
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncheck.messages import Message

# Settings that are read here, or that do not change a merge.
# Any value of them is supported, except for the settings below.
_HARMLESS = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules fan_in_fan_out "
    "inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_bias "
    "lora_dropout lora_ga_config megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern "
    "revision runtime_config target_modules task_type token_indices trainable_token_indices use_rslora".split()
)
_FLAGS = ("fan_in_fan_out", "use_rslora", "lora_bias")
_LORA, _TOKENS = "LORA", "TRAINABLE_TOKENS"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The content of an adapter_config.json; empty if it is missing or cannot be read."""

    content: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    """Steps to match patterns to the names of modules."""
    targets: Targets = field(init=False)
    """The settings that select modules."""

    def __post_init__(self) -> None:
        # A frozen object has no other way to set a field.
        object.__setattr__(self, "targets", Targets(self.content, self.budget))

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
            # One setting is enough to refuse the merge.
            if not _is_supported(name, value):
                return AdapterProblem.SETTING(name=brief(name), value=brief(value))
        return None

    def find_obstacle(self, module: str, *, linear: bool = True) -> Message | None:
        """Return the reason why PEFT does not load the factors of a module, None if it loads them.

        linear: whether the factors are those of a linear layer.
        """
        try:
            setting = self.targets.find_obstacle(module, linear=linear)
        except UnsupportedPatternError as error:
            return AdapterProblem.PATTERN(problem=str(error))
        return None if setting is None else self.refuse_module(module, setting)

    def refuse_bias(self, module: str) -> Message | None:
        """Return the problem of a bias of lora_B, which PEFT creates with the setting `lora_bias` only."""
        if self._read("lora_bias"):
            return None
        return self.refuse_module(module, "lora_bias")

    def find_obstacle_of_tokens(self, module: str) -> Message | None:
        """Return the same for the rows of an embedding."""
        # LoRA has another setting for them, and the other kind selects the input embeddings by default.
        has_targets = self.content.get("target_modules") is not None
        if self.content.get("peft_type") == _TOKENS and has_targets:
            return self.find_obstacle(module)
        return None

    def refuse_module(self, module: str, setting: str) -> Message:
        """Return the problem of a part that PEFT does not load into a module because of a setting."""
        value = brief(self.content.get(setting))
        return AdapterProblem.NOT_LOADED(module=brief(module), name=setting, value=value)

    def find_scale(self, module: str, rank: int) -> float | Message:
        """Return the scale of a module's product, or the reason why it is unknown. rank: of its factors."""
        try:
            alpha = self._find_value("alpha_pattern", module, self.content.get("lora_alpha"))
            expected_rank = self._find_value("rank_pattern", module, self.content.get("r", rank))
        except UnsupportedPatternError as error:
            return AdapterProblem.PATTERN(problem=str(error))
        # The shapes of the factors must confirm the settings.
        is_confirmed = expected_rank == rank
        scale = _divide(alpha, self._find_divisor(rank)) if is_confirmed else math.nan
        if not math.isfinite(scale):
            return AdapterProblem.SCALE(alpha=brief(alpha), rank=brief(expected_rank), shape=rank)
        return scale

    def _find_divisor(self, rank: int) -> float:
        """Return the number by which lora_alpha is divided."""
        return math.sqrt(rank) if self.content.get("use_rslora") else float(rank)

    def _find_value(self, table_name: str, module: str, default: object) -> object:
        """Return the value for a module in a table of patterns.

        table_name: of the setting with the table.
        default: the value of a module that no pattern matches.
        """
        patterns = self._read(table_name, off={})
        if not isinstance(patterns, dict):
            raise UnsupportedPatternError(f"{table_name} is no table")
        pattern = find_pattern(patterns, module, self.budget)
        # Without a match, the pattern is None, which is no key of a JSON table.
        return patterns.get(pattern, default)

    def _read(self, name: str, off: object = None) -> object:
        """Return the value of a setting.

        off: the value of a setting that is off, which is missing in older files.
        """
        return self.content.get(name) or off

    def find_tokens(self, module: str) -> list[int] | None:
        """Return the rows of an embedding that the adapter replaces, None if they are unknown."""
        is_for_tokens = self.content.get("peft_type") == _TOKENS
        setting = "token_indices" if is_for_tokens else "trainable_token_indices"
        tokens = self.content.get(setting)
        if not isinstance(tokens, dict):
            return _read_rows(tokens)
        # Keys are ends of the names of modules. Two keys of one module contradict each other.
        rows = [tokens[name] for name in tokens if module.endswith(name)]
        return _read_rows(rows[0]) if len(rows) == 1 else None


def _is_anything(_value: object) -> bool:
    return True


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_initial(value: object) -> bool:
    return value in INITIAL


def _is_off(value: object) -> bool:
    return not value


# The supported values of each setting. Unknown settings may change the merge, unless they are off.
_CHECKS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(_HARMLESS, _is_anything),
    **dict.fromkeys(_FLAGS, _is_flag),
    "init_lora_weights": _is_initial,
}


def _is_supported(name: str, value: object) -> bool:
    """Whether the merge of an adapter with this setting is known."""
    check = _CHECKS.get(name, _is_off)
    return check(value)


def _divide(alpha: Any, divisor: float) -> float:
    """Return the scale of a product, which is NaN or infinite if the settings have no usable number.

    alpha: a value of a JSON file, usually lora_alpha.
    divisor: the rank of the factors, or its root.
    """
    # The type is compared, because booleans are integers for `isinstance`.
    if type(alpha) not in (int, float):
        return math.nan
    try:
        return float(alpha) / divisor
    except ArithmeticError:  # the integers of JSON have no bound, and a factor may have no rows
        return math.inf


def _read_rows(tokens: object) -> list[int] | None:
    """Return a list of different rows, None for anything else in the file."""
    if not isinstance(tokens, list):
        return None
    rows = [token for token in tokens if type(token) is int and token >= 0]
    # A row that is listed twice has two values.
    return rows if len(set(rows)) == len(tokens) else None
