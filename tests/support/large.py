"""Reports of many tensors."""

from __future__ import annotations

from support.groups import make_finding, make_group
from support.listings import list_names
from syncheck.records import Counts, Group, Replica, Report, TensorDiff


def tensor(name: str, ranks: int = 8, **changes: object) -> TensorDiff:
    """Return a tensor that differs on the last rank only."""
    everyone = tuple(range(ranks))
    fields = {
        "status": "different", "replica_groups": (everyone,), "clusters": (everyone[:-1], everyone[-1:]),
        "mismatched": 12, "numel": 262144, "max_abs": 0.25, "max_rel": 0.5, "max_ulp": 4096, "index": (1, 2),
        "nonfinite": dict.fromkeys(everyone, 0), "extent": "scattered", "minority": everyone[-1:],
    } | changes  # fmt: skip
    return TensorDiff(name, "parameter", "float32", (512, 512), **fields)  # type: ignore[arg-type]


def group(*tensors: TensorDiff, ranks: int = 8, step: int | None = None) -> Group:
    """Return a group of tensors, with a finding on all of them."""
    counts = Counts(tensors=len(tensors), different=len(tensors))
    replicas = tuple(Replica(f"run_rank{r}.pth", r, "torch-zip", len(tensors), 8) for r in range(ranks))
    names = tuple(list_names(tensors))
    finding = make_finding("SYN212", "outside-the-wrapper", "error", (ranks - 1,), names, "what", "why", "fix")
    return make_group(
        "run", step, "out_of_sync", replicas, counts, tensors, findings=(finding,), kinds={"parameter": counts}
    )


def names(count: int) -> list[str]:
    """Return the names of a deep network with 12 tensors per layer."""
    parts = ("attn", "mlp", "norm")
    return [f"encoder.layers.{i // 12}.{parts[i % 3]}.linear{i % 12}.weight" for i in range(count)]


def report(count: int, ranks: int = 8) -> Report:
    """Return a report of one group with increasing differences."""
    tensors = [tensor(name, ranks, max_abs=1e-6 * (i + 1)) for i, name in enumerate(names(count))]
    return Report("out_of_sync", (group(*tensors, ranks=ranks),))
