"""The documents cover every option, method, model and data set of the trainer."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.listings import find_texts, join_fields, list_names

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
    options = find_texts(join_fields(build_parser()._actions, "option_strings"), start="--")
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


def test_a_training_with_ddp_is_a_short_walk() -> None:
    """The walk of docs/methods.md from the command to the saved file has five files and fewer than 450 lines.

    The docstrings of the modules are counted too. What the page names beside the walk exists and is short.
    """
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[\w/]+\.py\]\(\.\./(train/[\w/]+\.py)\) \| (`.*?): ", page, re.MULTILINE)
    walk = {path: set(re.findall(r"`(\w+)`", functions)) for path, functions in rows}
    assert len(walk) == 5
    assert 300 < sum(count_lines(path, names) for path, names in walk.items()) < 450
    methods = {"ddp": {"wrap", "no_sync", "backward"}, "single": {"build_optimizer", "split", "train", "step"}}
    assert sum(count_lines(f"train/methods/{name}.py", names) for name, names in methods.items()) < 100


def count_lines(path: str, names: set[str]) -> int:
    """Count the lines of a module's docstring, and of its classes and functions with these names."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    rooms = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names
    ]
    assert set(list_names(rooms)) == names
    return sum((room.end_lineno or 0) - room.lineno + 1 for room in [tree.body[0], *rooms])
