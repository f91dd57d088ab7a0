"""A small model whose ranks differ in parameters, moments and more, and what is found of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from groups import make_group

from syncheck import diagnose
from syncheck.records import Counts, Evidence, Group, Replica, TensorDiff, ValueDiff

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.records import Finding

MODEL = {"conv.weight": 36, "bn.weight": 4, "bn.bias": 4, "fc.weight": 40, "fc.bias": 10}
RANDOM = ("conv.weight", "fc.weight", "fc.bias")  # what does not start from constants
ADAM, SGD = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)
DECAY = {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9}  # wd / (1 - momentum) is 0.005
HALF = ValueDiff("optimizer.param_groups.0.lr", {0: 0.1, 1: 0.05}, counts=True, kind="setting")


def sets_of(ranks: int, odd: Iterable[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return who holds the same: the last rank apart, these ranks apart, or with () nobody like anybody."""
    apart = (ranks - 1,) if odd is None else tuple(odd) or tuple(range(ranks))
    together = tuple(rank for rank in range(ranks) if rank not in apart)
    return ((together,) if together else ()) + tuple((rank,) for rank in apart)


def apart(name: str, kind: str = "parameter", ranks: int = 2, odd: Any = None, **given: Any) -> TensorDiff:
    """Return a tensor that differs in every element. cosine, norms: evidence; without either there is none."""
    sets = sets_of(ranks, odd)
    numel = next((size for of, size in MODEL.items() if of in name), 8)
    look = {key: given.pop(key) for key in ("cosine", "norms", "values") if key in given}
    known: dict[str, Any] = {"mismatched": numel, "max_abs": 0.5, "extent": "all"} | given
    minority = tuple(rank for found in sets[1:] for rank in found) if len(sets[0]) > len(sets[1]) else ()
    return TensorDiff(
        name, kind, "float32", (numel,), "different", clusters=sets, minority=minority, numel=numel,
        evidence=Evidence(**look) if look else None, **known,
    )  # fmt: skip


def by_digest(diff: TensorDiff) -> TensorDiff:
    """Return what is known of a tensor of which only digests were compared."""
    return replace(diff, reason="digest", mismatched=None, max_abs=None, extent=None, evidence=None)


def group(*tensors: TensorDiff, optimizer: Iterable[str] = ADAM, more: Mapping[str, str] | None = None,
          ranks: int = 2, step: int = 10, **fields: Any) -> Group:  # fmt: skip
    """Return a group of a model with its optimizer's state, in which these tensors differ.

    more: kinds of further tensors by name; a parameter among them gets no state.
    """
    names = dict.fromkeys(MODEL, "parameter") | dict(more or {})
    for state in optimizer:
        kind = "optimizer_step" if state == "step" else "optimizer"
        names |= {f"optimizer.{name}.{state}": kind for name in MODEL}
    kinds = {}
    for kind in set(names.values()):
        odd = sum(diff.kind == kind for diff in tensors)
        total = list(names.values()).count(kind)
        kinds[kind] = Counts(total, total - odd, different=odd)
    replicas = tuple(Replica(f"rank{i}.pth", i, "torch-zip", len(names), 1000) for i in range(ranks))
    total_counts = sum(kinds.values(), Counts())
    return make_group("run", step, "undecided", replicas, total_counts, tensors, kinds=kinds, names=names, **fields)


def found(case: Group, *earlier: Group) -> dict[str, Finding]:
    """Diagnose, and return the findings by code."""
    return {finding.code: finding for finding in diagnose.diagnose(case, (*earlier, case) if earlier else ())}


def only(case: Group, *earlier: Group) -> Finding:
    """Return the one finding that covers everything."""
    (finding,) = found(case, *earlier).values()
    assert set(finding.tensors) == {diff.name for diff in case.tensors}
    return finding


def moment(name: str, state: str = "exp_avg", **given: Any) -> TensorDiff:
    """Return a first moment that differs."""
    return apart(f"optimizer.{name}.{state}", "optimizer", **given)


def start(ranks: int = 2, odd: Any = None, **given: Any) -> list[TensorDiff]:
    """Return parameters of unequal starts; the norm's are equal."""
    return [apart(name, ranks=ranks, odd=odd, **{"cosine": 0.03} | given) for name in RANDOM]


def decayed(gap: float) -> list[TensorDiff]:
    """Return momenta apart by this much, of parameters that are 0.5 apart."""
    return [moment(name, "momentum_buffer", max_abs=gap, cosine=0.9999) for name in RANDOM]


def unreduced(ranks: int = 2, state: str = "exp_avg", odd: Any = (), cosine: float = 0.3) -> list[TensorDiff]:
    """Return a whole model whose ranks step with gradients of their own."""
    norms = [{rank: 1.0 + 0.4 * ((rank + i) % 2) for rank in range(ranks)} for i in range(len(MODEL))]
    parameters = [apart(name, ranks=ranks, odd=odd, cosine=0.99) for name in MODEL]
    moments = [
        moment(name, state, ranks=ranks, odd=odd, cosine=cosine, norms=norm)
        for name, norm in zip(MODEL, norms, strict=True)
    ]
    return parameters + moments


def scaled(factor: float, ranks: int = 2, state: str = "exp_avg", cosine: float = 0.99) -> list[TensorDiff]:
    """Return a model of which the last rank's first moments are `factor` times as long."""
    norms = dict.fromkeys(range(ranks), 1.0) | {ranks - 1: factor}
    parameters = [apart(name, ranks=ranks, cosine=0.9999, norms=dict.fromkeys(norms, 2.0)) for name in MODEL]
    return parameters + [moment(name, state, ranks=ranks, cosine=cosine, norms=norms) for name in MODEL]
