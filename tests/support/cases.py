"""Groups whose tensors differ in a given way, and their findings."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from support.groups import make_group
from support.listings import find_all, index_by, list_codes, list_fields, list_names
from syncheck.diagnose import rules
from syncheck.records import Counts, Replica, TensorDiff

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.records import Finding, Group

TOTALS = {"parameter": 10, "bn_mean": 4, "bn_var": 4, "bn_count": 4, "optimizer": 20, "optimizer_step": 10}
# Fields of a tensor if only digests were compared.
DIGEST: dict[str, Any] = {"mismatched": None, "max_abs": None, "index": None, "extent": None, "reason": "digest"}


def diff(name: str, kind: str, clusters: Any = ((0,), (1,)), **changes: Any) -> TensorDiff:
    """Return a TensorDiff with differences in every element. clusters: ranks with equal values, largest set first."""
    majority = len(clusters) < 2 or len(clusters[0]) > len(clusters[1])
    fields = {"dtype": "float32", "shape": (4,), "status": "different", "mismatched": 4, "numel": 4, "max_abs": 0.5}
    fields |= {"index": (1,), "extent": "all"}
    fields["minority"] = tuple(sorted(chain.from_iterable(clusters[1:]))) if majority else ()
    return TensorDiff(name, kind, clusters=clusters, **fields | changes)


def make_case(tensors: Iterable[TensorDiff], totals: Mapping[str, int], ranks: int, **fields: Any) -> Group:
    """Return a group with the given differing tensors. totals: the number of all tensors of each kind."""
    tensors, kinds = tuple(tensors), {}
    for kind, total in totals.items():
        statuses = list_fields(find_all(tensors, kind=kind), "status")
        different = statuses.count("different")
        kinds[kind] = Counts(total, total - len(statuses), different=different, not_compared=len(statuses) - different)
    replicas = tuple(Replica(f"rank{rank}.pth", rank, "torch-zip", 52, 1000) for rank in range(ranks))
    counts = sum(kinds.values(), Counts())
    return make_group("run", fields.pop("step", 10), "undecided", replicas, counts, tensors, kinds=kinds, **fields)


def group(*tensors: TensorDiff, ranks: int = 2, **fields: Any) -> Group:
    """Return a group in which the given tensors differ and all other tensors of TOTALS are identical."""
    return make_case(tensors, TOTALS, ranks, **fields)


def diagnose_case(case: Group, *earlier: Group) -> dict[str, Finding]:
    """Diagnose a group and return its findings by code. earlier: groups of earlier steps."""
    return index_by(rules.diagnose(case, (*earlier, case) if earlier else ()), "code")


def diagnose_single(case: Group, *earlier: Group) -> Finding:
    """Return the single finding of a group, and assert that the finding covers all differences.

    Unsynchronized running statistics of ranks outside the suspects may be a second finding.
    """
    finding, *remaining = diagnose_case(case, *earlier).values()
    assert set(list_codes(remaining)) <= {"SYN201", "SYN202"}
    assert not any(set(second.ranks) & set(finding.ranks) for second in remaining)
    assert sorted(finding.tensors) == sorted(list_names(case.tensors))
    assert sorted(finding.values) == sorted(list_names(find_all(case.values, counts=True)))
    return finding
