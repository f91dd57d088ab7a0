"""Write the outcome of a training for the tests."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANK = int(os.environ.get("RANK", "0"))


def digest(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    """Digest the result of a training: parameters, buffers, optimizer states, RNG state."""
    tensors = [*model.state_dict().values()]
    for optimizer, parameter in product(optimizers, model.parameters()):
        tensors += optimizer.state.get(parameter, {}).values()
    tensors.append(torch.get_rng_state())
    result = hashlib.sha256()
    for value in tensors:
        local = value.to_local() if isinstance(value, DTensor) else value
        result.update(local.numpy().tobytes() if isinstance(local, torch.Tensor) else repr(local).encode())
    return result.hexdigest()


def write(folder: str, case: str, monitor: Any, error: BaseException | None, **more: Any) -> None:
    """Write CASE.rank<r>.json: the monitor's checks and findings, rank 0's events of CASE.jsonl, and the error."""
    events = Path(folder, f"{case}.jsonl")
    reports = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    last = monitor.last if monitor is not None else None
    findings = last.findings if last else ()
    result = {
        "checks": monitor.checks if monitor is not None else 0,
        "verdict": last.verdict if last else None,
        "codes": sorted({finding.code for finding in findings}),
        "names": sorted({name for finding in findings for name in finding.tensors}),
        "evidence": [finding.evidence for finding in findings],
        "tensors": last.counts.tensors if last else None,
        "steps": [row["step"] for row in reports if row["event"] == "check"],
        "ended": [row["exception"] for row in reports if row["event"] == "end"],
        "error": f"{type(error).__name__}: {error}" if error else "",
    }
    Path(folder, f"{case}.rank{RANK}.json").write_text(json.dumps(result | more))


@contextmanager
def written(folder: str, case: str, result: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Write the outcome of the training in this context, with its error, which propagates.

    result: returns further fields for `write` after the training.
    """
    try:
        yield
    except Exception as error:
        write(folder, case, error=error, **result())
        raise
    write(folder, case, error=None, **result())
