"""The settings of an adapter beside its tensors, adapter_config.json, as values of the model.

Adapters with equal tensors and different settings are different models. Any setting may change the model, except for
the settings listed here. Names and meanings are those of PEFT's `LoraConfig` (peft/tuners/lora/config.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import CheckpointError
from syncheck.readers.untrusted import parse_json_object, read_whole
from syncheck.snapshots import Membership
from syncheck.tensors.names import has_adapter_segment, is_adapter_file, name_adapter_setting

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot, Tensor

NAME = "adapter_config.json"
_LIMIT = 1 << 24  # bytes
_LONGEST = 1000  # characters of a value in a fingerprint
# Settings without influence on a loaded model: where it comes from, and how it was trained.
_WITHOUT_INFLUENCE = frozenset(
    "auto_mapping base_model_name_or_path inference_mode lora_dropout peft_version revision runtime_config "
    "task_type".split()
)
# Initial values that leave the base model as it is. PiSSA, OLoRA and similar values change the base model at load.
INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")
# JSON of the values that are off, which have the meaning of a missing setting.
_OFF = frozenset(("null", "false", '""', "[]", "{}"))
# The same for settings with another default. An empty list of target_modules selects no module.
_DEFAULTS = {
    "bias": _OFF | {'"none"'},
    "init_lora_weights": frozenset(("null", "true", "false", '"gaussian"', '"eva"', '"orthogonal"')),
    "megatron_core": _OFF | {'"megatron.core"'},
    "qalora_group_size": _OFF | {"16"},
    "target_modules": frozenset(("null",)),
}
# Lists whose order has no meaning.
_UNORDERED = frozenset("exclude_modules feedforward_modules layers_to_transform modules_to_save target_modules".split())


def add_adapter_settings(snapshot: Snapshot) -> Snapshot:
    """Return a checkpoint with the settings beside it, if it has tensors of an adapter."""
    folder = snapshot.path if os.path.isdir(snapshot.path) else os.path.dirname(snapshot.path)
    path = os.path.join(folder, NAME)
    if not os.path.isfile(path) or not _has_adapter(snapshot):
        return snapshot

    settings = _read_settings(path)
    return replace(
        snapshot,
        values={**snapshot.values, **settings},
        model_values={**snapshot.model_values, **dict.fromkeys(settings, Membership.MODEL)},
    )


def _has_adapter(snapshot: Snapshot) -> bool:
    """Whether a checkpoint has tensors of an adapter."""
    return any(_is_adapter_weight(name, tensor) for name, tensor in snapshot.tensors.items())


def _is_adapter_weight(name: str, tensor: Tensor) -> bool:
    # The tensors of a fingerprint have no file beside the settings.
    if tensor.digest is not None:
        return False
    # The states of an optimizer have the names of parts.
    if name.startswith("optimizer."):
        return False
    file_name = os.path.basename(tensor.path)
    return has_adapter_segment(name) or is_adapter_file(file_name)


def _read_settings(path: str) -> dict[str, Any]:
    """Return the settings that may change a model, by the name of the value."""
    try:
        raw = read_whole(path, _LIMIT, "")
    except (OSError, CheckpointError):
        # The path makes it differ from the settings of all other adapters, which may be the same or not.
        return {name_adapter_setting(NAME): f"{path} cannot be read"}

    try:
        content = parse_json_object(raw, path, "", "")
    except CheckpointError:
        return {name_adapter_setting(NAME): raw}

    settings = {}
    for key in sorted(content.keys() - _WITHOUT_INFLUENCE):
        text = _write_value(key, content[key])
        if text not in _DEFAULTS.get(key, _OFF):
            settings[name_adapter_setting(key)] = _shorten(text)
    return settings


def _write_value(key: str, value: Any) -> str:
    """Return the JSON of a setting, which is equal for values with one meaning."""
    import json  # only for checkpoints of adapters

    if key == "layers_to_transform" and type(value) is int:
        value = [value]
    if key in _UNORDERED and isinstance(value, list):
        value = sorted(value, key=json.dumps)
    # Only a number ends like this, not a text or a list.
    return json.dumps(value).removesuffix(".0")


def _shorten(text: str) -> str | bytes:
    """Return a long text as bytes, of which a comparison keeps the digest."""
    return text if len(text) <= _LONGEST else text.encode()
