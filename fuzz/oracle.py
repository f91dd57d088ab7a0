"""Read checkpoints with torch and safetensors, without syncheck.

A tensor is described by its dtype, its shape and digests, under the name that syncheck reports.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import safetensors
import torch

# The parameters of the model in `checkpoints`, in the order of the optimizer's ids.
PARAMETERS = "0.weight 3.weight 4.weight 0.bias 1.weight 1.bias 3.bias 4.bias".split()


def load(path: str, format_name: str) -> dict[str, Any]:
    """Return `tensors` and `values` by name, or the `error` of the library."""
    result = Content()
    try:
        LOADERS[format_name](Path(path), result)
    except BaseException as error:  # noqa: BLE001 - the error of torch.distributed.checkpoint is no Exception
        return {"error": f"{type(error).__name__}: {error!s:.200}"}
    return {"tensors": result.tensors, "values": result.values}


def _describe(tensor: torch.Tensor) -> list[Any]:
    """Return dtype, shape, a digest of the bytes, and a digest that treats all zeros, and all NaNs, as equal."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = numbers = _bytes(flat)
    if flat.is_floating_point():
        nans = flat.isnan()
        numbers = _bytes(torch.where(nans, torch.zeros((), dtype=flat.dtype), flat + 0)) + nans.numpy().tobytes()
    digests = [hashlib.sha1(part).hexdigest() for part in (raw, numbers)]
    return [str(tensor.dtype), list(tensor.shape), *digests]


def _bytes(flat: torch.Tensor) -> bytes:
    data: bytes = flat.contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data


class Content:
    """The tensors and Python values of a checkpoint by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[Any]] = {}
        self.values: dict[str, str] = {}

    def add(self, prefix: str, node: Any, parameters: list[str] | None = None) -> None:
        """Flatten an object. parameters: names that replace the ids in the optimizer's state."""
        if (
            isinstance(node, dict)
            and isinstance(node.get("state"), dict)
            and isinstance(node.get("param_groups"), list)
        ):
            for key, entries in node["state"].items():
                known = parameters and isinstance(key, int) and key < len(parameters)
                self.add(f"{prefix}.{parameters[key] if parameters and known else key}", entries)
            self.add(f"{prefix}.param_groups", node["param_groups"])
        elif isinstance(node, torch.Tensor):
            self.tensors[prefix] = _describe(node)
        elif isinstance(node, dict):
            for key, value in node.items():
                self.add(f"{prefix}.{key}" if prefix else str(key), value, parameters)
        elif isinstance(node, (list, tuple, set)):
            for i, value in enumerate(node):
                self.add(f"{prefix}.{i}", value, parameters)
        else:
            self.values[prefix] = repr(node)


def _torch(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _load_torch(path: Path, result: Content) -> None:
    for key, value in _torch(path).items():
        result.add("" if key == "model" else key, value, PARAMETERS)


class _Plain(pickle.Unpickler):
    """Loads plain pickles of `checkpoints` only, because a damaged pickle could name any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if (module, name) not in (("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _load_plain_pickle(path: Path, result: Content) -> None:
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # typed storages are deprecated
        content = _Plain(file).load()
        if file.read(1):
            raise pickle.UnpicklingError("more than one pickle")
    for key, value in content.items():
        result.add("" if key == "model" else key, value, PARAMETERS)


def _load_safetensors(path: Path, result: Content) -> None:
    with safetensors.safe_open(path, "pt") as file:
        result.tensors |= {name: _describe(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        for name, text in (file.metadata() or {}).items():
            result.add(name, json.loads(text) if name == "syncheck" else text)


def _load_fingerprint(path: Path, result: Content) -> None:
    document = json.loads(path.read_bytes())
    for name, entry in document["tensors"].items():
        digest = f"{document['algorithm']} {entry.get('digest')} {entry.get('refused')} {entry.get('sharding')}"
        result.tensors[name] = [entry["dtype"], entry["shape"], digest, digest]
    result.add("", document["values"])
    result.add("syncheck", document["metadata"])


def _load_dcp(path: Path, result: Content) -> None:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # takes a second
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    content: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
        _load_state_dict(content, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    result.add("", content.pop("model"))
    result.add("", content)


def _load_huggingface(path: Path, result: Content) -> None:
    for name in sorted(set(json.loads((path / "model.safetensors.index.json").read_bytes())["weight_map"].values())):
        _load_safetensors(path / name, result)
    result.add("optimizer", _torch(path / "optimizer.pt"))
    result.add("scheduler", _torch(path / "scheduler.pt"))
    state = json.loads((path / "trainer_state.json").read_bytes())
    result.add("", {key: state[key] for key in ("global_step", "epoch") if key in state})


def _load_accelerate(path: Path, result: Content) -> None:
    result.add("", _torch(path / "pytorch_model.bin"))
    result.add("optimizer", _torch(path / "optimizer.bin"))
    result.add("scheduler", _torch(path / "scheduler.bin"))
    result.add("scaler", _torch(path / "scaler.pt"))
    result.add("custom_checkpoint.0", _torch(path / "custom_checkpoint_0.pkl"))
    result.add("random_states", _torch(path / "random_states_0.pkl"))


def _load_deepspeed(path: Path, result: Content) -> None:
    for name in sorted(os.listdir(path)):
        content = _torch(path / name)
        if name.startswith("mp_rank"):
            result.add("", content.pop("module"))
            result.add("", content)
        else:
            prefix = f"optimizer.{name.removesuffix('_optim_states.pt')}"
            inner = content["optimizer_state_dict"]
            base = inner.pop("base_optimizer_state")
            # The flat partition is the only parameter of this optimizer.
            flat = f"{prefix}.optimizer_state_dict.single_partition_of_fp32_groups.0"
            for number, entries in base.pop("state").items():
                result.add(flat if number == 0 else f"{prefix}.{number}", entries)
            result.add(prefix, base)
            result.add(prefix, inner)


def _load_megatron(path: Path, result: Content) -> None:
    for name in sorted(os.listdir(path)):
        content = _torch(path / name / "model_optim_rng.pt")
        result.add(name, content.pop("model"))
        result.add(f"optimizer.{name}", content.pop("optimizer"))
        result.add(name, content)


LOADERS = {
    "torch-zip": _load_torch,
    "torch-legacy": _load_torch,
    "pickle": _load_plain_pickle,
    "safetensors": _load_safetensors,
    "fingerprint": _load_fingerprint,
    "dcp": _load_dcp,
    "huggingface": _load_huggingface,
    "accelerate": _load_accelerate,
    "deepspeed": _load_deepspeed,
    "megatron": _load_megatron,
}
