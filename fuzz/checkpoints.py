"""Valid checkpoints of every format: small checkpoints as seeds in `fuzz/seeds`, and larger checkpoints to damage.

`python -m fuzz.checkpoints` rewrites the seeds; it needs torch and safetensors. The fuzzer starts with a few tensors of
each type, because small inputs make it faster.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import syncheck
from fuzz.fields import find_fields
from fuzz.mutations import read_records
from syncheck.readers import formats
from syncheck.readers.fingerprints import fingerprint

SEED = 5
SEEDS = Path(__file__).resolve().parent / "seeds"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Subject:
    """A checkpoint to damage. files: by relative path; a format of single files has one.

    twin: of another rank, with equal tensors. other: of another training run, as a source of foreign bytes.
    """

    format: str
    files: Files
    twin: Files
    other: Files

    @property
    def is_folder(self) -> bool:
        """Whether the checkpoint is a folder."""
        return self.format not in formats.READERS


def make_subject(format_name: str) -> Subject:
    """Make a format's checkpoint of rank 1, its twin of rank 0, and a checkpoint of another run."""
    make = MAKERS[format_name]
    ranks = (1, 0, 1) if format_name in formats.READERS else (None,) * 3
    return Subject(format_name, *(make(_content(SEED + run, rank)) for run, rank in zip((0, 0, 1), ranks, strict=True)))


def _train(model: nn.Sequential, batch: torch.Tensor, steps: int) -> torch.optim.Optimizer:
    """Train with two parameter groups."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
    return optimizer


def _extra_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of other dtypes and layouts that a trainer may save."""
    torch.manual_seed(seed + 100)
    flat = torch.randn(60)
    return {
        "bf16": torch.randn(7, 3).bfloat16(),
        "fp16": torch.randn(5).half(),
        "int8": torch.randint(-100, 100, (9,), dtype=torch.int8),
        "int64": torch.randint(0, 2**60, (3, 2)),
        "bool": torch.rand(11) > 0.5,
        "complex": torch.randn(4, dtype=torch.complex64),
        "scalar": torch.randn(()),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(4, 6).t(),
        "columns": torch.randn(6, 5)[:, 1:3],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "front": flat[:20],
        "back": flat[40:].reshape(4, 5),
        "rng_state": torch.get_rng_state()[:600].clone(),
    }


def _content(seed: int, rank: int | None) -> dict[str, Any]:
    """Return the content of a checkpoint. rank: None for no metadata block."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 5))
    model[3].bias.requires_grad = False
    optimizer = _train(model, torch.randn(4, 1, 6, 6), 3)
    content: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": {"scale": 1024.0 * seed, "_growth_tracker": 3},
        "extra": _extra_tensors(seed),
        "epoch": 2,
        "note": "free text of the user",
        "best": {"loss": 0.25 + seed, "names": ["a", "b", None]},
    }
    if rank is not None:
        content["syncheck"] = syncheck.metadata(
            run="run",
            rank=rank,
            world_size=2,
            step=3,
            run_id=f"id{seed}",
            host="host",
            model=model,
            optimizer=optimizer,
        )
    return content


def _save(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def _dense_tensors(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of the model and the extra tensors without views, as safetensors requires."""
    extra = {f"extra.{name}": tensor for name, tensor in content["extra"].items()}
    return {name: tensor.contiguous().clone() for name, tensor in {**content["model"], **extra}.items()}


def torch_zip(content: dict[str, Any]) -> Files:
    """torch.save."""
    return {"file.pth": _save(content)}


def torch_legacy(content: dict[str, Any]) -> Files:
    """torch.save before 1.6. Numbers replace the memory addresses that name storages, so the file is reproducible."""
    data = _save(content, _use_new_zipfile_serialization=False)
    fields = {field.label: field for field in find_fields("file.pth", data)}
    counts = [field for field in find_fields("file.pth", data) if field.label == "count of elements"]
    ends = [field.start for field in counts[1:]] + [len(data)]
    listed = fields["pickle of keys"]
    keys = pickle.loads(data[listed.start : listed.stop])
    storages = {key: data[field.start : end] for key, field, end in zip(keys, counts, ends, strict=True)}
    keys.sort(key=lambda key: data.index(key.encode(), fields["pickle"].start))
    names = {key: f"{i:0{len(key)}}" for i, key in enumerate(keys)}
    head = data[: listed.start]
    for key, name in names.items():
        head = head.replace(key.encode(), name.encode())
    tail = b"".join(storages[key] for key in keys)
    return {"file.pth": head + pickle.dumps(list(names.values()), protocol=2) + tail}


