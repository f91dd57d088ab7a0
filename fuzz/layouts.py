"""Write the tensors of a model in the layouts that a side of `syncheck diff` can have."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fuzz.toy_models import Model

    Named = dict[str, torch.Tensor]

RANKS = 2


def write_torch(folder: Path, side: str, tensors: Named, _: Model) -> str:
    """Write a state dict with torch.save."""
    path = folder / f"{side}.pth"
    torch.save(tensors, path)
    return str(path)


def write_container(folder: Path, side: str, tensors: Named, _: Model) -> str:
    """Write a state dict below the key `model`."""
    path = folder / f"{side}.pt"
    torch.save({"model": tensors}, path)
    return str(path)


def write_with_optimizer(folder: Path, side: str, tensors: Named, _: Model) -> str:
    """Write a state dict and the state of AdamW."""
    states = {}
    # Optimizers number their parameters.
    for number, tensor in enumerate(tensors.values()):
        moments = torch.randn(tensor.shape)
        states[number] = {"step": torch.tensor(3.0), "exp_avg": moments, "exp_avg_sq": moments.square()}
    group = {"lr": 0.001, "betas": (0.9, 0.999), "params": list(states)}
    path = folder / f"{side}.pt"
    torch.save({"model": tensors, "optimizer": {"state": states, "param_groups": [group]}}, path)
    return str(path)


def write_safetensors(folder: Path, side: str, tensors: Named, _: Model) -> str:
    """Write a safetensors file."""
    path = folder / f"{side}.safetensors"
    # save_file refuses tensors that share memory, so tied tensors become copies.
    save_file(_copy(tensors), path)
    return str(path)


def write_huggingface(folder: Path, side: str, tensors: Named, model: Model) -> str:
    """Write a Hugging Face folder with two files, an index and config.json."""
    target = folder / side
    target.mkdir()
    files = _split(_copy(tensors))
    weight_map = {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(part, target / name)
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {"model_type": "toy", "num_attention_heads": model.heads}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(target)


def write_ranks(folder: Path, side: str, tensors: Named, _: Model) -> str:
    """Write a full copy for each rank, as under DDP."""
    for rank in range(RANKS):
        torch.save(tensors, folder / f"{side}_rank{rank}.pth")
    return str(folder / f"{side}_rank*.pth")


def write_stages(folder: Path, side: str, tensors: Named, _: Model) -> str:
    """Write two pipeline stages, each with other tensors."""
    # Each path is given to the command, because a glob would match files of other sides.
    paths = []
    for number, part in enumerate(_split(tensors)):
        path = folder / f"{side}_stage{number}.pth"
        torch.save(part, path)
        paths.append(str(path))
    return ",".join(paths)


def write_shards(folder: Path, side: str, tensors: Named, _: Model) -> str:
    """Write the DTensors of each rank, as FSDP2 shards them along the first dimension."""
    for rank in range(RANKS):
        # A fake process group has no other processes, and its collectives do nothing.
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        try:
            mesh = init_device_mesh("cpu", (RANKS,))
            shards = {name: _shard(tensor, rank, mesh) for name, tensor in tensors.items()}
            torch.save(shards, folder / f"{side}_rank{rank}.pth")
        finally:
            dist.destroy_process_group()
    return str(folder / f"{side}_rank*.pth")


def _shard(tensor: torch.Tensor, rank: int, mesh: Any) -> DTensor:
    """Return the part of one rank."""
    placement: Any = Replicate()
    local = tensor
    if tensor.ndim:
        placement = Shard(0)
        # The last shard may be smaller.
        rows = math.ceil(tensor.shape[0] / RANKS)
        local = tensor[rank * rows : (rank + 1) * rows].clone()
    shape, stride = tensor.shape, tensor.contiguous().stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def write_dcp(folder: Path, side: str, tensors: Named, _: Model) -> str:
    """Write a folder of torch.distributed.checkpoint."""
    save_dcp(_copy(tensors), checkpoint_id=folder / side, no_dist=True)
    return str(folder / side)


def _copy(tensors: Named) -> Named:
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = tensor.clone().contiguous()
    return copies


def _split(tensors: Named) -> list[Named]:
    """Return the first and the second half of the tensors."""
    names = list(tensors)
    middle = len(names) // 2
    first = {name: tensors[name] for name in names[:middle]}
    second = {name: tensors[name] for name in names[middle:]}
    return [first, second]


LAYOUTS: dict[str, Callable[[Path, str, Named, Model], str]] = {
    "torch": write_torch,
    "container": write_container,
    "with optimizer": write_with_optimizer,
    "safetensors": write_safetensors,
    "huggingface": write_huggingface,
    "ranks": write_ranks,
    "stages": write_stages,
    "shards": write_shards,
    "dcp": write_dcp,
}
