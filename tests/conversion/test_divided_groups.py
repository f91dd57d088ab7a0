"""A fused weight and its bias in other groups: no option and no map makes them in sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import llama
from support.listings import list_codes

import syncheck
from syncheck.messages import Note, Undecided
from syncheck.options import DiffOptions
from syncheck.report.undecided import undecided_reason

if TYPE_CHECKING:
    from pathlib import Path

    from support.llama import Weights

WIDTH, LAYERS = 16, 3
RNG = np.random.default_rng(0)
Groups = tuple[int, int]


def make_parts(names: str) -> Weights:
    """Return layers with one linear module for each letter."""
    model = {"emb.weight": RNG.standard_normal((20, WIDTH)).astype("f4")}
    for i in range(LAYERS):
        for name in names:
            model[f"h.{i}.{name}.weight"] = RNG.standard_normal((WIDTH, WIDTH)).astype("f4")
            model[f"h.{i}.{name}.bias"] = RNG.standard_normal(WIDTH).astype("f4")
    return model


def fuse(model: Weights, names: str, groups: Groups, fused: str, *, transpose: bool = False) -> Weights:
    """Return a model with one module for all letters. groups: of the weight and of the bias."""
    joined = {"wte.weight": model["emb.weight"]}
    for i in range(LAYERS):
        for kind, count in zip(("weight", "bias"), groups, strict=True):
            parts = [model[f"h.{i}.{name}.{kind}"] for name in names]
            grouped = np.concatenate([part.reshape(count, -1, *part.shape[1:]) for part in parts], 1)
            whole = grouped.reshape(-1, *parts[0].shape[1:])
            joined[f"b.{i}.att.{fused}{kind}"] = np.ascontiguousarray(whole.T) if transpose else whole
    return joined


def diff_all(folder: Path, a: Weights, b: Weights) -> list[syncheck.Report]:
    """Return the comparisons in both directions with an accepted map, and with the map that the first one writes."""
    first, second = llama.write(folder / "a", a), llama.write(folder / "b", b)
    written = str(folder / "map.toml")
    accept = DiffOptions(accept_inferred=True)
    reports = [syncheck.diff(first, second, options=DiffOptions(accept_inferred=True, write_map=written))]
    reports.append(syncheck.diff(second, first, options=accept))
    reports += [syncheck.diff(*pair, options=DiffOptions(map=written)) for pair in ((first, second), (second, first))]
    return reports


QKV, KV = make_parts("qkv"), make_parts("kv")
DIVIDED = {
    "weight by head": fuse(QKV, "qkv", (4, 1), "query_key_value."),
    "bias by head": fuse(QKV, "qkv", (1, 4), "query_key_value."),
    "other numbers of groups": fuse(QKV, "qkv", (4, 2), "joined."),
    "row by row": fuse(QKV, "qkv", (WIDTH, 1), "joined."),
    "columns": fuse(QKV, "qkv", (4, 1), "c_attn.", transpose=True),
    "one word": fuse(QKV, "qkv", (4, 1), "in_proj_"),
}
SAME = {
    "concatenated": (QKV, fuse(QKV, "qkv", (1, 1), "query_key_value.")),
    "by head": (QKV, fuse(QKV, "qkv", (4, 4), "query_key_value.")),
    "row by row": (KV, fuse(KV, "kv", (WIDTH, WIDTH), "kv_")),
    "columns": (QKV, fuse(QKV, "qkv", (4, 4), "c_attn.", transpose=True)),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_other_groups_of_a_bias_are_never_in_sync(tmp_path: Path, case: str) -> None:
    """If weight and bias of a fused module are in other groups, every map leaves the verdict undecided, with marks."""
    for report in diff_all(tmp_path, QKV, DIVIDED[case]):
        assert (report.exit_code, undecided_reason(report).code) == (2, Undecided.DIVIDED_GROUPS)
        codes = list_codes(report.groups[-1].notes)
        assert codes.count(Note.DIVIDED_RULE) == 2
        assert Note.ACCEPTED_MAP not in codes


@pytest.mark.parametrize("case", SAME)
def test_equal_groups_of_a_bias_are_in_sync(tmp_path: Path, case: str) -> None:
    """A weight and a bias in the same groups contradict nothing."""
    assert [report.exit_code for report in diff_all(tmp_path, *SAME[case])] == [0, 0, 0, 0]


def test_groups_that_no_data_shows(tmp_path: Path) -> None:
    """A constant bias has any groups, also those that a map states; a bias with other values contradicts this map."""
    zeros = QKV | {name: np.zeros_like(bias) for name, bias in QKV.items() if name.endswith("bias")}
    assert [report.exit_code for report in diff_all(tmp_path, zeros, fuse(zeros, "qkv", (4, 1), "joined."))] == [0] * 4
    rules = []
    for kind, groups in (("weight", 4), ("bias", 1)):
        parts = [f"h.{{i}}.{name}.{kind}" for name in "qkv"]
        rules.append(f'[[rule]]\nname = "b.{{i}}.att.joined.{kind}"\nparts = {parts}\ngroups = {groups}\n')
    path = tmp_path / "stated.toml"
    path.write_text('[[rule]]\nname = "wte.weight"\nparts = ["emb.weight"]\n' + "".join(rules))
    options = DiffOptions(map=str(path))
    assert syncheck.diff(tmp_path / "a", tmp_path / "b", options=options).exit_code == 0
    llama.write(tmp_path / "b", fuse(QKV, "qkv", (4, 1), "joined."))
    llama.write(tmp_path / "a", QKV)
    assert syncheck.diff(tmp_path / "a", tmp_path / "b", options=options).exit_code == 2


def test_a_scale_of_each_part_has_no_groups(tmp_path: Path) -> None:
    """A tensor with one element for each part has no rows of the weight, so its rule contradicts nothing."""
    scales = {f"h.{i}.{name}.bias": RNG.standard_normal(8).astype("f4") for i in range(LAYERS) for name in "qkv"}
    model = QKV | scales
    fused = {
        name: fuse(QKV, "qkv", (4, 4), "joined.")[name] if name.endswith("weight") else bias
        for name, bias in fuse(model, "qkv", (4, 1), "joined.").items()
    }
    assert [report.exit_code for report in diff_all(tmp_path, model, fused)] == [0, 0, 0, 0]
