"""The text: its file, samples, refused options, and training on it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from support.scenarios import trained

from train.data import DataOptions, load_data
from train.data.text import FOLDER
from train.errors import UserError
from train.launch import RankContext
from train.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path


def test_every_byte_is_predicted_once() -> None:
    """The samples contain the text in order, and the target of each byte is the next byte."""
    content = (FOLDER / "text.txt").read_bytes()
    assert hashlib.sha256(content).hexdigest() in (FOLDER / "LICENSE").read_text()
    data = load_data("text", None, None)
    assert (len(data.train), len(data.test), data.classes, data.image_size) == (4078, 453, 256, 64)
    x, y = data.train[:]
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((4078, 64), (4078, 64), torch.int64, torch.int64)
    assert bytes(x.flatten().tolist()) == content[: 4078 * 64]
    assert bytes(y.flatten().tolist()) == content[1 : 4078 * 64 + 1]
    start = len(content) - len(content) // 10
    assert bytes(data.test[2][0].tolist()) == content[start + 128 : start + 192]
    assert len(load_data("text", None, 40).train) == 40


def test_unsuitable_texts_and_options_are_refused(tmp_path: Path) -> None:
    """A missing or short text, and augmentation, are errors."""
    with pytest.raises(UserError, match=r"text\.txt: not found; set --data-dir"):
        load_data("text", tmp_path, None)
    (tmp_path / "text.txt").write_bytes(b"x" * 649)
    with pytest.raises(UserError, match=r"649 bytes is too short; needs at least 650"):
        load_data("text", tmp_path, None)
    (tmp_path / "text.txt").write_bytes(b"x" * 650)
    assert len(load_data("text", tmp_path, None).test) == 1
    with pytest.raises(UserError, match=r"^--augment basic: "):
        load_data("text", None, None, DataOptions(augment="basic"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-tiny", "gpt-tiny-moe"])
def test_a_model_learns_the_text(model: str) -> None:
    """The loss per byte decreases from log(256) = 5.5 to below 3.8."""
    job = trained(
        RankContext(), Settings(model=model, data="text", optimizer="adamw", lr=0.005, width=32, max_steps=30, depth=1)
    )
    x, y = job.loaders.dataset[:64]
    with torch.no_grad():
        assert F.cross_entropy(job.method.module(x).flatten(0, 1), y.flatten()) < 3.8