class _Plain(pickle.Pickler):
    """Writes storages as pickle.dump does, with numbers in place of memory addresses, so the file is reproducible."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self._files: dict[str, bytes] = {}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.storage.TypedStorage):
            return NotImplemented
        key = str(obj._cdata)  # noqa: SLF001 - the key in the file of a storage
        if key not in self._files:
            number = f"{len(self._files):0{len(key)}}".encode()
            self._files[key] = _save(obj, _use_new_zipfile_serialization=False).replace(key.encode(), number)
        return torch.storage._load_from_bytes, (self._files[key],)  # noqa: SLF001 - of TypedStorage.__reduce__


def plain_pickle(content: dict[str, Any]) -> Files:
    """pickle.dump, with each storage as a torch.save file from before 1.6 within the pickle."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these storages are deprecated
        _Plain(buffer).dump(content)
    return {"file.pkl": buffer.getvalue()}


def zip_of_files(content: dict[str, Any]) -> bytes:
    """Return a zip of torch.save files, like a model of stable-baselines3."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in (("data", b"{}"), ("policy.pth", content["model"]), ("optimizer.pth", content["optimizer"])):
            archive.writestr(zipfile.ZipInfo(name), data if isinstance(data, bytes) else _save(data))
    return buffer.getvalue()


def one_safetensors(content: dict[str, Any]) -> Files:
    """One safetensors file with string metadata."""
    strings = {"syncheck": json.dumps(content["syncheck"]), "epoch": "2", "note": content["note"]}
    data = safetensors.torch.save(_dense_tensors(content), strings)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # the library writes metadata in random order
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return {"file.safetensors": data[:8] + text.ljust(end - 8) + data[end:]}


def one_fingerprint(content: dict[str, Any]) -> Files:
    """A fingerprint of a torch.save file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.pth")
        path.write_bytes(_save(content))
        return {"file.json": fingerprint(syncheck.read(str(path))).encode()}


def dcp_folder(content: dict[str, Any], files: int = 3) -> Files:
    """torch.distributed.checkpoint, with tensors in several files."""
    if "extra" in content:  # the format stores each tensor densely
        content = {**content, "extra": {name: part.contiguous().clone() for name, part in content["extra"].items()}}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        save_dcp(content, storage_writer=FileSystemWriter(folder, thread_count=files))
        index = Path(folder, ".metadata")
        # Folder and id of a save differ each time, and its threads write in any order.
        metadata = pickle.loads(index.read_bytes())
        storage_meta = replace(metadata.storage_meta, checkpoint_id="folder", save_id="id")
        storage_data = dict(sorted(metadata.storage_data.items(), key=repr))
        index.write_bytes(pickle.dumps(replace(metadata, storage_meta=storage_meta, storage_data=storage_data)))
        return {name: Path(folder, name).read_bytes() for name in sorted(os.listdir(folder))}


def huggingface(content: dict[str, Any]) -> Files:
    """A folder of transformers' Trainer: three safetensors shards with an index, and the state of the training."""
    tensors = _dense_tensors(content)
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    shards = [{name: tensors[name] for name in list(tensors)[i::3]} for i in range(3)]
    weight_map = {name: names[i] for i, shard in enumerate(shards) for name in shard}
    return {
        **{name: safetensors.torch.save(shard, {"format": "pt"}) for name, shard in zip(names, shards, strict=True)},
        "model.safetensors.index.json": json.dumps({"metadata": {"total_size": 9}, "weight_map": weight_map}).encode(),
        "config.json": b'{"hidden": 8}',
        "optimizer.pt": _save(content["optimizer"]),
        "scheduler.pt": _save({"last_epoch": 3, "_last_lr": [0.01]}),
        "trainer_state.json": b'{"global_step": 3, "epoch": 2.0, "log_history": []}',
    }


def accelerate(content: dict[str, Any]) -> Files:
    """Accelerate's save_state."""
    return {
        "pytorch_model.bin": _save(content["model"]),
        "optimizer.bin": _save(content["optimizer"]),
        "scheduler.bin": _save({"last_epoch": 3}),
        "scaler.pt": _save(content["scaler"]),
        "custom_checkpoint_0.pkl": _save(content["extra"]),
        "random_states_0.pkl": _save({"step": 3, "torch_manual_seed": content["extra"]["rng_state"]}),
    }


