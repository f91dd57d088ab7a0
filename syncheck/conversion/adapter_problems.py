"""The reasons why a part of an adapter was not merged."""

from __future__ import annotations

from syncheck.sentences import Sentence


class AdapterProblem(Sentence):
    """Why a part of an adapter was not merged."""

    NO_CONFIG = "`adapter_config.json` beside it is missing or cannot be read"
    KIND = "adapters of type {kind} are not merged, only LoRA"
    SETTING = "the setting {name:name} in `adapter_config.json` is not supported: {value:name}"
    NOT_LOADED = (
        "PEFT does not load it into the module {module:name}, because of {name:name} in `adapter_config.json`: "
        "{value:name}"
    )
    PATTERN = "a pattern of modules in `adapter_config.json` is not supported ({problem})"
    SCALE = "its scale is unknown (`lora_alpha`: {alpha}, r: {rank}, rows of `lora_A`: {shape})"
    TOKENS = "`adapter_config.json` does not list the rows that it replaces"
    SEVERAL = "the files have several adapters ({names:list}); pass the merged one only"
    NO_MODULE = "the base model has no module of this name"
    INCOMPLETE = "the module has only one of two factors"
    SHAPES = "the shapes of the module's factors and weight do not fit, or they cannot be read"
    ORIENTATION = "the shapes of other modules contradict `fan_in_fan_out`, and a square weight does not show it"
    TAKEN = "another part of the adapter changes the same weight"
    UNKNOWN = "its kind is unknown"
