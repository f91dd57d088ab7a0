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
# Arguments: a folder. Each rank saves its DTensors, sharded by rows and by columns; rank 0 saves all tensors.
WRITE = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

folder, ranks, tensors = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
rank = dist.get_rank()
shards = {0: {}, 1: {}}
whole = {}
for i in range(tensors):
    torch.manual_seed(i)
    weight = torch.randn(8192, 8192)
    for dim in shards:
        local = weight.chunk(ranks, dim)[rank].clone()
        shards[dim][f"layers.{i}.weight"] = DTensor.from_local(local, mesh, [Shard(dim)])
    if not rank:
        whole[f"layers.{i}.weight"] = weight
for dim, name in ((0, "rows"), (1, "columns")):
    torch.save(shards.pop(dim), f"{folder}/{name}_rank{rank}.pth")
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


def _write(where: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    script = where / "write.py"
    script.write_text(WRITE, encoding="utf-8")
    subprocess.run(
        [*command, str(script), str(where), str(RANKS), str(TENSORS)],
        check=True, env=environment(), capture_output=True, timeout=900,
    )  # fmt: skip
    shutil.copy(where / "full.pth", where / "copy.pth")


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    with folder(17 * GIB) as where:
        _write(where)
        full, copy = str(where / "full.pth"), str(where / "copy.pth")
        sides = {name: [str(where / f"{name}_rank{rank}.pth") for rank in range(RANKS)] for name in ("rows", "columns")}
        commands = {"cmp full.pth copy.pth": ["cmp", full, copy]}
        for dim, (name, paths) in enumerate(sides.items()):
            commands[f"syncheck diff full.pth, 8 shards by {name}"] = [SYNCHECK, "diff", "-q", full, ",".join(paths)]
            commands[f"torch.load and torch.equal, 8 shards by {name}"] = [
                sys.executable, "-c", TORCH, full, str(dim), *paths
            ]  # fmt: skip
        times = take_turns(commands, rounds)
        found = median(times)
        bars = []
        for name, paths in sides.items():
            own = found[f"syncheck diff full.pth, 8 shards by {name}"]
            bars.append(bar(f"{name}: ratio to cmp of equal bytes", own / found["cmp full.pth copy.pth"], 2.5))
            loaded = found[f"torch.load and torch.equal, 8 shards by {name}"]
            bars.append(bar(f"{name}: ratio to torch.load and torch.equal", own / loaded, 0.3))
            peak = peak_anonymous([SYNCHECK, "diff", "-q", full, ",".join(paths)])
            bars.append(bar(f"{name}: peak of RssAnon, MB", peak, 150))
    return section(
        "A model of 4 GiB (16 tensors of float32, 8192 x 8192): a full torch.save file against the DTensors of 8 "
        "ranks, sharded by rows (FSDP2) and by columns. All bytes are equal and in the page cache; `cmp` reads two "
        "full files.",
        table(times),
        bars,
    )
