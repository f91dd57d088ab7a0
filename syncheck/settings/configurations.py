"""Read the configurations beside the files of a model, with one name and one form for each setting.

Transformers 4 and 5 and Meta store some settings in several forms. A nested configuration, such as `vision_config`, has
its own settings, whose names begin with its name.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.frozen import record
from syncheck.settings.defaults import MEGATRON, META, find_default
from syncheck.settings.files import CONFIGURATIONS, list_folders, read_json
from syncheck.settings.megatron import NAME, read_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# The names of one setting in several libraries.
_NAMES = {
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "sliding_window_pattern": "_sliding_window_pattern",
}
# Settings found together in Meta's params.json only.
_MARKS_OF_META = frozenset({"dim", "num_attention_heads"})
# The names of its settings in transformers.
_NAMES_OF_META = {
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
# The kind of the scaled positions of Meta's code. The file does not state its numbers.
_SCALED_BY_META = "llama3"
# Models that scale the outputs of a decoder only if the output layer is tied, also if its weight equals the embedding.
_SCALE_WITH_TIE = frozenset("t5 mt5 umt5 longt5 switch_transformers".split())
_GATED = "gated-"
_GATED_LAYERS = {"mt5": "gated-gelu", "umt5": "gated-gelu"}
TEXT = "text_config"
_NO_SCALING = {"rope_type": "default"}
_ROPE = ("rope_scaling", "rope_parameters")
# The parts of positions that transformers 5 stores with the scaling, and transformers 4 beside the scaling.
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_TYPES = ("model_type", "_class_name", "architecture")
# Files are untrusted: deeper containers cannot be compared or written.
_MOST_LEVELS = 32


@record
class Configuration:
    """The configuration of a model in files with one name, in one or several folders."""

    file_name: str
    settings: Mapping[str, Any]
    """As in the file, with the names and forms of transformers 5."""
    nested: Mapping[str, Mapping[str, Any]]
    """The settings of each configuration within the configuration, by name."""

    @property
    def model_type(self) -> object:
        """The type of the model, or its class; None if the file states neither."""
        return next((self.settings[key] for key in _TYPES if key in self.settings), None)

    def merge_text(self) -> Configuration:
        """Return the configuration with the settings of the language model in place of the outer settings."""
        nested = {name: content for name, content in self.nested.items() if name != TEXT}
        return replace(self, settings={**self.settings, **self.nested.get(TEXT, {})}, nested=nested)

    def get_stated(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a nested configuration, or the outer settings without a name."""
        return self.nested.get(name, {}) if name else self.settings

    def get_complete(self, name: str) -> dict[str, Any]:
        """Return the same with settings that the outer configuration, or the language model, states instead."""
        stated_elsewhere = {"": self.nested.get(TEXT, {}), TEXT: self.settings}
        return {**stated_elsewhere.get(name, {}), **self.get_stated(name)}


@record
class Configurations:
    """The configurations of a model by file name, and the paths of files that are no configurations."""

    by_name: Mapping[str, Configuration]
    unreadable: tuple[str, ...]

    @property
    def model_type(self) -> str:
        """The type of the model, empty without a statement."""
        model_type = str(self.merge().get("model_type") or "")
        # Only this library states it.
        return "" if model_type in (META, MEGATRON) else model_type

    def merge(self) -> dict[str, Any]:
        """Return the settings of all configurations."""
        settings: dict[str, Any] = {}
        for configuration in self.by_name.values():
            settings |= configuration.merge_text().settings

        return settings


def read_configurations(paths: Sequence[str], values: Mapping[str, Any]) -> Configurations:
    """Return the configurations beside the files or folders of a model. Later folders take precedence.

    values: of the files, by dotted name, like the saved arguments of Megatron.
    """
    settings_of_file: dict[str, dict[str, Any]] = {}
    unreadable: list[str] = []
    for folder in list_folders(paths):
        for file_name in CONFIGURATIONS:
            path = os.path.join(folder, file_name)
            content = read_json(path)
            if content is not None and not _is_too_deep(content):
                settings = settings_of_file.setdefault(file_name, {})
                settings |= content
            elif os.path.lexists(path):
                unreadable.append(path)

    configurations: dict[str, Configuration] = {}
    for file_name, stored_settings in settings_of_file.items():
        configurations_by_name = dict(_find_configurations("", stored_settings))
        outer_settings = configurations_by_name.pop("")
        configurations[file_name] = Configuration(
            file_name=file_name,
            settings=outer_settings,
            nested=configurations_by_name,
        )

    arguments = read_arguments(values)
    if arguments:
        configurations[NAME] = Configuration(NAME, arguments, nested={})

    return Configurations(
        by_name=configurations,
        unreadable=tuple(unreadable),
    )


