"""Classify Python values of a checkpoint by their names and by the other keys of their containers.

The classes determine which values count as out of sync, and how they are compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.snapshots import Membership
from syncheck.tensors.names import is_rng_state

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from syncheck.records import ValueKind
    from syncheck.snapshots import Snapshot

_DIGEST = 16  # bytes

# Last name segments of values that differ between ranks by design.
_OWN = frozenset(
    "rank local_rank global_rank node_rank process_rank dp_rank tp_rank pp_rank ep_rank cp_rank mp_rank host hostname "
    "nodename node_id device device_id device_index gpu gpu_id cuda_device pid process_id process_index "
    "local_process_index ip ip_address time timestamp wall_time elapsed_time "
    "prev_loss".split()  # LBFGS stores the loss of the rank's own batch
)
# The text of a torch.device.
_DEVICE = r"[a-z]+(?::\d+)?"
# Like _OWN, in attributes of modules, which often say whose rank or device it is.
_OWN_ATTRIBUTE = r"(?:\w+_)?(?:rank|device|device_id|device_index|hostname|pid)"
# Names of the values about the order of registration. Their values are the names that are not at the same positions.
ORDERS = ("(order of parameters)", "(order of buffers)")
# The last part of the names of the values with the submodules of pickled modules. In containers they have an order.
MODULES = "(modules)"
# The last part of the names of the values about modes of modules and `requires_grad`.
TRAINING, REQUIRES_GRAD = "training", "requires_grad"
# Marks the states of metrics, which are sums of one rank until `compute()`.
METRIC = "(metric) "
# Keys of loss-scaler states in torch, apex, DeepSpeed and Megatron; SCALES are the names of the scale itself.
_SCALER_KEYS = frozenset(
    "growth_factor backoff_factor growth_interval _growth_tracker growth_tracker hysteresis_tracker unskipped "
    "last_overflow_iter".split()
)
SCALES = frozenset("scale _scale loss_scale cur_scale".split())
# The states of LBFGS, which are Python numbers and lists, and the entries of the lists.
_LBFGS = r"(?s)optimizer\..*\.(?:n_iter|func_evals|prev_loss|d|t|h_diag|old_dirs|old_stps|ro|al)(?:\.\d+)?"
# The names, or the positions, of the parameters of an optimizer's parameter group.
_MEMBERSHIP = r"(?s)optimizer\.(?:.*\.)?param_groups\.[^.]*\.(?:params|\(positions\))"
# Keys of learning-rate scheduler states. Two of them identify a scheduler.
_SCHEDULER_KEYS = frozenset("last_epoch _step_count _get_lr_called_within_step num_bad_epochs cooldown_counter".split())
SETTINGS = frozenset("lr learning_rate weight_decay betas momentum".split())
# Words of the names of counts.
_WORD = (
    "global|current|cur|total|train|training|trained|last|start|resume|n|num|run|taken|done|completed|finished|seen|"
    "so_far|in_epoch|this_epoch|count|counter|idx|index|number|micro|opt|optim|optimizer|optimization|gradient|grad|decay|inner|outer"
)
_PROGRESS = (
    rf"_*(?:(?:{_WORD})_)*(?:(?:step|epoch|iter|iteration|update)s?|it)(?:_(?:{_WORD}))*|global_samples|"
    r"consumed_(?:train_)?samples|(?:global_|current_|cur_)?batch|batch_(?:idx|index)|_?batches_(?:seen|done|that_stepped)"
)
# Lightning's progress counters, as in `loops.fit_loop.epoch_progress.current.completed`.
_LOOP_COUNTS = frozenset("ready started processed completed".split())
# Words in the names of values that describe the run and not the model.
_LOGGED = frozenset(
    "loss losses acc accuracy error errors score scores perplexity ppl metric metrics time date note notes comment "
    "version format info path".split()
)
# Last words of the names of parameters and constants of a model, whatever is before: `loss_weight`, `time_scale`.
_OF_MODEL = frozenset(
    "scale scales weight weights bias biases embedding embeddings embed factor factors coef coefs coefficient shift "
    "offset gain alpha beta gamma temperature tau margin threshold mask init".split()
)


def _match_container(words: str) -> str:
    """Return a pattern that finds words in the names of the containers of a value."""
    return rf"(?s)(?<![a-z])(?:{words.replace(' ', '|')})(?![a-z]).*\."


# Containers of logs or of each rank's own data, of the user's configuration, and of averaged models.
_IN_LOG = _match_container(
    "callbacks callback metrics metric meters meter log logs logger loggers results loader dataloader dataloaders "
    "sampler dataset data val valid validate validation eval evaluation test predict best stats profiler"
)
_IN_CONFIGURATION = _match_container("args cfg config conf hparams hyper")
_IN_AVERAGE = _match_container("ema swa average averaged averager")


class _Rule(NamedTuple):
    """A rule about the name of a value. The first rule that applies determines the kind.

    kind: of the value.
    pattern: searched in the name in lower case.
    containers: the field of `_Containers` with containers to which the rule applies, too.
    """

    kind: ValueKind
    pattern: str
    containers: str = "none"


_RULES = (
    _Rule("counter", r"^optimizer\.(?:.*\.)?step$|(?:^|\.)param_groups\.(?:.*\.)?step$"),
    _Rule("setting", r"(?:^|\.)param_groups(?:\.|$)"),
    _Rule(
        "scaler",
        r"scaler|_amp_|(?:^|\.)amp(?:_|\.|$)|_amp(?:\.|$)|(?:^|\.)(?:loss_scale|skipped_steps)(?:\.|$)",
        "scalers",
    ),
    _Rule("setting", r"^optimizer(?:\.|$)|scheduler|(?:^|_|\.)sched(?:_|\.|$)", "schedulers"),
    _Rule("other", _IN_LOG),
    _Rule("setting", rf"(?:^|\.)(?:{'|'.join(SETTINGS)})$"),
    _Rule("other", _IN_CONFIGURATION),
)
_SEEDS = frozenset({"seed", "seeds"})
# Keys of averaged copies in torch-ema and diffusers, beside their decay.
_AVERAGE_COUNTS = frozenset("num_updates optimization_step".split())


def differs_by_design(name: str) -> bool:
    """Whether a value differs between ranks by design: a rank, host, device, time, or RNG state."""
    parts = name.split(".")
    if parts[-1].lower() in _OWN:
        return True

    return is_rng_state(parts)


def is_of_rank(name: str, value: Any, *, certain: bool) -> bool:
    """Whether a value of a model belongs to the rank and may differ.

    name: with the names of the containers.
    certain: whether the value is in a state dict or an extra state. There, a name such as `rank` or `time` has a
    meaning of its own (the rank of an adapter), but RNG states and devices belong to the rank.
    """
    # Attributes of modules have names like `rank` for what belongs to the rank.
    if not certain:
        return differs_by_design(name)

    parts = name.split(".")
    is_device = parts[-1].lower() == "device" and isinstance(value, str)
    if is_device and re.fullmatch(_DEVICE, value):
        return True

    return is_rng_state(parts)


@lru_cache(maxsize=4096)  # live checks repeat the same names
def is_own_name(key: str) -> bool:
    """Whether an attribute or key is named after something of the rank itself, for example `_local_rank`."""
    plain = key.lower().strip("_")
    if plain in _OWN or re.fullmatch(_OWN_ATTRIBUTE, plain):
        return True

    return is_rng_state((plain,))


def is_aside(name: str) -> bool:
    """Whether a value beside tensors describes the run: in a container of logs or settings, or a loss, time or note."""
    lowered = name.lower()
    if in_configuration(name):
        return True

    if re.search(_IN_LOG, lowered):
        return True

    words = re.findall(r"[a-z]+", lowered.rpartition(".")[2])
    if words and words[-1] in _OF_MODEL:
        return False

    return not _LOGGED.isdisjoint(words)


def in_configuration(name: str) -> bool:
    """Whether a value is in a container of the user's settings, for example `args.lr`."""
    return re.search(_IN_CONFIGURATION, name.lower()) is not None


