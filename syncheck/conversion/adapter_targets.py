"""The modules that the settings of an adapter select.

PEFT creates factors for these modules only, and ignores the factors of all other modules in the file of an adapter. The
rules are those of `check_target_module_exists` in peft/tuners/tuners_utils.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.conversion.patterns import (
    Budget,
    UnsupportedPatternError,
    find_segment_ends,
    matches_whole,
    require_short,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# A pattern of target_modules in any case: all linear layers except the output layer of a model of transformers.
_ALL_LINEAR = "all-linear"
# The output layers and classifiers of transformers, whose type is not in a file.
_OUTPUT_LAYERS = frozenset(
    "classification_head classifier decoder embed_out head lm_head output output_layer output_projection predictions "
    "proj_out qa_outputs score".split()
)
# The first number between two dots, after another segment at least.
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
# The number between the dots after some segments.
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(slots=True)
class Targets:
    """The settings of an adapter that select modules."""

    settings: Mapping[str, Any]
    budget: Budget
    """Steps to match patterns to the names of modules."""
    _names: dict[str, frozenset[str]] = field(default_factory=dict)
    """The content of each list of names."""

    def find_obstacle(self, module: str, *, linear: bool) -> str | None:
        """Return the setting because of which PEFT does not load the factors of a module, None if it loads them.

        linear: whether the factors are those of a linear layer.

        Raises UnsupportedPatternError if a setting has another type than in PEFT, or needs an unsupported expression.
        """
        require_short(module)
        # PEFT refuses a pattern without layers.
        has_layers = self.settings.get("layers_to_transform") is not None
        if self.settings.get("layers_pattern") and not has_layers:
            return "layers_pattern"
        if self._selects("exclude_modules", module):
            return "exclude_modules"
        if self._is_saved(module):
            return "modules_to_save"
        targets = self.settings.get("target_modules")
        # PEFT chooses the modules of a known model itself, and refuses other models.
        if targets is None:
            return None
        if isinstance(targets, str):
            return self._find_obstacle_of_text(targets, module, linear=linear)
        if not self._selects("target_modules", module):
            return "target_modules"
        # A module that the list contains with its whole name is selected in any layer.
        is_listed = module in self._list_names("target_modules")
        if is_listed or self._has_selected_layer(module):
            return None
        return "layers_to_transform"

    def _find_obstacle_of_text(self, targets: str, module: str, *, linear: bool) -> str | None:
        """Return the same if target_modules is a text."""
        for name in ("layers_to_transform", "layers_pattern"):
            # PEFT refuses the combination.
            if self.settings.get(name) is not None:
                return name
        if targets.lower() == _ALL_LINEAR:
            is_selected = linear and module.rpartition(".")[2] not in _OUTPUT_LAYERS
        else:
            is_selected = matches_whole(targets, module, self.budget)
        return None if is_selected else "target_modules"

    def _selects(self, setting: str, module: str) -> bool:
        """Whether a setting selects a module: an expression, or a list of names and of their ends after a dot."""
        value = self.settings.get(setting)
        if not value:
            return False
        if isinstance(value, str):
            return matches_whole(value, module, self.budget)
        ends = _list_segment_ends(module)
        return not self._list_names(setting).isdisjoint(ends)

    def _list_names(self, setting: str) -> frozenset[str]:
        """Return the content of a list of names."""
        if setting not in self._names:
            names = _as_texts(setting, self.settings.get(setting))
            self._names[setting] = frozenset(names)
        return self._names[setting]

    def _is_saved(self, module: str) -> bool:
        """Whether modules_to_save selects the module or a module around it, which PEFT replaces as a whole."""
        patterns = _as_texts("modules_to_save", self.settings.get("modules_to_save"))
        for pattern in patterns:
            ends = find_segment_ends(pattern, module, self.budget)
            next_characters = {module[end : end + 1] for end in ends}
            # The match ends with the name, or with a segment of the name.
            if not next_characters.isdisjoint(("", ".")):
                return True
        return False

    def _has_selected_layer(self, module: str) -> bool:
        """Whether layers_to_transform selects the layer of a module."""
        layers = _as_list(self.settings.get("layers_to_transform"))
        if not layers:
            return True
        # The type is compared, because booleans are integers for `isinstance`.
        if {type(layer) for layer in layers} != {int}:
            raise UnsupportedPatternError("layers_to_transform is no list of numbers")
        patterns = self.settings.get("layers_pattern") or []
        if isinstance(patterns, str):
            patterns = [patterns]
        return self._find_layer(module, _as_texts("layers_pattern", patterns)) in layers

    def _find_layer(self, module: str, patterns: Sequence[str]) -> int | None:
        """Return the number of the layer of a module, None if it has none.

        patterns: of the segments before the number; empty if any segments may be there.
        """
        if not patterns:
            match = _LAYER.match(module)
            return int(match[1]) if match else None
        for pattern in patterns:
            numbers = self._find_numbers(module, pattern)
            # Which match PEFT finds first depends on the expression.
            if len(numbers) > 1:
                raise UnsupportedPatternError("several numbers of layers in one name")
            if numbers:
                return numbers.pop()
        return None

    def _find_numbers(self, module: str, pattern: str) -> set[int]:
        """Return the numbers of layers after the segments that match a pattern."""
        numbers = set()
        for end in find_segment_ends(pattern, module, self.budget):
            number = _NUMBER.match(module, end)
            if number is not None:
                numbers.add(int(number[1]))
        return numbers


def _list_segment_ends(module: str) -> list[str]:
    """Return the name of a module, and its ends after a dot."""
    ends = []
    end = module
    while end:
        ends.append(end)
        end = end.partition(".")[2]
    return ends


def _as_list(value: object) -> list[Any]:
    """Return a setting that may be a list or one value; empty without a value."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _as_texts(setting: str, value: object) -> list[str]:
    """Return a list of texts of the settings. Raises UnsupportedPatternError for another value, unless it is off."""
    # A setting that is off may be missing, null, or an empty list.
    if not value:
        return []
    if not isinstance(value, list):
        raise UnsupportedPatternError(f"{setting} is no list")
    texts = [text for text in value if isinstance(text, str)]
    if len(texts) < len(value):
        raise UnsupportedPatternError(f"{setting} is no list of names")
    return texts
