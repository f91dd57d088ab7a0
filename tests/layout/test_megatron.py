"""Folders of Megatron-Core, joined to whole tensors."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.listings import find_all, find_texts, list_fields, list_names
from support.states import omit, replace_in_names

import syncheck
from syncheck.cli import main
from syncheck.errors import MalformedFile
from syncheck.layout import megatron, megatron_stacks
from syncheck.layout.whole_model import join
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.snapshots import Snapshot

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
LAYOUTS = [("gated", "tp2_pp2", 27), ("tied", "tp2_pp2", 52), ("tied", "tp2", 52), ("experts", "tp2_pp2_ep2", 55)]
FILE = "model_optim_rng.pt"


def ranks_of(model: str, layout: str) -> Path:
    """Return the folder with the ranks of a layout."""
    return FIXTURES / model / layout / "iter_0000500"


def copy(tmp_path: Path, model: str, layout: str) -> Path:
    """Return a copy of the folder with the ranks of a layout."""
    return Path(shutil.copytree(ranks_of(model, layout), tmp_path / "ranks"))


def flip(folder: Path, label: str, name: str, element: int) -> None:
    """Flip the lowest bit of an element of a tensor in the file of a rank."""
    tensor = syncheck.read(str(folder)).tensors[f"{label}.{name}"]
    data = bytearray(Path(tensor.path).read_bytes())
    data[tensor.offset + 4 * element] ^= 1
    Path(tensor.path).write_bytes(data)


@pytest.mark.parametrize(("model", "layout", "tensors"), LAYOUTS)
def test_the_ranks_are_the_distributed_checkpoint(model: str, layout: str, tensors: int) -> None:
    """Megatron-Core loaded all parts of these ranks from the distributed checkpoint of one process."""
    report = syncheck.diff(ranks_of(model, layout), FIXTURES / model / "distributed")
    assert (report.exit_code, report.counts.identical, report.counts.tensors) == (0, tensors, tensors)
    assert not list_names(find_all(report.groups[-1].values, counts=True))


def test_two_layouts_of_the_ranks_are_one_model() -> None:
    """Four ranks and two ranks store the same model."""
    report = syncheck.diff(ranks_of("tied", "tp2_pp2"), ranks_of("tied", "tp2"))
    assert (report.exit_code, report.counts.identical) == (0, 52)


@pytest.mark.parametrize(
    ("model", "label", "stored", "element", "name", "index", "rank"),
    [
        # Gate and up have 12 rows, of which each rank has 6: row 7 of rank 1 is row 7 of up.
        ("gated", "mp_rank_01_001", "decoder.layers.1.mlp.linear_fc1.weight", 7 * 8 + 2,
         "decoder.layers.3.mlp.linear_fc1.weight", (12 + 6 + 1, 2), 3),
        ("gated", "mp_rank_01_001", "decoder.layers.0.mlp.linear_fc1.weight", 5 * 8,
         "decoder.layers.2.mlp.linear_fc1.weight", (6 + 5, 0), 3),
        ("gated", "mp_rank_01_000", "decoder.layers.0.self_attention.linear_proj.weight", 4 + 3,
         "decoder.layers.0.self_attention.linear_proj.weight", (1, 4 + 3), 1),
        ("gated", "mp_rank_00_001", "output_layer.weight", 9, "output_layer.weight", (1, 1), 2),
        ("tied", "mp_rank_01_001", "decoder.layers.1.mlp.linear_fc1.bias", 3,
         "decoder.layers.3.mlp.linear_fc1.bias", (6 + 3,), 3),
        # The second rank of expert parallelism has experts 2 and 3.
        ("experts", "mp_rank_01_001_001", "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight", 4,
         "decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight", (1, 4), 7),
    ],
)  # fmt: skip
def test_one_flipped_bit(
    tmp_path: Path, model: str, label: str, stored: str, element: int, name: str, index: tuple[int, ...], rank: int
) -> None:
    """A bit in the file of one rank is found at its index in the whole model, with rank and file."""
    folder = copy(tmp_path, model, next(layout for is_own, layout, _ in LAYOUTS if is_own == model))
    flip(folder, label, stored, element)
    report = syncheck.diff(folder, FIXTURES / model / "distributed")
    assert report.exit_code == 1
    different = find_all(report.groups[-1].tensors, out_of_sync=True)
    assert list_fields(different, "name", "index") == [(name, index)]
    location = different[0].places[0]
    assert (location.path, location.rank) == (str(folder / label / FILE), rank)


@pytest.mark.parametrize(
    ("model", "label", "stored", "name"),
    [
        ("gated", "mp_rank_01_001", "decoder.layers.1.input_layernorm.weight",
         "decoder.layers.3.input_layernorm.weight"),
        ("tied", "mp_rank_01_001", "output_layer.weight", "embedding.word_embeddings.weight"),
        ("tied", "mp_rank_01_000", "decoder.layers.0.mlp.linear_fc2.bias", "decoder.layers.0.mlp.linear_fc2.bias"),
        ("experts", "mp_rank_00_000_001", "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.router.weight"),
        ("experts", "mp_rank_00_000_001", "decoder.layers.0.self_attention.linear_qkv.weight",
         "decoder.layers.0.self_attention.linear_qkv.weight"),
    ],
)  # fmt: skip
def test_copies_that_differ(tmp_path: Path, model: str, label: str, stored: str, name: str) -> None:
    """Copies within the ranks are compared, and a difference is reported before the comparison with B."""
    folder = copy(tmp_path, model, next(layout for is_own, layout, _ in LAYOUTS if is_own == model))
    flip(folder, label, stored, 1)
    report = syncheck.diff(folder, FIXTURES / model / "distributed")
    assert report.exit_code == 1
    assert list_names(find_all(report.groups[0].tensors, out_of_sync=True)) == [name]
    assert len(report.groups) == 2


def lose_a_rank(folder: Path) -> None:
    """The folder of one rank is missing."""
    shutil.rmtree(folder / "mp_rank_01_001")


def keep_one_rank(folder: Path) -> None:
    """The folders of all ranks but one are missing."""
    for label in ("mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"):
        shutil.rmtree(folder / label)


def mix_layouts(folder: Path) -> None:
    """One rank is of another run, with another degree of tensor parallelism."""
    shutil.copy(ranks_of("tied", "tp2") / "mp_rank_01" / FILE, folder / "mp_rank_01_001" / FILE)


def mix_models(folder: Path) -> None:
    """One rank is of a model without an output layer, and with equal degrees."""
    shutil.copy(ranks_of("tied", "tp2_pp2") / "mp_rank_01_001" / FILE, folder / "mp_rank_01_001" / FILE)


@pytest.mark.parametrize("damage", [lose_a_rank, keep_one_rank, mix_layouts, mix_models])
def test_damaged_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]) -> None:
    """One line, and exit code 2."""
    folder = copy(tmp_path, "gated", "tp2_pp2")
    damage(folder)
    assert main(["diff", str(folder), str(FIXTURES / "gated" / "distributed"), "--no-config"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err


def test_the_optimizer_is_not_compared(tmp_path: Path) -> None:
    """Its parameters have numbers: the verdict is not in sync, unless parameters only are selected."""
    torch = pytest.importorskip("torch")
    folder = copy(tmp_path, "gated", "tp2_pp2")
    for file in folder.glob(f"*/{FILE}"):
        content = torch.load(file, weights_only=False)
        param = next(iter(content["model"].values()))
        state = {"state": {0: {"exp_avg": torch.zeros_like(param)}}, "param_groups": [{"params": [0]}]}
        torch.save({**content, "optimizer": state}, file)
    for second in (folder, FIXTURES / "gated" / "distributed"):
        assert syncheck.diff(folder, second).exit_code in (1, 2)
        only = DiffOptions(only=("params",))
        assert syncheck.diff(folder, second, options=only).exit_code == 0
    assert syncheck.diff(folder, folder).verdict == "undecided"


@pytest.mark.parametrize("count", [0, 5])
def test_the_state_of_casts_is_not_compared(tmp_path: Path, count: int) -> None:
    """Bytes of an extra state are no tensor of the model, and a further tensor of another name is."""
    torch = pytest.importorskip("torch")
    folder = copy(tmp_path, "gated", "tp2_pp2")
    for name, exit_code in (("linear_qkv._extra_state", 0), ("linear_qkv.extra", 1)):
        for file in folder.glob(f"*/{FILE}"):
            content = torch.load(file, weights_only=False)
            content["model"][f"decoder.layers.0.self_attention.{name}"] = torch.ones(count, dtype=torch.uint8)
            torch.save(content, file)
        assert syncheck.diff(FIXTURES / "gated" / "distributed", folder).exit_code == exit_code


def test_two_tensors_of_one_name_are_kept() -> None:
    """A last stage with the tied embedding and a copy of it loses neither."""
    snapshot = syncheck.read(str(ranks_of("tied", "tp2_pp2")))
    twice = {
        name.replace("output_layer", "embedding.word_embeddings"): tensor
        for name, tensor in snapshot.tensors.items()
        if name.endswith("output_layer.weight")
    }
    ranks = megatron.split(replace(snapshot, tensors={**snapshot.tensors, **twice}))
    assert sum(len(is_own.tensors) for is_own in ranks.values()) == len(snapshot.tensors) + len(twice)
    assert sum(1 for is_own in ranks.values() for tensor in is_own.tensors.values() if tensor.refused) == len(twice)


def test_missing_layers_and_other_layouts() -> None:
    """A gap in the layers is refused, and layouts that names do not show are not joined."""
    snapshot = syncheck.read(str(ranks_of("gated", "tp2_pp2")))
    lost = {name: tensor for name, tensor in snapshot.tensors.items() if ".layers.0." not in name}
    with pytest.raises(MalformedFile):
        megatron.split(replace(snapshot, tensors=lost))
    half = replace_in_names(snapshot.tensors, "_000.", "_000.model1.")
    with pytest.raises(MalformedFile):
        megatron.split(replace(snapshot, tensors=half))
    named = replace_in_names(snapshot.tensors, "linear_proj", "other")
    ranks = megatron.split(replace(snapshot, tensors=named))
    refused = {name for own_values in ranks.values() for name, tensor in own_values.tensors.items() if tensor.refused}
    assert refused == {f"decoder.layers.{i}.self_attention.other.weight" for i in range(4)}


def interleave(snapshot: Snapshot, *, are_global: bool = False) -> Snapshot:
    """Return the four layers of two stages as two virtual stages per rank. are_global: number them over the model."""
    tensors = {}
    for name, tensor in snapshot.tensors.items():
        label, stage, inner = name[:10], int(name[11:14]), name[15:]
        chunk = stage  # the embedding is in the first chunk of the first stage, the output in the last
        if match := re.match(r"decoder\.layers\.(\d)\.", inner):
            layer = 2 * stage + int(match[1])
            chunk, stage = divmod(layer, 2)
            inner = f"decoder.layers.{layer if are_global else 0}.{inner[match.end() :]}"
        tensors[f"{label}_{stage:03}.model{chunk}.{inner}"] = tensor
    return replace(snapshot, tensors=tensors)


@pytest.mark.parametrize("are_global", [False, True], ids=["from 0", "of the model"])
@pytest.mark.parametrize("model", ["gated", "tied"])
def test_virtual_pipeline_stages_are_joined(model: str, are_global: bool) -> None:
    """Layers of `model0` continue over all stages before those of `model1`."""
    snapshot = syncheck.read(str(ranks_of(model, "tp2_pp2")))
    plain = join(megatron.split(snapshot), "plain")
    virtual = join(megatron.split(interleave(snapshot, are_global=are_global)), "virtual")
    optimizer = set(find_texts(plain.tensors, start="optimizer."))
    assert {
        name: t for name, t in virtual.tensors.items() if ".optimizer." not in name and name in plain.tensors
    } == omit(plain.tensors, *optimizer)


def test_many_layers_take_bounded_time() -> None:
    """A distributed checkpoint can claim a million layers without elements."""
    snapshot = syncheck.read(str(FIXTURES / "gated" / "distributed"))
    name, tensor = next((name, t) for name, t in snapshot.tensors.items() if "linear_proj" in name)
    start = time.monotonic()
    hostile = replace(tensor, shape=(1 << 60, 0), strides=(1, 1), shards=())
    assert megatron_stacks.unstack(replace(snapshot, tensors={name: hostile})).tensors[name].shape == (1 << 60, 0)
    assert time.monotonic() - start < 5


def test_shards_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`show --shards` lists the boxes of each rank."""
    assert main(["show", "--shards", str(ranks_of("gated", "tp2_pp2"))]) == 0
    assert "decoder.layers.3.mlp.linear_fc1.weight" in capsys.readouterr().out
