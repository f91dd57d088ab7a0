"""The documents cover every option, method, model and data set of the trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from train.data import DATASETS
from train.methods import METHODS
from train.models import MODELS
from train.options import build_parser

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[2]


def test_every_option_is_documented() -> None:
    """README.md or a page of docs/ names every option."""
    text = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    options = [name for action in build_parser()._actions for name in action.option_strings if name.startswith("--")]
    assert len(options) > 70
    assert [name for name in options if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [("README.md", METHODS), ("docs/methods.md", METHODS), ("docs/data.md", MODELS), ("docs/data.md", DATASETS)],
    ids=["README", "methods", "models", "data sets"],
)
def test_every_choice_is_documented(page: str, names: Iterable[str]) -> None:
    """Every choice of --method, --model and --data has a table row on its page, and methods are named in the README."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page != "README.md":  # the first column of tables
        text = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    assert [name for name in names if f"`{name}`" not in text] == [], f"add to {page}"


def test_a_training_with_ddp_is_explained_in_five_short_files() -> None:
    """The files that docs/methods.md recommends to learners have fewer than 500 lines, and no other method in them."""
    files = ["engine.py", "data/sampler.py", "trainer.py", "methods/single.py", "methods/ddp.py"]
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert all(f"](../train/{name})" in page for name in files)
    assert sum(len((ROOT / "train" / name).read_text(encoding="utf-8").splitlines()) for name in files) < 500
