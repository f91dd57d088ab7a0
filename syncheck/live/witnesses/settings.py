"""The witness of settings: equal gradients lead to equal steps only if the settings of the optimizer are equal.

Watched: the class of the optimizer, the values of the parameter groups (learning rate, weight decay, betas and so on),
`requires_grad`, the training flags of modules, the momentum of BatchNorm, the scale of a GradScaler, the switches of
`torch.backends`, the versions of torch and CUDA, and the environment variables that change numbers.

Ranks without a wrapper may train separate models with separate settings. Only copies, as shown by gradients or
parameters, are compared then.
"""

from __future__ import annotations

import hashlib
import os
import sys
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from syncheck.live.witnesses.copies import COPIES
from syncheck.live.witnesses.learned_sets import LearnedSets
from syncheck.live.witnesses.rules import SETTINGS_DIFFER, Seen
from syncheck.live.witnesses.witness import Suspicion, Witness, find_minority

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.live.witnesses.witness import Ask
    from syncheck.sentences import Message

_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHINDUCTOR_FLAGS",
)  # fmt: skip
_MOST_FACTS = 4
# The root of all modules has an empty name.
_ROOT = "the model"
# Before the number of a group, and before a value of the scaler.
_GROUPS = "param_groups."
_OF_SCALER = "scaler."
_SCALE = "scaler.scale"
_SCALER = "_SCALER"
_CLASS = "class of the optimizer"
# The value of a missing setting.
_ABSENT = "absent"
# Names of settings of the model.
_FROZEN = "frozen parameters"
_EVALUATING = "modules in evaluation mode"
_MOMENTUM = "momentum of BatchNorm"
# By the first part of the name; each kind changes more than the next one.
_KIND_OF_NAMES = {
    _CLASS: "",
    "param_groups": "",
    "scaler": _SCALER,
    _FROZEN: "_GRADIENTS",
    _EVALUATING: "_MODES",
    _MOMENTUM: "_STATISTICS",
}
_KINDS = (*dict.fromkeys(_KIND_OF_NAMES.values()), "_ROUNDING", "_PROGRAM")
# The causes of unequal gradients that a division by unequal scales looks like.
_CAUSES_OF_SCALES = {("SYN410", variant): _SCALER for variant in ("", "_SCALED", "_SAMPLED")}
# What else is found if a rank is at another step.
_OF_OTHER_STEPS = ("SYN214", "SYN410")
_UNCOUNTED = "_UNCOUNTED"
# Keys of groups that are no options.
_NO_OPTIONS = frozenset({"params", "param_names"})
# Values of groups that choose the implementation of a step.
_IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_PLAIN = (type(None), bool, int, float, str)
# Characters of a value in a record.
_LENGTH = 80


