"""Partial reads of a tensor in memory are correct for every memory order, and nothing is cached."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from syncheck.live.memory import tensor_bytes
from syncheck.live.memory.tensor_bytes import TensorBytes

BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
LAID: dict[str, Any] = {
    "in order": BASE,
    "channels last": BASE.to(memory_format=torch.channels_last),
    "transposed": BASE.permute(3, 1, 0, 2),
    "every second": BASE[:, :, ::2, 1::3],
    "expanded": torch.arange(3.0).expand(4, 3),
    "one row": BASE.permute(3, 1, 0, 2)[:1],
    "one of many": torch.arange(12.0).reshape(3, 4)[1::5, 2:3],
    "a number": torch.tensor(3.5),
    "nothing": torch.ones(0, 3).t(),
    "complex, conjugated": torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]]).conj().t(),
    "negated": torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]]).conj().imag,
    "a parameter": torch.nn.Parameter(torch.rand(4, 3).t()),
    "float16": BASE.half().permute(3, 1, 0, 2),
    "numpy, transposed": np.arange(24.0).reshape(2, 3, 4).T,
    "numpy, of the other byte order": np.arange(24, dtype=">i4").reshape(4, 6),
    "numpy, a number": np.array(7, dtype=">i8"),
}


def whole(source: Any) -> bytes:
    """Return the bytes in C order and native byte order, by the tensor's library."""
    if isinstance(source, np.ndarray):
        return source.astype(source.dtype.newbyteorder("=")).tobytes()
    return source.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).numpy().tobytes()


@pytest.mark.parametrize("how", LAID)
def test_any_range_of_bytes(how: str) -> None:
    """Any byte range, even within elements, equals the range of the tensor in C order, in all torch modes."""
    data, source = whole(LAID[how]), TensorBytes(LAID[how])
    chosen = random.Random(1)
    ranges = [sorted((chosen.randrange(len(data) + 9), chosen.randrange(len(data) + 9))) for _ in range(60)]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert source[:] == data
            for start, stop in ranges:
                assert source[start:stop] == data[start:stop], (start, stop)


def test_strided_tensors_are_copied_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """For other strides each read copies only its range, again each time, so changes are visible."""
    tensor = torch.zeros(1000, 500).t()
    copied: list[int] = []
    real = tensor_bytes.flat_bytes
    monkeypatch.setattr(tensor_bytes, "flat_bytes", lambda source: copied.append(source.numel()) or real(source))
    source = TensorBytes(tensor)
    assert source[4000:4040] == bytes(40)
    tensor[1] = 1  # the second row is bytes 4,000 to 8,000
    assert source[4000:4040] == whole(torch.ones(10))
    assert sum(copied) == 20
