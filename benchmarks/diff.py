"""A full file of 4 GiB against 8 shards of the same model: against `cmp` of equal bytes, and against torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.files import GIB, folder
from benchmarks.timing import SYNCHECK, bar, environment, median, peak_anonymous, section, table, take_turns

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 3
RANKS, TENSORS = 8, 16
# Arguments: a folder, the dimension of the shards, numbers of ranks and tensors. Rank 0 also saves all tensors.
WRITE = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

folder, dim, ranks, tensors = sys.argv[1], *map(int, sys.argv[2:])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
rank = dist.get_rank()
shards, whole = {}, {}
for i in range(tensors):
    torch.manual_seed(i)
    weight = torch.randn(8192, 8192)
    local = weight.chunk(ranks, dim)[rank].clone()
    shards[f"layers.{i}.weight"] = DTensor.from_local(local, mesh, [Shard(dim)])
    if not rank:
        whole[f"layers.{i}.weight"] = weight
torch.save(shards, f"{folder}/model_rank{rank}.pth")
if not rank:
    torch.save(whole, f"{folder}/full.pth")
dist.destroy_process_group()
"""
TORCH = """
import sys, torch
_, full, dim, *files = sys.argv
whole = torch.load(full)
parts = [torch.load(path, weights_only=False) for path in files]
for name, weight in whole.items():
    other = torch.cat([part[name]._local_tensor for part in parts], int(dim))
    assert torch.equal(weight, other)
"""


def _write(where: Path, dim: int) -> list[str]:
    """Write the files of a sharding; return the paths of the shards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    script = where / "write.py"
    script.write_text(WRITE, encoding="utf-8")
    subprocess.run(
        [*command, str(script), str(where), str(dim), str(RANKS), str(TENSORS)],
        check=True, env=environment(), capture_output=True, timeout=900,
    )  # fmt: skip
    shutil.copy(where / "full.pth", where / "copy.pth")
    return [str(where / f"model_rank{rank}.pth") for rank in range(RANKS)]


def _measure(rounds: int, name: str, dim: int) -> tuple[dict[str, list[float]], list[tuple[str, bool]]]:
    with folder(12 * GIB) as where:
        shards, full, copy = _write(where, dim), str(where / "full.pth"), str(where / "copy.pth")
        command = [SYNCHECK, "diff", "-q", full, ",".join(shards)]
        times = take_turns(
            {
                f"cmp full.pth copy.pth ({name})": ["cmp", full, copy],
                f"syncheck diff full.pth, 8 shards by {name}": command,
                f"torch.load, torch.equal, 8 shards by {name}": [sys.executable, "-c", TORCH, full, str(dim), *shards],
            },
            rounds,
        )
        cmp, own, loaded = median(times).values()
        return times, [
            bar(f"{name}: ratio to cmp of equal bytes", own / cmp, 2.5),
            bar(f"{name}: ratio to torch.load and torch.equal", own / loaded, 0.3),
            bar(f"{name}: peak of RssAnon, MB", peak_anonymous(command), 150),
        ]


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    times: dict[str, list[float]] = {}
    bars: list[tuple[str, bool]] = []
    for dim, name in enumerate(("rows", "columns")):
        found, met = _measure(rounds, name, dim)
        times |= found
        bars += met
    return section(
        "A model of 4 GiB (16 tensors of float32, 8192 x 8192): a full torch.save file against the DTensors of 8 "
        "ranks, sharded by rows (FSDP2) and by columns. All bytes are equal and in the page cache; `cmp` reads two "
        "full files.",
        table(times),
        bars,
    )
