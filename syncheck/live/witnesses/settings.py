"""The witness of settings: equal gradients lead to equal steps only if the settings of the optimizer are equal.

Watched: the values of the parameter groups (learning rate, weight decay, betas and so on), `requires_grad`, the
training flags of modules, the momentum of BatchNorm, the switches of `torch.backends`, the versions of torch and CUDA,
and the environment variables that change numbers.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from syncheck.live.witnesses.rules import Seen
from syncheck.live.witnesses.witness import Suspicion, Witness, find_minority

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.live.witnesses.witness import Ask
    from syncheck.sentences import Message

_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHINDUCTOR_FLAGS",
)  # fmt: skip
_MOST_FACTS = 4
_PLAIN = (type(None), bool, int, float, str)
# Characters of a value in a record.
_LENGTH = 80


class SettingsWitness(Witness):
    """The settings that this rank steps with."""

    name: ClassVar[str] = "settings"
    key: ClassVar[str] = "s"

    def __init__(self) -> None:
        super().__init__()
        self._program = _read_program()

    def observe(self, key: str, layout: Any) -> str:
        """Return the digest of the settings of a step, and keep them."""
        settings = {**self._program, **_read_switches(), **_read_groups(layout), **_read_model(layout)}
        self._keep(key, settings)
        return hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()

    def judge(self, _layout: Any, observations: Mapping[int, Any], ask: Ask) -> list[Suspicion]:
        """Return SYN107 if the settings of the ranks differ."""
        if len(set(observations.values())) < 2:
            return []
        settings = ask()
        if len(settings) < len(observations):
            return [Suspicion("SYN107", find_minority(observations), (Seen.SETTINGS(),))]
        facts = _list_differing(settings)
        shown = facts[:_MOST_FACTS]
        if len(facts) > len(shown):
            shown.append(Seen.MORE_SETTINGS(count=len(facts) - len(shown)))
        return [Suspicion("SYN107", find_minority(observations), tuple(shown))]


def _list_differing(settings: Mapping[int, Mapping[str, str]]) -> list[Message]:
    """Return one fact for each setting that differs between ranks."""
    names = set().union(*settings.values())
    facts = []
    for name in sorted(names):
        values = {rank: settings[rank].get(name, "absent") for rank in sorted(settings)}
        if len(set(values.values())) > 1:
            facts.append(Seen.SETTING(name=name, values=values))
    return facts


def _read_groups(layout: Any) -> dict[str, str]:
    """Return the values of the parameter groups, without their parameters."""
    settings = {}
    for number, group in enumerate(layout.optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names"):
                settings[f"param_groups.{number}.{name}"] = _write_value(value)
    return settings


def _write_value(value: Any) -> str:
    """Return the text of a value that is equal on all ranks for equal values: no address, and no device."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_write_value, value))})"
    if isinstance(value, _PLAIN):
        return repr(value)[:_LENGTH]
    # A learning rate may be a tensor; one on a GPU would have to wait for the GPU.
    device = getattr(value, "device", None)
    if getattr(device, "type", "") == "cpu":
        return repr(value.tolist())[:_LENGTH]
    return type(value).__name__


def _read_model(layout: Any) -> dict[str, str]:
    """Return what counts of the modules: frozen parameters, modules in evaluation mode, momentum of BatchNorm."""
    parameters = zip(layout.names, layout.parameters, strict=True)
    frozen = [name for name, parameter in parameters if not parameter.requires_grad]
    modules = layout.list_modules()
    evaluating = [name for name, module in modules if not module.training]
    momentum = [str(getattr(module, "momentum", None)) for _, module in modules if hasattr(module, "running_mean")]
    return {
        "frozen parameters": _join(frozen),
        "modules in evaluation mode": _join(evaluating),
        "momentum of BatchNorm": _join(momentum),
    }


def _join(texts: list[str]) -> str:
    """Return a list as one short text, equal only for equal lists."""
    text = ", ".join(texts)
    if len(text) <= _LENGTH:
        return text or "none"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_LENGTH]}... ({len(texts)}, digest {digest})"


def _read_program() -> dict[str, str]:
    """Return what stays the same in a process: versions, and environment variables that change numbers."""
    torch: Any = sys.modules["torch"]
    settings = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    for name in _ENVIRONMENT:
        settings[f"environment {name}"] = os.environ.get(name, "not set")
    return settings


def _read_switches() -> dict[str, str]:
    """Return the switches of torch that change numbers; a script may set them at any time."""
    torch: Any = sys.modules["torch"]
    cudnn = torch.backends.cudnn
    return {
        "torch.backends.cudnn.deterministic": str(cudnn.deterministic),
        "torch.backends.cudnn.benchmark": str(cudnn.benchmark),
        "torch.get_float32_matmul_precision()": _read_precision(torch),
        "torch.are_deterministic_algorithms_enabled()": str(torch.are_deterministic_algorithms_enabled()),
    }


def _read_precision(torch: Any) -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        # torch refuses to read it if a script has set the precision in the newer way.
        return "set by fp32_precision"
