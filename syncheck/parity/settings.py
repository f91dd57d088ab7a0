"""The settings of the optimizer by parameter, as texts. One step does not show all of them: betas, momentum."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.parity.program import LocalTensor

    Settings = Mapping[str, Mapping[str, str]]

# The parameters of a group, the notes of schedulers, implementations of the same step, and names of what a step shows.
_IGNORED = frozenset("params initial_lr foreach fused capturable differentiable maximize".split())
# A right update shows these settings, whatever the groups of a program that computes them itself contain.
_SHOWN = frozenset(("lr", "weight_decay", "class", "decoupled_weight_decay"))


class Difference(NamedTuple):
    """A setting with its value in one process and in the program."""

    setting: str
    expected: str
    found: str


def list_settings(optimizer: Any, parameters: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the settings of each parameter in the groups of an optimizer; empty without groups of these parameters.

    The class of the optimizer counts as a setting.

    parameters: by name.
    """
    settings_by_id: dict[int, dict[str, str]] = {}
    # ZeroRedundancyOptimizer and wrappers of libraries contain the optimizer that steps.
    inner = getattr(optimizer, "optim", getattr(optimizer, "optimizer", optimizer))
    for group in getattr(optimizer, "param_groups", ()):
        texts = {"class": type(inner).__name__}
        for setting in sorted(group.keys() - _IGNORED):
            texts[setting] = write_setting(group[setting])
        settings_by_id.update(dict.fromkeys(map(id, group["params"]), texts))
    settings = {}
    for name, parameter in parameters.items():
        # An optimizer may have parameters of its own instead, for example in another precision.
        if id(parameter) in settings_by_id:
            settings[name] = settings_by_id[id(parameter)]
    return settings


def write_setting(value: Any) -> str:
    """Return the text of a setting; equal for equal numbers of another type, and for tensors of one element."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(write_setting, value))})"
    # The float32 nearest to 0.9 is 0.9 here.
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:.6g}" if is_number else str(value)


def list_compared(expected: Settings, found: Settings) -> tuple[str, ...]:
    """Return the settings that both optimizers have of a common parameter, without those that a step shows."""
    compared: dict[str, None] = {}
    for name in expected.keys() & found.keys():
        common = expected[name].keys() & found[name].keys()
        compared.update(dict.fromkeys(common - _SHOWN))
    return tuple(sorted(compared))


def compare_settings(
    expected: Settings, found: Settings, tensors: Mapping[str, LocalTensor], wrong: Mapping[str, Any]
) -> dict[Difference, list[str]]:
    """Return the names of the parameters by each difference of their settings.

    wrong: parameters whose update is wrong.
    """
    differences: dict[Difference, list[str]] = defaultdict(list)
    for name in sorted(expected.keys() & found.keys()):
        for setting, text in expected[name].items():
            difference = Difference(setting, text, found[name].get(setting, text))
            if difference.found != text:
                differences[difference].append(name)
    right = tensors.keys() - wrong.keys()
    # Weight decay of zero changes nothing, as with new biases.
    decayed = {name for name in right if tensors[name].before.any()}
    # Another class may make the same step, for example with a weight decay of zero.
    alike = set() if wrong else right
    shown = {"lr": right, "weight_decay": decayed, "class": alike, "decoupled_weight_decay": alike}
    for difference in list(differences):
        # The program decays or scales in another way, with the same result.
        if not shown.get(difference.setting, set()).isdisjoint(differences[difference]):
            del differences[difference]
    return dict(differences)
