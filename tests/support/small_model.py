"""A small model whose parameters and optimizer state differ in size and direction."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from support import cases
from syncheck.records import Evidence, Group, TensorDiff, ValueDiff

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MODEL = {"conv.weight": 36, "bn.weight": 4, "bn.bias": 4, "fc.weight": 40, "fc.bias": 10}
RANDOM = ("conv.weight", "fc.weight", "fc.bias")  # randomly initialized parameters
ADAM, SGD = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)
DECAY = {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9}  # wd / (1 - momentum) is 0.005
HALF = ValueDiff("optimizer.param_groups.0.lr", {0: 0.1, 1: 0.05}, counts=True, kind="setting")


def make_diff(name: str, kind: str = "parameter", ranks: int = 2, odd: Any = None, **given: Any) -> TensorDiff:
    """Return a TensorDiff with differences in every element.

    odd: ranks that differ from all other ranks, by default the last rank; () for all ranks. cosine, norms, values,
    smaller: fields of the evidence, which is None without any of the fields.
    """
    single = (ranks - 1,) if odd is None else tuple(odd) or tuple(range(ranks))
    equal = tuple(rank for rank in range(ranks) if rank not in single)
    sets = ((equal,) if equal else ()) + tuple((rank,) for rank in single)
    numel = next((size for part, size in MODEL.items() if part in name), 8)
    evidence = {key: given.pop(key) for key in ("cosine", "norms", "values", "smaller") if key in given}
    fields = {"mismatched": numel, "numel": numel, "shape": (numel,), "index": None}
    fields["evidence"] = Evidence(**evidence) if evidence else None
    return replace(cases.diff(name, kind, sets), **fields | given)


def by_digest(diff: TensorDiff) -> TensorDiff:
    """Return the tensor as a comparison of digests reports it."""
    return replace(diff, **cases.DIGEST, evidence=None)


def group(*tensors: TensorDiff, optimizer: Iterable[str] = ADAM, more: Mapping[str, str] | None = None,
          ranks: int = 2, **fields: Any) -> Group:  # fmt: skip
    """Return a group of the model with its optimizer state. tensors: the differing tensors.

    more: kinds of additional tensors by name; additional parameters have no optimizer state.
    """
    names = dict.fromkeys(MODEL, "parameter") | dict(more or {})
    for state in optimizer:
        kind = "optimizer_step" if state == "step" else "optimizer"
        names |= {f"optimizer.{name}.{state}": kind for name in MODEL}
    return cases.make_case(tensors, Counter(names.values()), ranks, names=names, **fields)


def moment(name: str, state: str = "exp_avg", **given: Any) -> TensorDiff:
    """Return one differing optimizer state of a parameter."""
    return make_diff(f"optimizer.{name}.{state}", "optimizer", **given)


def model(**given: Any) -> list[TensorDiff]:
    """Return all parameters of the model, with differences."""
    return [make_diff(name, **{"cosine": 0.9999} | given) for name in MODEL]


def moments(state: str = "exp_avg", **given: Any) -> list[TensorDiff]:
    """Return one differing optimizer state of each parameter."""
    return [moment(name, state, **given) for name in MODEL]


def start(ranks: int = 2, odd: Any = None, **given: Any) -> list[TensorDiff]:
    """Return parameters with different initial values; BatchNorm's parameters start equal."""
    return [make_diff(name, ranks=ranks, odd=odd, **{"cosine": 0.03} | given) for name in RANDOM]


def unreduced(ranks: int = 2, state: str = "exp_avg", odd: Any = (), cosine: float = 0.3) -> list[TensorDiff]:
    """Return a model whose ranks step with unreduced gradients."""
    states = []
    settings: dict[str, Any] = {"ranks": ranks, "odd": odd}
    for i, name in enumerate(MODEL):
        norms = {rank: 1.0 + 0.4 * ((rank + i) % 2) for rank in range(ranks)}
        states.append(moment(name, state, cosine=cosine, norms=norms, **settings))
    if state == "exp_avg":
        different = tuple(odd) or tuple(range(1, ranks))
        states += moments("exp_avg_sq", cosine=0.9, smaller=dict.fromkeys(different, 0.5), **settings)
    return model(cosine=0.99, **settings) + states


def in_head(tensors: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors of the last layer."""
    return [diff for diff in tensors if ".fc." in f".{diff.name}"]


def scaled(factor: float, ranks: int = 2, state: str = "exp_avg", cosine: float = 0.99) -> list[TensorDiff]:
    """Return a model in which the last rank's first moments are `factor` times as long."""
    norms = dict.fromkeys(range(ranks), 1.0) | {ranks - 1: factor}
    parameters = model(ranks=ranks, norms=dict.fromkeys(norms, 2.0))
    states = moments(state, ranks=ranks, cosine=cosine, norms=norms)
    if state == "exp_avg":
        states += moments("exp_avg_sq", ranks=ranks, smaller={ranks - 1: 1.0 if factor < 1 else 0.0})
    return parameters + states
