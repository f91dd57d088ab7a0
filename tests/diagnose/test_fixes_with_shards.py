"""Fixes of damaged replicas, if the files of the ranks hold different shards of other tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import get_failing

import syncheck
from syncheck.diagnose import syn220_bit_flip as syn220
from syncheck.diagnose import syn221_contiguous_corruption as syn221
from syncheck.diagnose import syn226_masked_on_some_ranks as syn226

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Finding

NORM = "layers.0.input_layernorm.weight"
RNG = np.random.default_rng(5)
VALUES = RNG.normal(size=64).astype(np.float32)
PARTS = RNG.normal(size=(4, 8, 8)).astype(np.float32)


def change_element(norm: Any) -> None:
    """Change most bits of one element."""
    norm[3] += 0.37


def change_run(norm: Any) -> None:
    """Change adjacent elements."""
    norm[8:16] += 0.37


def flip_bit(norm: Any) -> None:
    """Flip a high bit of one element."""
    norm.view(np.int32)[3] ^= 1 << 28


def mask(norm: Any) -> None:
    """Set scattered elements to zero."""
    norm[::3] = 0


def find_cause(
    folder: Path, change: Callable[[Any], None], ranks: int, *, name: str = "tp_rank{rank}.pth", shards: bool = True
) -> Finding:
    """Return the cause of a change of a norm on the last rank, beside shards of another tensor or copies of it."""
    for rank in range(ranks):
        norm = VALUES.copy()
        if rank == ranks - 1:
            change(norm)
        up_proj = PARTS[rank if shards else 0]
        model = {NORM: norm, "layers.0.mlp.up_proj.weight": up_proj}
        save_pth(folder / name.format(rank=rank), {"model": model})
    return get_failing(syncheck.compare(folder))


@pytest.mark.parametrize(
    ("change", "ranks", "fix"),
    [
        (change_element, 2, syn220.Text.FIX_PARTS_UNSURE),
        (change_element, 4, syn220.Text.FIX_PARTS_UNSURE),
        (flip_bit, 4, syn220.Text.FIX_PARTS),
        (flip_bit, 2, syn220.Text.FIX_PARTS_NO_MAJORITY),
        (change_run, 4, syn221.Text.FIX_PARTS_UNSURE),
        (mask, 4, syn226.Text.FIX_PARTS),
    ],
)
def test_files_with_other_shards_are_not_loaded_whole(tmp_path: Path, change: Any, ranks: int, fix: Any) -> None:
    """If ranks hold shards, no fix copies the whole checkpoint of another rank."""
    assert find_cause(tmp_path, change, ranks).fix == fix()


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        (change_element, syn220.Text.FIX_UNSURE),
        (flip_bit, syn220.Text.FIX),
        (change_run, syn221.Text.FIX_UNSURE),
        (mask, syn226.Text.FIX),
    ],
)
def test_whole_checkpoints_of_replicas_are_loaded(tmp_path: Path, change: Any, fix: Any) -> None:
    """Replicas without shards load the checkpoint of another rank."""
    assert find_cause(tmp_path, change, 4, name="rank{rank}.pth", shards=False).fix == fix()


@pytest.mark.parametrize("change", [change_element, change_run])
def test_tensor_parallel_gradients_are_a_possible_cause(tmp_path: Path, change: Any) -> None:
    """A local change of a replicated tensor on one tensor-parallel rank may come from its own gradient (SYN231)."""
    parallel, plain = tmp_path / "parallel", tmp_path / "plain"
    parallel.mkdir()
    plain.mkdir()
    assert "SYN231" in find_cause(parallel, change, 4).alternatives
    assert "SYN231" not in find_cause(plain, change, 4, name="rank{rank}.pth", shards=False).alternatives


def test_the_line_copies_one_tensor(tmp_path: Path) -> None:
    """The code of the fix copies the named tensor, and leaves the shards of the rank as they are."""
    torch = pytest.importorskip("torch")

    line = "model.get_parameter(NAME).data.copy_(torch.load(FILE)['model'][NAME])"
    assert line in str(find_cause(tmp_path, change_element, 2).fix)
    healthy, odd = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    file, weight = tmp_path / "healthy.pth", odd.weight.clone()
    torch.save({"model": healthy.state_dict()}, file)
    exec(line, {"torch": torch, **vars(SimpleNamespace(model=odd, NAME="bias", FILE=file))})
    assert (odd.bias.equal(healthy.bias), odd.weight.equal(weight)) == (True, True)
