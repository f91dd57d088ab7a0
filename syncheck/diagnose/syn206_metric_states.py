"""States of metrics in the checkpoint differ: each rank accumulates its own batches until they are reduced.

Signature: the differing tensors belong to modules that hold nothing but states of metrics, by their names: the counts
`tp`, `fp`, `tn` and `fn`, `mean_value`, `sum_squared_error` and `total`, `confmat`, lists `value.0`, `value.1` and so
on. No optimizer trains them. Lists may be longer on some ranks, which had more batches.

Cause: torchmetrics adds up a metric on each rank, and `compute()` reduces the sums over the ranks for its result only.
States that are persistent are part of the state dict, so the checkpoint of each rank has its own.

Fix: leave the states out of checkpoints (`metric.persistent(False)`, the default), or reset the metrics before saving
(`metric.reset()`). A resumed run that needs the states should load a rank's own states.

A name does not show who writes a tensor, so the finding is only consistent with this cause.

Incidents: Lightning-AI/pytorch-lightning#3728 and #4482 (states of metrics in checkpoints).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, select_codes, state_if
from syncheck.diagnose.features import with_reason
from syncheck.diagnose.history import suspects
from syncheck.diagnose.selection import ends_with_number, last_part, list_names, module_of
from syncheck.frozen import mutable_record
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN206"
SLUG = "metric-states"
SEVERITY = "warning"
CERTAINTY = "consistent"

# Names of states that hardly anything but a metric has.
_TELLTALE = frozenset(
    "tp fp tn fn confmat mean_value sum_value sum_squared_error sum_abs_error sum_error "
    "sum_abs_per_error sum_squared_log_error sum_log_cosh_error corr_xy true_positives false_positives false_negatives "
    "iou_sum detection_scores groundtruth_labels real_features_sum fake_features_sum total_num_edits sum_pesq sum_stoi "
    "sum_sdr sum_si_sdr sum_snr sum_si_snr total_log_probs num_scores sum_scores".split()
)
# Names of states of metrics that other modules use too: a module with several of them, and nothing else, is a metric.
_STATES = _TELLTALE | frozenset(
    "total weight correct count preds target value score measures errors similarity labels indexes confidences "
    "accuracies max_value min_value target_total preds_total num_elements numel residual num_batches num_obs "
    "num_observations n_total mean_x mean_y var_x var_y max_abs_dev_x max_abs_dev_y sum_target sum_squared_target "
    "target_squared misses hits false_alarms rmse_val_sum real_features_cov_sum real_features_num_samples "
    "fake_features_cov_sum fake_features_num_samples total_images detection_labels detection_box detection_mask "
    "groundtruth_box groundtruth_mask groundtruth_crowds groundtruth_area samples n_samples total_tgt_len preds_len "
    "target_len support".split()
)
_BOUNDS = frozenset({"max_value", "min_value"})
# Names of lists of batches.
_LISTS = frozenset("value preds target score measures".split())


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "These are states of metrics: each rank adds up its own batches, until compute() reduces the sums over the "
        "ranks. They are not part of the model."
    )
    FIX = (
        "Leave the states out of checkpoints: `metric.persistent(False)`. Or reset the metric on every rank before "
        "saving: `metric.reset()`. Or load each rank's own states when resuming."
    )
    STATES = "The ranks have different values in {count:count state} of the metrics {modules:names 4}"
    LENGTHS = "{count:count state} {count:verb is|are} in the files of some ranks only, which had more batches"


@mutable_record
class _States:
    """The names of the states of a module."""

    names: set[str] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)
    """The names of states that are lists of batches."""

    def add(self, state: _State) -> None:
        """Add a state of the module."""
        self.names.add(state.name)
        if state.is_item:
            self.lists.add(state.name)

    @property
    def is_certain(self) -> bool:
        """Whether hardly anything but a metric has one of the names."""
        return not (self.names.isdisjoint(_TELLTALE) and self.lists.isdisjoint(_LISTS))

    @property
    def is_metric(self) -> bool:
        """Whether the names are those of a metric, if the module has no other tensor."""
        # A layer with an observer has both bounds, but a metric has one.
        if self.names <= _BOUNDS:
            return len(self.names) == 1
        has_several = len(self.names - {"weight"}) > 1
        return has_several or self.is_certain


class _State(NamedTuple):
    """The name of a tensor as that of a state of a metric."""

    module: str
    name: str
    is_item: bool
    """Whether the tensor is an item of a list of batches."""


def _find_states(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing states of metrics."""
    metrics = _find_differing_metrics(case)
    return tuple(diff for diff in case.tensors if _module_of(diff.name) in metrics)


@requires(_find_states)
def apply(case: Case) -> Match | None:
    """Match the differing states of metrics."""
    tensors = _find_states(case)
    modules = map(_module_of, list_names(tensors))
    missing = with_reason(tensors, "missing")
    return Match(
        tensors,
        ranks=suspects(tensors, case.group),
        facts=[
            Text.STATES(count=len(tensors), modules=tuple(dict.fromkeys(modules))),
            *state_if(missing, Text.LENGTHS(count=len(missing))),
        ],
        alternatives=select_codes({"SYN205": True, "SYN101": missing}),
    )


def _find_differing_metrics(case: Case) -> frozenset[str]:
    """Return the modules that are metrics, by their names and by the sizes of their differing tensors."""
    # Elements of larger tensors may belong to a layer with the same names.
    large_modules = {_module_of(diff.name) for diff in case.tensors if not _is_number(diff)}
    metrics = set()
    for module, states in _find_metrics(case).items():
        has_numbers_alone = module not in large_modules
        if states.is_certain or has_numbers_alone:
            metrics.add(module)
    return frozenset(metrics)


def _find_metrics(case: Case) -> dict[str, _States]:
    """Return the modules that hold states of metrics only, with their states."""
    # An optimizer trains no state of a metric, whatever its name is.
    untrained = case.names_of("parameter", "buffer") - (case.optimized or frozenset())
    states_of: dict[str, _States] = defaultdict(_States)
    other_modules = set()
    for name in case.group.evidence.names:
        state = _split(name)
        if name in untrained and _is_of_metric(state):
            states_of[state.module].add(state)
        else:
            other_modules.add(module_of(name))

    # A module with other tensors is no metric.
    candidates = states_of.keys() - other_modules
    return {module: states_of[module] for module in candidates if states_of[module].is_metric}


def _is_of_metric(state: _State) -> bool:
    """Whether a metric has states of this name. The tensors of the model itself are no states of a metric."""
    has_module = bool(state.module)
    return has_module and state.name in _STATES


def _is_number(diff: TensorDiff) -> bool:
    """Whether a tensor is a single number or counts."""
    return diff.numel == 1 or diff.dtype.startswith(("int", "uint"))


def _split(name: str) -> _State:
    """Return the module and the state of a tensor, and whether the tensor is an item of a list."""
    is_item = ends_with_number(name)
    state = module_of(name) if is_item else name
    return _State(module_of(state), last_part(state), is_item)


def _module_of(name: str) -> str:
    """Return the module of a state."""
    return _split(name).module
