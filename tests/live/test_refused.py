"""Tensors whose bytes cannot be compared never pass an assertion silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.agreement import all_raise, each_rank
from torch import nn

from syncheck.live.memory import snapshot
from syncheck.messages import Refusal
from syncheck.testing import OutOfSync, assert_in_sync, compare

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# The refused tensors of `odd`, with the reason.
ODD = {
    "sparse": Refusal.SPARSE(),
    "csr": Refusal.SPARSE(),
    "quantized": Refusal.QUANTIZED(),
    "nested": Refusal.NESTED(),
    "jagged": Refusal.NESTED(),
    "meta": Refusal.META(),
    "lazy": Refusal.LAZY(),
    "unknown dtype": Refusal.DTYPE(name="bits8"),
    "freed": Refusal.FREED(),
    "wrapper": Refusal.WRAPPER(),
}
GOOD = torch.ones(2)


def odd(value: float = 1.0) -> dict[str, Any]:
    """Return refused tensors, each of three elements or rows."""
    from torch.testing._internal.two_tensor import TwoTensor

    dense = torch.full((3, 3), value)
    with torch.random.fork_rng():
        quantized = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    freed = torch.full((3, 3), value)
    freed.untyped_storage().resize_(0)
    return {
        "freed": freed,
        "sparse": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantized": quantized,
        "nested": torch.nested.nested_tensor([dense, dense]),
        "jagged": torch.nested.nested_tensor([dense, dense], layout=torch.jagged),
        "meta": torch.empty(3, 3, device="meta"),
        "lazy": nn.LazyLinear(3).weight,
        "wrapper": TwoTensor(dense, dense),
        "unknown dtype": torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    }


@pytest.mark.parametrize("what", ODD)
def test_uncompared_tensors_fail_an_assertion(what: str) -> None:
    """A comparable tensor beside a refused one fails: the text names the refused tensor, and exclude= skips it.

    A refused tensor alone is undecided.
    """
    first = {"good": GOOD, "odd": odd(1.0)[what]}
    second = {"good": GOOD, "odd": odd(2.0)[what]}
    assert snapshot(first).tensors["odd"].refused == ODD[what]
    alone = compare(first, second, include="odd")
    assert (alone.verdict, alone.counts.not_compared) == ("undecided", 1)
    assert compare(first, second).verdict == "undecided"
    with pytest.raises(OutOfSync) as caught:
        assert_in_sync(first, second)
    assert "COULD NOT TELL: 1 of the tensors could not be compared: odd (" in str(caught.value)
    assert "exclude=" in str(caught.value)
    assert_in_sync(first, second, exclude="odd")


@pytest.mark.parametrize("what", ODD)
def test_a_tensor_refused_on_one_replica_only(what: str) -> None:
    """A tensor that is dense on one replica and sparse, quantized or meta on another is SYN102."""
    with pytest.raises(OutOfSync, match="SYN102"):
        assert_in_sync({"good": GOOD, "odd": torch.ones(3, 3)}, {"good": GOOD, "odd": odd()[what]})


@pytest.mark.parametrize(
    "first, second, says",
    [
        (torch.eye(3).to_sparse(), torch.eye(4).to_sparse(), "[3, 3] on rank 0 and [4, 4] on rank 1"),
        (torch.eye(3).to_sparse(), torch.eye(3).double().to_sparse(), "float32 on rank 0 and float64 on rank 1"),
        (torch.eye(3).to_sparse(), torch.empty(3, 3, device="meta"), "a sparse tensor on rank 0 and a meta tensor"),
    ],
    ids=["shape", "dtype", "kind"],
)
def test_different_refused_tensors(first: Any, second: Any, says: str) -> None:
    """Refused tensors with a different shape, dtype or kind are a difference."""
    with pytest.raises(OutOfSync) as caught:
        assert_in_sync({"good": GOOD, "odd": first}, {"good": GOOD, "odd": second})
    assert "SYN102" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.syncheck(ranks=2)
def test_refused_tensors_fail_across_ranks(syncheck_rank: Any) -> None:
    """Sparse tensors that differ between ranks raise the same text on all ranks."""
    value = odd(1.0 + syncheck_rank.rank)["sparse"]
    outcome = all_raise(each_rank(assert_in_sync, {"good": GOOD, "odd": value}))
    assert "odd (a sparse tensor)" in outcome.text