def is_lbfgs_state(name: str) -> bool:
    """Whether a value or tensor is a state of LBFGS, or an entry of its lists: `optimizer.0.ro.2`."""
    lowered = name.lower()
    if "param_groups" in lowered.split("."):
        return False

    return re.fullmatch(_LBFGS, lowered) is not None


def is_seed(name: str) -> bool:
    """Whether a value is the seed of a random generator."""
    last = name.lower().rpartition(".")[2]
    return not _find_words(last).isdisjoint(_SEEDS)


def _find_words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text))


class _Containers(NamedTuple):
    """Names of containers that are recognized by their keys.

    scalers: of loss scalers.
    schedulers: of learning-rate schedulers.
    averages: of averaged copies of the weights; the name is empty for the whole checkpoint.
    none: no containers, for rules about names alone.
    """

    scalers: set[str]
    schedulers: set[str]
    averages: set[str]
    none: frozenset[str] = frozenset()


# Many checkpoints have no values, and others have a hundred thousand.
@cache
def _compile_rules() -> list[re.Pattern[str]]:
    return [re.compile(rule.pattern) for rule in _RULES]


def make_value_classifier(names: Iterable[str]) -> Callable[[str], ValueKind]:
    """Return a function that classifies the values of a checkpoint. names: all of them, to recognize containers."""
    recognized = _recognize_containers(names)

    def kind_of(name: str) -> ValueKind:
        if is_lbfgs_state(name):
            return "counter"

        lowered = name.lower()
        containers = list_containers(name)
        for rule, pattern in zip(_RULES, _compile_rules(), strict=True):
            if pattern.search(lowered):
                return rule.kind

            recognized_containers = getattr(recognized, rule.containers)
            if not containers.isdisjoint(recognized_containers):
                return rule.kind

        if not _is_count(lowered.split(".")):
            return "other"

        container = name.rpartition(".")[0]
        if container in recognized.averages:
            return "average"

        if re.search(_IN_AVERAGE, lowered):
            return "average"

        return "progress"

    return kind_of


