"""Rows and columns with data that B lacks are lost, and accepting padding does not accept them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support import llama

import syncheck
from syncheck.diagnose.model_layouts import PartLost
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

NAME = "model.embed_tokens.weight"
ROWS, COLUMNS = torch.randn(8, 4), torch.zeros(8, 2)
# An additional tensor that stays equal.
BODY = {"body.weight": torch.randn(6, 6)}


def compare(folder: Path, a: torch.Tensor, b: torch.Tensor, name: str, allow: tuple[str, ...] = ()) -> syncheck.Report:
    """Compare two models that differ in one tensor."""
    for side, tensor in (("a", a), ("b", b)):
        torch.save({"model": {**BODY, name: tensor.clone()}}, folder / f"{side}.pt")
    return syncheck.diff(folder / "a.pt", folder / "b.pt", options=DiffOptions(allow=allow))


CASES = [
    (ROWS, ROWS[:6], NAME, "SYN318"),
    (ROWS, ROWS[:7], NAME, "SYN318"),  # one row is equal to all others
    (ROWS, ROWS[:, :3], "layers.0.down_proj.weight", "SYN318"),
    (ROWS, ROWS[:6].bfloat16(), NAME, "SYN318"),  # and a conversion
    (torch.ones(8), torch.ones(6), "norm.weight", "SYN318"),  # the ones of a norm are equal, and no padding
    (torch.cat([ROWS, torch.ones(3, 4)]), ROWS, "layers.0.up_proj.weight", "SYN318"),
    (torch.cat([ROWS, torch.zeros(1, 4)]), ROWS, NAME, "SYN309"),
    (torch.cat([ROWS, torch.ones(3, 4)]), ROWS, NAME, "SYN309"),  # padding with the same new token
    (torch.cat([ROWS, COLUMNS], 1), ROWS, "layers.0.down_proj.weight", "SYN309"),
    (ROWS[:6], ROWS, NAME, "SYN318"),  # B has everything that A has, and data
    (ROWS, torch.cat([ROWS, COLUMNS], 1), "layers.0.down_proj.weight", "SYN309"),
    (ROWS[:, :3], ROWS, "layers.0.down_proj.weight", "SYN318"),
    (ROWS, torch.cat([ROWS, torch.ones(3, 4)]), NAME, "SYN309"),
    (ROWS, torch.cat([ROWS, torch.ones(3, 4)]), "layers.0.up_proj.weight", "SYN318"),
    (torch.ones(6), torch.ones(8), "norm.weight", "SYN318"),
    (ROWS[:6].bfloat16(), ROWS.bfloat16().float(), NAME, "SYN318"),
]


@pytest.mark.parametrize(("a", "b", "name", "code"), CASES)
def test_lost_data_and_padding(tmp_path: Path, a: torch.Tensor, b: torch.Tensor, name: str, code: str) -> None:
    """The code depends on the values in one model only, and each code is accepted by its own name only."""
    [finding] = compare(tmp_path, a, b, name).groups[-1].findings
    assert (finding.code, finding.tensors, finding.certainty) == (code, (name,), "proved")
    for allowed in ("SYN309", "SYN318"):
        report = compare(tmp_path, a, b, name, (allowed,))
        assert report.exit_code == int(allowed != code)


def test_gained_and_lost_rows_of_one_pair(tmp_path: Path) -> None:
    """An accepted padding of the embedding does not hide the rows that the output layer lost."""
    model = llama.make_model()
    copy = dict(model)
    copy[NAME] = torch.cat([torch.from_numpy(model[NAME]), torch.zeros(28, llama.WIDTH)]).numpy()
    copy["lm_head.weight"] = model["lm_head.weight"][:-2]
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", copy)
    report = syncheck.diff(a, b, options=DiffOptions(allow=("SYN309",)))
    assert report.exit_code == 1
    allowed = {finding.code: finding.allowed for finding in report.groups[-1].findings}
    assert allowed == {"SYN309": True, "SYN318": False}


def test_added_data_is_stated(tmp_path: Path) -> None:
    """Rows of B that A lacks are no padding, and nothing was lost."""
    [finding] = compare(tmp_path, ROWS[:6], ROWS, NAME).groups[-1].findings
    assert finding.evidence == f"B has 2 more indices of dimension 0 in {NAME}, which hold data"
    assert (finding.cause.code, finding.fix.code) == (PartLost.CAUSE_ADDED, PartLost.FIX_ADDED)


def test_the_size_of_accepted_padding_is_no_other_setting(tmp_path: Path) -> None:
    """The configuration of a padded model states its number of rows; beside equal rows, the number counts."""
    model = llama.make_model()
    padded = dict(model)
    for name in (NAME, "lm_head.weight"):
        padded[name] = torch.cat([torch.from_numpy(model[name]), torch.zeros(28, llama.WIDTH)]).numpy()
    rows = len(model[NAME])
    config = llama.CONFIG | {"model_type": "llama"}
    a = llama.write(tmp_path / "a", model, config | {"vocab_size": rows})
    b = llama.write(tmp_path / "b", padded, config | {"vocab_size": rows + 28})
    assert syncheck.diff(a, b, options=DiffOptions(allow=("SYN309",))).exit_code == 0
    b = llama.write(tmp_path / "b", model, config | {"vocab_size": rows + 28})
    assert syncheck.diff(a, b).exit_code == 2


def test_a_single_token_is_no_padding_of_a_map(tmp_path: Path) -> None:
    """A map with a multiple cuts a single zero row, and never a single row with values."""
    model = llama.make_model()
    for name in (NAME, "lm_head.weight"):
        model[name] = torch.randn(127, llama.WIDTH).numpy()
    a = llama.write(tmp_path / "a", model, llama.CONFIG)
    for last_row, code in ((torch.zeros(1, llama.WIDTH), 0), (torch.randn(1, llama.WIDTH), 1)):
        padded = {
            name: torch.cat([torch.from_numpy(model[name]), last_row]).numpy() for name in (NAME, "lm_head.weight")
        }
        converted = llama.to_megatron({**model, **{name: array[: llama.WORDS] for name, array in padded.items()}})
        converted["embedding.word_embeddings.weight"] = padded[NAME]
        converted["output_layer.weight"] = padded["lm_head.weight"]
        b = llama.write(tmp_path / "b", converted)
        for pair in ((a, b), (b, a)):
            assert syncheck.diff(*pair).exit_code == code
