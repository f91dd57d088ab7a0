"""Write the seeds that no fixture gives: small checkpoints by torch, safetensors and syncheck itself.

    python -m fuzz.make_seeds          # needs torch and safetensors; commit what it writes

A few tensors of each sort, so that a fuzzer has one of every construct to begin with, and no more bytes than that.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import syncheck
from syncheck.fingerprint import fingerprint
from syncheck.readers import read

SEEDS = Path(__file__).resolve().parent / "seeds"


def trained() -> dict[str, Any]:
    """Train a layer for one step; what a trainer would save of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    block = syncheck.metadata(run="seed", rank=0, world_size=2, step=1, run_id="0", model=model, host="here")
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "syncheck": block, "epoch": 1}


def mixed() -> dict[str, Any]:
    """One of each sort of thing that a checkpoint holds beside ordinary tensors."""
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


def saved(state: Any, **options: Any) -> bytes:
    """Return what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def pickle_of(data: bytes) -> bytes:
    """Return the pickle of a file of torch.save."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def metadata_of(state: dict[str, Any]) -> tuple[bytes, bytes]:
    """Save a folder of torch.distributed.checkpoint; return its `.metadata` and its one file of chunks."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=folder)
        return Path(folder, ".metadata").read_bytes(), Path(folder, "__0_0.distcp").read_bytes()


def main() -> None:
    """Write all seeds anew."""
    shutil.rmtree(SEEDS, ignore_errors=True)
    states = {"trained": trained(), "mixed": mixed()}
    for name, state in states.items():
        zipped = saved(state)
        write("zip", name, zipped)
        write("pickle", name, pickle_of(zipped))
        write("legacy", name, saved(state, _use_new_zipfile_serialization=False))
    write("zip", "small", saved({"w": torch.ones(2)}))
    write("pickle", "protocol_4", pickle_of(saved(states["trained"], pickle_protocol=4)))
    tensors = {"w": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16), "n": torch.tensor(3)}
    write("safetensors", "plain", safetensors.torch.save(tensors))
    write(
        "safetensors", "metadata", safetensors.torch.save(tensors, {"step": "3", "syncheck": '{"run": "r", "rank": 0}'})
    )
    index, chunks = metadata_of({"model": trained()["model"], "step": 3, "list": [torch.ones(2), "text"]})
    write("dcp", "plain", index)
    write("chunks", "plain", chunks)
    path = SEEDS / "zip" / "trained"
    syncheck_file = SEEDS / "fingerprint" / "trained"
    syncheck_file.parent.mkdir()
    syncheck_file.write_text(fingerprint(read(str(path))))


def write(target: str, name: str, data: bytes) -> None:
    """Write one seed."""
    (SEEDS / target).mkdir(parents=True, exist_ok=True)
    (SEEDS / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