class SettingsWitness(Witness):
    """The settings that this rank steps with."""

    name: ClassVar[str] = "settings"
    key: ClassVar[str] = "s"
    spans_parts: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._program = _read_program()
        self.leader: Any = None
        """The witness of gradients, whose sets of copies count first; None without the witness."""
        self.follower: Any = None
        """The witness of parameters, whose sets of copies count otherwise; None without the witness."""
        # The switches, groups, scaler and model of the last step of each layout, and their settings with the digest.
        self._last: dict[str, tuple[Any, Any]] = {}

    def observe(self, key: str, layout: Any) -> str:
        """Return the digest of the settings of a step, and keep them."""
        state = (_read_switches(layout), _read_groups(layout), _read_scaler(layout), _read_model(layout))
        last_state, result = self._last.get(layout.key, (None, None))
        # They are the same at most steps.
        if state != last_state:
            switches, groups, scaler, model = state
            settings = {**self._program, **switches, **groups, **scaler, **_describe_model(layout, model)}
            result = settings, hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()
            self._last[layout.key] = state, result
        settings, digest = result
        self._keep(key, settings)
        return str(digest)

    def join_parts(self, layout: Any, sets: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return all ranks together if they hold shards of other shapes of the same parameters, as with FSDP1."""
        return [sorted(chain(*sets))] if _is_flattened(layout) else sets

    def list_sets(self, layout: Any, observations: Mapping[int, Any]) -> Sequence[tuple[int, ...]]:
        """Return all ranks of a wrapper or of a sharded model; otherwise the ranks with known copies."""
        are_together = (layout.clock.reduces, layout.sharded, _is_flattened(layout))
        if any(are_together):
            return super().list_sets(layout, observations)
        sets: list[tuple[int, ...]] = []
        for witness in (self.follower, self.leader):
            learned = getattr(witness, "learned", {}).get(f"{layout.key}/{COPIES}", LearnedSets())
            sets = learned.sets or sets
        return sets

    def judge(self, layout: Any, observations: Mapping[int, Any], ask: Ask) -> list[Suspicion]:
        """Return SYN107 if the settings of the ranks differ."""
        if len(set(observations.values())) < 2:
            return []
        answers = ask()
        # Other ranks answer, too.
        settings = {rank: answers[rank] for rank in observations if rank in answers}
        suspects = find_minority(observations)
        if len(settings) < len(observations):
            unknown = Suspicion(
                SETTINGS_DIFFER,
                suspects,
                facts=(Seen.SETTINGS(),),
                affected=(),
            )
            return [unknown]
        return [
            _suspect(layout, suspects, kind, facts) for kind, facts in _sort_by_kind(_list_differing(settings)).items()
        ]


def _suspect(layout: Any, suspects: tuple[int, ...], kind: str, differing: Mapping[str, Message]) -> Suspicion:
    """Return SYN107 for the differing settings of one kind: each kind has its own cause and fix."""
    facts = list(differing.values())[:_MOST_FACTS]
    if len(differing) > len(facts):
        facts.append(Seen.MORE_SETTINGS(count=len(differing) - len(facts)))
    affected = _find_affected(layout, differing)
    return Suspicion(
        SETTINGS_DIFFER,
        suspects,
        facts=tuple(facts),
        variant=kind,
        affected=affected,
    )


def _sort_by_kind(differing: Mapping[str, Message]) -> dict[str, dict[str, Message]]:
    """Return the facts about settings by kind, the kind that changes most first."""
    facts_by_kind: dict[str, dict[str, Message]] = {}
    for name, fact in differing.items():
        facts_by_kind.setdefault(_find_kind(name), {})[name] = fact
    return {kind: facts_by_kind[kind] for kind in _KINDS if kind in facts_by_kind}


def _find_kind(name: str) -> str:
    """Return the kind of a setting, as the suffix of the sentences for its cause and fix."""
    if name.split(".")[-1] in _IMPLEMENTATIONS:
        return "_ROUNDING"
    return _KIND_OF_NAMES.get(name.split(".")[0], "_PROGRAM")


def relate(suspicions: Sequence[Suspicion], layout: Any) -> list[Suspicion]:
    """Return the suspicions of one step of a layout, which may be causes of each other."""
    return refer_to_scales(doubt_settings(suspicions, layout))


def refer_to_scales(suspicions: Iterable[Suspicion]) -> list[Suspicion]:
    """Return the suspicions of one step, unequal scales first: they are a cause of unequal gradients."""
    causes = _CAUSES_OF_SCALES if any(map(_has_scales, suspicions)) else {}
    referring = []
    for suspicion in sorted(suspicions, key=_has_scales, reverse=True):
        variant = causes.get((suspicion.code, suspicion.variant), suspicion.variant)
        referring.append(suspicion._replace(variant=variant))
    return referring


def doubt_settings(suspicions: Sequence[Suspicion], layout: Any) -> list[Suspicion]:
    """Return the suspicions of one step, with doubt in unequal settings if the ranks may be at different steps.

    Without a reduction that numbers the steps, a rank that skips a step has settings of an earlier step from then on,
    and also other gradients.
    """
    codes = {suspicion.code for suspicion in suspicions}
    is_doubtful = SETTINGS_DIFFER in codes and not codes.isdisjoint(_OF_OTHER_STEPS) and not layout.numbers_steps
    doubted = []
    for suspicion in suspicions:
        has_settings = (suspicion.code, suspicion.variant) == (SETTINGS_DIFFER, "")
        doubted.append(suspicion._replace(variant=_UNCOUNTED * is_doubtful) if has_settings else suspicion)
    return doubted


def _has_scales(suspicion: Suspicion) -> bool:
    """Whether a suspicion is that the scales differ; with other growth only, they do not yet."""
    return suspicion.variant == _SCALER and bool(suspicion.affected)


def _find_affected(layout: Any, settings: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the parameters in the groups of some settings: other settings need not change a step."""
    # All gradients are divided by the scale.
    if not {_SCALE, _CLASS}.isdisjoint(settings):
        return tuple(layout.names)
    groups = {name.split(".")[1] for name in settings if name.startswith(_GROUPS)}
    identities: set[int] = set()
    for number, group in enumerate(getattr(layout.optimizer, "param_groups", ())):
        if str(number) in groups:
            identities.update(map(id, group["params"]))
    is_affected = [id(parameter) in identities for parameter in layout.parameters]
    return tuple(compress(layout.names, is_affected))


def _list_differing(settings: Mapping[int, Mapping[str, str]]) -> dict[str, Message]:
    """Return one fact for each setting that differs between ranks, by its name."""
    names = set().union(*settings.values())
    facts = {}
    for name in sorted(names):
        values = {rank: settings[rank].get(name, _ABSENT) for rank in sorted(settings)}
        # If ranks lack a group, its options are no further differences.
        group, _, key = name.rpartition(".")
        is_absent = _ABSENT in values.values()
        # Options and implementations depend on the class, and no class must have all implementations.
        is_of_class = (_CLASS in facts, is_absent, key in _IMPLEMENTATIONS).count(True) > 1
        if len(set(values.values())) > 1 and group not in facts and not is_of_class:
            facts[name] = Seen.SETTING(name=name, values=values)
    return facts


def _read_groups(layout: Any) -> dict[str, str]:
    """Return the class of the optimizer, and the options of the parameter groups.

    A step reads no other keys, such as a name for the script, or `initial_lr`, from which a scheduler makes `lr`.
    """
    optimizer_class = type(layout.optimizer)
    settings = {_CLASS: f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"}
    defaults = getattr(layout.optimizer, "defaults", None)
    for number, group in enumerate(getattr(layout.optimizer, "param_groups", ())):
        settings[f"{_GROUPS}{number}"] = "present"
        # Some optimizers declare no options.
        for name in defaults or group:
            if name not in _NO_OPTIONS:
                settings[f"{_GROUPS}{number}.{name}"] = _write_value(group.get(name))
    return settings


def _is_flattened(layout: Any) -> bool:
    """Whether FSDP1 has made the parameters parts of flat ones, which the ranks divide."""
    # The inputs of tensor-parallel ranks belong to no parameter.
    return hasattr(next(iter(layout.parameters), None), "_fsdp_flattened")


def _read_scaler(layout: Any) -> dict[str, str]:
    """Return the scale and the growth of the GradScaler that steps; a disabled one has none.

    torch has read from the GPU whether gradients are finite, so the scale is there, except with a fused optimizer.
    """
    settings = {}
    for name, value in getattr(layout.scaler, "state_dict", dict)().items():
        settings[f"{_OF_SCALER}{name}"] = _write_value(value)
    # It counts steps, and changes the scale only later.
    settings.pop(f"{_OF_SCALER}_growth_tracker", None)
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


class _Model(NamedTuple):
    """The counted states of the modules of a layout, in their order."""

    frozen: list[bool]
    evaluating: list[bool]
    momentum: list[Any]
    """Of the modules with running statistics."""


def _read_model(layout: Any) -> _Model:
    """Return the frozen parameters, the modules in evaluation mode, and the momentum of BatchNorm."""
    modules = layout.list_modules()
    return _Model(
        frozen=[not parameter.requires_grad for parameter in layout.parameters],
        evaluating=[not module.training for _, module in modules],
        momentum=[getattr(module, "momentum", None) for _, module in modules if "running_mean" in module._buffers],  # noqa: SLF001
    )


def _describe_model(layout: Any, model: _Model) -> dict[str, str]:
    """Return the names of the counted states."""
    modules = [name or _ROOT for name, _ in layout.list_modules()]
    return {
        _FROZEN: _join(list(compress(layout.names, model.frozen))),
        _EVALUATING: _join(list(compress(modules, model.evaluating))),
        _MOMENTUM: _join(list(map(str, model.momentum))),
    }


def _join(texts: list[str]) -> str:
    """Return a list as one short text, equal only for equal lists."""
    text = ", ".join(texts)
    if len(text) <= _LENGTH:
        return text or "none"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_LENGTH]}... ({len(texts)}, digest {digest})"


def _read_program() -> dict[str, str]:
    """Return the constants of a process: versions, and environment variables that change numbers."""
    torch: Any = sys.modules["torch"]
    settings = {"torch.__version__": str(torch.__version__), "torch.version.cuda": str(torch.version.cuda)}
    for name in _ENVIRONMENT:
        settings[f"environment {name}"] = os.environ.get(name, "not set")
    return settings


def _read_switches(layout: Any) -> dict[str, str]:
    """Return the switches of torch for numbers; a script may set them at any time."""
    torch: Any = sys.modules["torch"]
    switches = {
        "torch.get_float32_matmul_precision()": _read_precision(torch),
        "torch.are_deterministic_algorithms_enabled()": str(torch.are_deterministic_algorithms_enabled()),
    }
    # A model on a CPU does not use cuDNN.
    if any(map(attrgetter("is_cuda"), layout.parameters)):
        cudnn = torch.backends.cudnn
        switches["torch.backends.cudnn.deterministic"] = str(cudnn.deterministic)
        switches["torch.backends.cudnn.benchmark"] = str(cudnn.benchmark)
    return switches


def _read_precision(torch: Any) -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        # torch refuses to read it if a script has set the precision in the newer way.
        return "set by fp32_precision"