def _recognize_containers(names: Iterable[str]) -> _Containers:
    """Return the containers of the values of a checkpoint whose keys only scalers, schedulers or averages have."""
    keys_of: dict[str, set[str]] = defaultdict(set)
    for name in names:
        container, _, key = name.rpartition(".")
        keys_of[container].add(key)

    averages = _find_containers(keys_of, {"decay"}, _AVERAGE_COUNTS)
    # The values at the top of a checkpoint belong to several objects.
    keys_of.pop("", None)
    schedulers = {container for container, keys in keys_of.items() if len(keys & _SCHEDULER_KEYS) > 1}
    scalers = _find_containers(keys_of, _SCALER_KEYS, SCALES)
    return _Containers(scalers, schedulers, averages)


def _find_containers(keys_of: Mapping[str, set[str]], *required: Collection[str]) -> set[str]:
    """Return the containers with at least one of the keys of each set. keys_of: by container."""
    containers = set(keys_of)
    for keys in required:
        containers -= {container for container in containers if keys_of[container].isdisjoint(keys)}

    return containers


def list_containers(name: str) -> set[str]:
    """Return the names of the containers of a value: `a` and `a.b` for `a.b.c`."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _is_count(parts: list[str]) -> bool:
    if re.fullmatch(_PROGRESS, parts[-1]):
        return True

    if parts[-1] not in _LOOP_COUNTS:
        return False

    return any(part.endswith("progress") for part in parts[:-2])


def is_membership(name: str) -> bool:
    """Whether a value lists the parameters of an optimizer's parameter group."""
    return re.fullmatch(_MEMBERSHIP, name) is not None


def has_counted_values(snapshot: Snapshot) -> bool:
    """Whether a checkpoint has Python values whose differences count as out of sync."""
    values = select_counted_values(snapshot).values()
    return any(value is not None for value in values)


def select_counted_values(snapshot: Snapshot) -> dict[str, Any]:
    """Return the Python values of a checkpoint whose differences count as out of sync."""
    values = values_of(snapshot)
    kind_of = make_value_classifier(values)
    selected = {}
    for name, value in values.items():
        membership = snapshot.model_values.get(name)
        if membership is not None:
            is_certain = membership is Membership.MODEL
            if not is_of_rank(name, value, certain=is_certain):
                selected[name] = to_comparable(value)

            continue

        # Values of an unknown meaning are only listed.
        if kind_of(name) != "other" and not differs_by_design(name):
            selected[name] = value

    return selected


def stores_progress(snapshot: Snapshot) -> bool:
    """Whether a checkpoint stores its step or epoch."""
    return _has_kind("progress", values_of(snapshot))


def counts_updates(snapshot: Snapshot) -> bool:
    """Whether a checkpoint stores how often an averaged copy of the weights was updated, as a number."""
    return _has_kind("average", snapshot.values)


def _has_kind(kind: ValueKind, values: Mapping[str, Any]) -> bool:
    kind_of = make_value_classifier(values)
    present = [name for name, value in values.items() if value is not None]
    return any(kind_of(name) == kind for name in present)


def values_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return the values of a checkpoint. Step and epoch of the metadata are defaults."""
    values: dict[str, Any] = {}
    for name in ("step", "epoch"):
        number = getattr(snapshot.metadata, name, None)
        if number is not None:
            values[name] = number

    values.update(snapshot.values)
    return values


def to_comparable(value: Any) -> Any:
    """Return a value as fingerprints store it: the length and the digest of bytes."""
    if not isinstance(value, (bytes, bytearray)):
        return value

    from hashlib import blake2b  # loads OpenSSL, and few checkpoints hold bytes

    digest = blake2b(value, digest_size=_DIGEST).hexdigest()
    return f"{len(value)} bytes, blake2b-128 {digest}"