def deepspeed(content: dict[str, Any]) -> Files:
    """A tag folder of DeepSpeed: the model, and the optimizer in two partitions."""
    flat = torch.cat([tensor.flatten() for tensor in content["model"].values() if tensor.is_floating_point()])
    model = {"module": content["model"], "global_steps": 3, "extra": content["extra"], "dp_world_size": 2}
    files = {"mp_rank_00_model_states.pt": _save(model)}
    for rank, part in enumerate(flat.chunk(2)):
        state = {"step": torch.tensor(3.0), "exp_avg": part * 0.1, "exp_avg_sq": part.square()}
        inner = {"state": {0: state}, "param_groups": [{"lr": 0.01, "params": [0]}]}
        partition = {"base_optimizer_state": inner, "single_partition_of_fp32_groups": [part.clone()], "zero_stage": 2}
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = _save({"optimizer_state_dict": partition})
    return files


def megatron(content: dict[str, Any]) -> Files:
    """One iteration of Megatron-LM on two model-parallel ranks."""
    shared = {"iteration": 3, "checkpoint_version": 3.0, "extra": content["extra"]}
    files = {}
    for rank in range(2):
        model = {name: tensor + rank for name, tensor in content["model"].items()}
        whole = {**shared, "model": model, "optimizer": content["optimizer"]}
        files[f"mp_rank_{rank:02}/model_optim_rng.pt"] = _save(whole)
    return files


MAKERS = {
    "torch-zip": torch_zip,
    "torch-legacy": torch_legacy,
    "pickle": plain_pickle,
    "safetensors": one_safetensors,
    "fingerprint": one_fingerprint,
    "dcp": dcp_folder,
    "huggingface": huggingface,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "megatron": megatron,
}


def _small_content() -> dict[str, Any]:
    """Return a trainer's checkpoint of one layer after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = _train(model, torch.randn(4, 2), 1)
    block = syncheck.metadata(run="seed", rank=0, world_size=2, step=1, run_id="0", model=model, host="here")
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "syncheck": block, "epoch": 1}


def _mixed_content() -> dict[str, Any]:
    """Return one object of each type in a checkpoint beside ordinary tensors."""
    flat = torch.arange(12.0)
    return {
        "view": flat[2:8].reshape(2, 3).t(),
        "expanded": flat[:1].expand(3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(flat[:2], 0.5, 0, torch.qint8),
        "array": np.arange(3),
        "scalar": np.float64(0.5),
        "parameter": nn.Parameter(flat[:2]),
        "plain": [1, 2.5, float("nan"), None, "text", b"bytes", {3, 4}, (5, 6), 1j, torch.Size([1]), torch.float16],
        "device": torch.device("cpu"),
    }


def make_seeds() -> Files:
    """Return the seeds by path, `target/name`. `chunks` belongs to the target `dcp`."""
    small, mixed = _small_content(), _mixed_content()
    seeds: Files = {}
    for name, content in (("trained", small), ("mixed", mixed)):
        seeds[f"zip/{name}"] = _save(content)
        seeds[f"legacy/{name}"] = _save(content, _use_new_zipfile_serialization=False)
        seeds[f"pickle/{name}"] = dict(read_records(_save(content)))["archive/data.pkl"]
        seeds[f"plain/{name}"] = plain_pickle(content)["file.pkl"]
    seeds["zip/files"] = zip_of_files(small)
    seeds["zip/small"] = _save({"w": torch.ones(2)})
    seeds["pickle/protocol_4"] = dict(read_records(_save(small, pickle_protocol=4)))["archive/data.pkl"]
    tensors = {"w": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16), "n": torch.tensor(3)}
    strings = {"step": "3", "syncheck": '{"run": "r", "rank": 0}'}
    seeds["safetensors/plain"] = safetensors.torch.save(tensors)
    seeds["safetensors/metadata"] = safetensors.torch.save(tensors, strings)
    folder = dcp_folder({"model": small["model"], "step": 3, "list": [torch.ones(2), "text"]}, files=1)
    seeds["dcp/plain"], seeds["chunks/plain"] = folder[".metadata"], folder["__0_0.distcp"]
    seeds["fingerprint/trained"] = one_fingerprint(small)["file.json"]
    return seeds


if __name__ == "__main__":
    shutil.rmtree(SEEDS, ignore_errors=True)
    for path, data in make_seeds().items():
        (SEEDS / path).parent.mkdir(parents=True, exist_ok=True)
        (SEEDS / path).write_bytes(data)
