"""The modules that the settings of an adapter select.

PEFT creates factors for these modules only, and ignores the factors of all other modules in the file of an adapter. The
rules are those of `check_target_module_exists` in peft/tuners/tuners_utils.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.patterns import (
    Budget,
    UnsupportedPatternError,
    find_segment_ends,
    matches_whole,
    require_short,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    # A setting, and whether it refuses a module.
    _Refusal = tuple[str, Callable[["Targets", "_Module"], bool]]

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


class _Module(NamedTuple):
    """A module for which an adapter has factors."""

    name: str
    is_linear: bool
    """Whether the factors belong to a linear layer."""

    @property
    def last_segment(self) -> str:
        """The name within the module around it."""
        return self.name.rpartition(".")[2]


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
        target = _Module(module, linear)
        for setting, refuses in self._list_refusals():
            if refuses(self, target):
                return setting
        return None

    def _list_refusals(self) -> Sequence[_Refusal]:
        """Return the reasons for which a module may be refused, in the order in which PEFT checks them."""
        targets = self.settings.get("target_modules")
        # PEFT chooses the modules of a known model itself, and refuses other models.
        if targets is None:
            return _REFUSALS
        if isinstance(targets, str):
            return (*_REFUSALS, *_REFUSALS_OF_TEXT)
        return (*_REFUSALS, *_REFUSALS_OF_LIST)

    def has_pattern_only(self, _module: _Module) -> bool:
        """Whether layers_pattern is set without layers, which PEFT refuses."""
        return bool(self.settings.get("layers_pattern")) and not self.has_layers(_module)

    def has_layers(self, _module: _Module) -> bool:
        """Whether layers_to_transform is set, which PEFT refuses if target_modules is a text."""
        return self.settings.get("layers_to_transform") is not None

    def has_pattern(self, _module: _Module) -> bool:
        """Whether layers_pattern is set, which PEFT refuses if target_modules is a text."""
        return self.settings.get("layers_pattern") is not None

    def is_excluded(self, module: _Module) -> bool:
        """Whether exclude_modules selects a module."""
        return self._selects("exclude_modules", module.name)

    def is_saved(self, module: _Module) -> bool:
        """Whether modules_to_save selects the module or a module around it, which PEFT replaces as a whole."""
        patterns = _as_texts("modules_to_save", self.settings.get("modules_to_save"))
        for pattern in patterns:
            ends = find_segment_ends(pattern, module.name, self.budget)
            next_characters = {module.name[end : end + 1] for end in ends}
            # The match ends with the name, or with a segment of the name.
            if not next_characters.isdisjoint(("", ".")):
                return True
        return False

    def is_unmatched(self, module: _Module) -> bool:
        """Whether the text of target_modules does not select a module."""
        targets = self.settings["target_modules"]
        if targets.lower() == _ALL_LINEAR:
            return not module.is_linear or module.last_segment in _OUTPUT_LAYERS
        return not matches_whole(targets, module.name, self.budget)

    def is_unlisted(self, module: _Module) -> bool:
        """Whether the list of target_modules does not select a module."""
        return not self._selects("target_modules", module.name)

    def is_in_other_layer(self, module: _Module) -> bool:
        """Whether layers_to_transform does not select the layer of a module."""
        # A module that the list contains with its whole name is selected in any layer.
        is_listed = module.name in self._list_names("target_modules")
        return not is_listed and not self._has_selected_layer(module.name)

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


# Settings because of which PEFT does not load the factors of a module, and whether they refuse one: with any
# target_modules, and also if it is a text or a list.
_REFUSALS: tuple[_Refusal, ...] = (
    ("layers_pattern", Targets.has_pattern_only),
    ("exclude_modules", Targets.is_excluded),
    ("modules_to_save", Targets.is_saved),
)
_REFUSALS_OF_TEXT: tuple[_Refusal, ...] = (
    ("layers_to_transform", Targets.has_layers),
    ("layers_pattern", Targets.has_pattern),
    ("target_modules", Targets.is_unmatched),
)
_REFUSALS_OF_LIST: tuple[_Refusal, ...] = (
    ("target_modules", Targets.is_unlisted),
    ("layers_to_transform", Targets.is_in_other_layer),
)


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