def _is_too_deep(content: object) -> bool:
    """Whether containers are nested in each other without a plausible end."""
    level: list[object] = [content]
    for _ in range(_MOST_LEVELS):
        inner: list[object] = []
        for container in level:
            if isinstance(container, dict):
                inner += container.values()
            elif isinstance(container, list):
                inner += container

        level = inner

    # Only containers contain values.
    return len(level) > 0


def _find_configurations(name: str, stored: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the settings of a configuration, and of each configuration within."""
    prefix = f"{name}.".lstrip(".")
    settings: dict[str, Any] = {}
    for key, value in stored.items():
        if _is_configuration(key, value):
            yield from _find_configurations(f"{prefix}{key}", value)
        else:
            settings[key] = value

    yield name, _normalize(settings)


def _is_configuration(key: str, value: object) -> bool:
    """Whether a setting is the configuration of a part of the model."""
    if not isinstance(value, dict) or key == "quantization_config":
        return False

    return key.endswith("_config") or "model_type" in value


def _normalize(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under one name and in one form each."""
    settings: dict[str, Any] = {}
    for key, value in stored.items():
        # Null beside another name of the setting is no value.
        _complete(settings, _NAMES.get(key, key), value)

    # The configuration of DistilBERT has the same names.
    if settings.keys() >= _MARKS_OF_META and "model_type" not in settings:
        settings = _translate_meta(settings)

    _unite_positions(settings)
    if str(settings.get("model_type")) in _SCALE_WITH_TIE:
        _state_t5(settings)

    _unite_windows(settings)
    return settings


def _complete(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting without a value."""
    if settings.get(name) is None:
        settings[name] = value


def _translate_meta(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Meta's params.json with the names of transformers."""
    translated: dict[str, Any] = {"model_type": META}
    for key, value in settings.items():
        translated[_NAMES_OF_META.get(key, key)] = value

    # The tokenizer has the size.
    if translated.get("vocab_size") == -1:
        del translated["vocab_size"]
    is_scaled = translated.pop("use_scaled_rope", False)
    if is_scaled:
        translated["rope_scaling"] = _SCALED_BY_META

    return translated


def _unite_windows(settings: dict[str, Any]) -> None:
    """Remove the forms of a window without any layer."""
    by_default = find_default("use_sliding_window", settings.get("model_type"))
    if settings.get("use_sliding_window", by_default) is False:
        # Null means no window.
        settings["sliding_window"] = None
        settings.pop("max_window_layers", None)
        settings.pop("use_sliding_window", None)

    # All layers attend to everything, as without the setting.
    layer_types = settings.get("layer_types")
    if isinstance(layer_types, list) and layer_types.count(_FULL) == len(layer_types):
        settings["layer_types"] = None


def _state_t5(settings: dict[str, Any]) -> None:
    """Add the settings of T5 that follow from other settings, which transformers 5 stores."""
    default = _GATED_LAYERS.get(settings["model_type"], "relu")
    layer = settings.get("feed_forward_proj") or default
    settings["feed_forward_proj"] = layer
    activation = str(layer).removeprefix(_GATED)
    # The first model with a gate approximated its function.
    if layer == "gated-gelu":
        activation = "gelu_new"

    settings.setdefault("is_gated_act", activation != layer)
    settings.setdefault("dense_act_fn", activation)
    reasons = (
        settings.get("tie_word_embeddings"),
        settings.get("scale_decoder_outputs"),
    )
    settings["scale_decoder_outputs"] = False not in reasons


def _unite_positions(settings: dict[str, Any]) -> None:
    """Change the settings of rotary positions to the form of transformers 4, with the scaling under one name."""
    rope: dict[str, Any] = {**_NO_SCALING}
    is_stated = False
    for name in _ROPE:
        parameters = settings.get(name)
        if isinstance(parameters, dict):
            rope |= parameters
            del settings[name]
            is_stated = True

    if _SLIDING in rope:
        _separate_layers(settings, rope)

    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    for name in _BESIDE_SCALING:
        if name in rope:
            _complete(settings, name, rope.pop(name))

    if is_stated:
        settings["rope_scaling"] = rope


def _separate_layers(settings: dict[str, Any], rope: dict[str, Any]) -> None:
    """Move the parameters of layers with a window out of the parameters of all layers."""
    of_window: Any = rope[_SLIDING]
    of_other_layers: Any = rope.get(_FULL)
    are_parameters = isinstance(of_window, dict) and isinstance(of_other_layers, dict)
    if not are_parameters:
        return

    del rope[_SLIDING], rope[_FULL]
    rope |= of_other_layers
    sliding = {
        **_NO_SCALING,
        **of_window,
    }
    _complete(settings, "rope_local_base_freq", sliding.pop("rope_theta", None))
    if sliding != _NO_SCALING:
        settings["rope_scaling_of_sliding_attention"] = sliding
