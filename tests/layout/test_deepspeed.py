"""Tag folders of DeepSpeed, joined to whole tensors."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_all, find_texts, list_names
from support.states import omit_prefixes

import syncheck
from syncheck.cli import main
from syncheck.errors import MalformedFile
from syncheck.layout import deepspeed
from syncheck.messages import Note
from syncheck.options import DiffOptions
from syncheck.tensors.blocks import Files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.snapshots import Snapshot, Tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
RUNS = sorted(folder.name for folder in FIXTURES.iterdir())
# zero_to_fp32.py converts buffers to float32, here a buffer in bfloat16 and, by mistake, integers.
CONVERTED = {"zero3_scalar": {"mean", "count"}}
LABEL = "zero_pp_rank_0_mp_rank_00"


def read(run: str) -> Snapshot:
    """Open a tag folder of the fixtures."""
    return syncheck.read(str(FIXTURES / run / "tag"))


def contents(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Return the dtype, shape and bytes of each tensor."""
    with Files() as files:
        return {
            name: (tensor.dtype, tensor.shape, bytes(files.read(tensor, 0, tensor.numel, 0)))
            for name, tensor in tensors.items()
        }


@pytest.mark.parametrize("run", RUNS)
def test_the_model_equals_zero_to_fp32(run: str) -> None:
    """Weights, frozen parameters, tied parameters and buffers have the names and bytes of zero_to_fp32.py."""
    joined = deepspeed.join(read(run)).tensors
    model = contents(omit_prefixes(joined, "optimizer."))
    expected = contents(syncheck.read(str(FIXTURES / run / "fp32.bin")).tensors)
    # zero_to_fp32.py loses the frozen parameters of ZeRO 1.
    assert model.keys() - expected.keys() == ({"frozen.weight"} if run == "zero1_bf16" else set())
    different = {name for name, content in expected.items() if model[name] != content}
    assert different == CONVERTED.get(run, set())
    assert len(expected) > len(different) + 7


def test_zero_1_and_zero_3_are_one_model() -> None:
    """The same training with ZeRO 1 and with ZeRO 3 gives equal bytes, in the optimizer state of parameters too."""
    report = syncheck.diff(FIXTURES / "zero1_bf16" / "tag", FIXTURES / "zero3_bf16" / "tag")
    assert (report.verdict, report.counts.identical) == ("in_sync", 32)
    group = report.groups[-1]
    assert (group.kinds["optimizer"].identical, group.kinds["optimizer_step"].identical) == (14, 7)
    assert Note.WEIGHT_COPIES(count=8) in group.notes
    assert set(list_names(find_all(group.values, counts=True))) == set()


def test_zero_2_and_zero_3_are_close() -> None:
    """The same training in float32 with ZeRO 2 and with ZeRO 3 differs by rounding only."""
    options = DiffOptions(rtol=1e-4, atol=1e-6)
    report = syncheck.diff(FIXTURES / "zero2_fp32" / "tag", FIXTURES / "zero3_fp32" / "tag", options=options)
    assert (report.verdict, report.counts.tensors, report.counts.not_compared) == ("in_sync", 32, 0)


def flip(path: Path, tensor: Tensor, element: int) -> None:
    """Flip the lowest bit of an element of a tensor in a file."""
    data = bytearray(path.read_bytes())
    data[tensor.offset + 4 * element] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("run", "file", "stored", "element", "name", "index"),
    [
        # 100 elements of group 0 on 3 ranks, padded to 102: rank 1 starts at element 34, after 15 of embed.weight.
        ("zero2_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt",
         "optimizer.zero_pp_rank_1_mp_rank_00.single_partition_of_fp32_groups.0", 0, "up.weight", (3, 4)),
        ("zero2_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt",
         "optimizer.zero_pp_rank_1_mp_rank_00.optimizer_state_dict.single_partition_of_fp32_groups.0.exp_avg_sq", 0,
         "optimizer.up.weight.exp_avg_sq", (3, 4)),
        # Chunks of 5 and 12 elements: the second chunk of up.weight starts at element 12.
        ("zero3_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt",
         "optimizer.zero_pp_rank_1_mp_rank_00.fp32_flat_groups.0", 5, "up.weight", (2, 2)),
        # Parameters of 15, 15, 35 and 35 elements, with gaps up to multiples of 8.
        ("zero2_bf16", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt",
         "optimizer.zero_pp_rank_2_mp_rank_00.base_optimizer_state.0.exp_avg", 0,
         "optimizer.down.weight.exp_avg", (0, 0)),
    ],
)  # fmt: skip
def test_a_flipped_bit_has_its_global_index(
    tmp_path: Path, run: str, file: str, stored: str, element: int, name: str, index: tuple[int, ...]
) -> None:
    """One flipped bit of a rank's partition is found in its parameter, at the global index, with the file."""
    shutil.copytree(FIXTURES / run / "tag", tmp_path / "tag")
    flip(tmp_path / "tag" / file, read(run).tensors[stored], element)
    report = syncheck.diff(FIXTURES / run / "tag", tmp_path / "tag")
    assert report.exit_code == 1
    result = {diff.name: (diff.index, diff.places[1].path) for diff in report.groups[-1].tensors if diff.index}
    location = (index, str(tmp_path / "tag" / file))
    assert result == {name: location}


@pytest.mark.parametrize("run", RUNS)
def test_a_missing_partition_is_an_error(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the file of one rank, diff prints one line and ends with exit code 2."""
    for lost in sorted(FIXTURES.glob(f"{run}/tag/*zero_pp_rank_*")):
        shutil.copytree(FIXTURES / run / "tag", tmp_path / lost.name)
        (tmp_path / lost.name / lost.name).unlink()
        assert main(["diff", str(tmp_path / lost.name), str(FIXTURES / run / "tag")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "copy the files of all ranks into one folder" in line.lower()


HOSTILE: dict[str, dict[str, Any]] = {
    "negative size": {"{top}param_shapes.0.up.weight.0": -7},
    "huge size": {"{top}param_shapes.0.up.weight.0": 1 << 62},
    "text": {"{top}param_shapes.0.up.weight.0": "seven"},
    "fraction": {"{top}param_shapes.0.up.weight.0": 7.0},
    "other size": {"{top}param_shapes.0.up.weight.0": 8},
    "many dimensions": {f"{{top}}param_shapes.0.many.{i}": 1 for i in range(100_000)},
    "overflow": {f"{{top}}param_shapes.0.many.{i}": 1 << 60 for i in range(60)},
    "another parameter": {"{top}param_shapes.0.more.0": 1000},
    "a parameter twice": {"{top}param_shapes.1.up.weight.0": 7, "{top}param_shapes.1.up.weight.1": 5},
    "another group": {"{top}param_shapes.7.more.0": 3},
    "many parameters": {f"{{top}}param_shapes.0.p{i}.0": 1 << 40 for i in range(100_000)},
    "partitions": {f"optimizer.{LABEL.replace('0_mp', f'{i}_mp')}.partition_count{g}": 1 << 70
                   for i in range(3) for g in ("", ".0", ".1")},
}  # fmt: skip


@pytest.mark.parametrize("run", ["zero2_fp32", "zero3_fp32"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_numbers_are_one_line(run: str, case: str) -> None:
    """Shapes and counts without matching partitions are errors of one line, in bounded time."""
    snapshot = read(run)
    top = f"{LABEL}." if run.startswith("zero3") else ""
    changed = {name.format(top=top): value for name, value in HOSTILE[case].items()}
    retained = {
        name: value for name, value in snapshot.values.items() if not (case == "partitions" and "_count" in name)
    }
    start = time.monotonic()
    with pytest.raises(MalformedFile) as caught:
        deepspeed.join(replace(snapshot, values=retained | changed))
    assert time.monotonic() - start < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_partitions_without_shapes_and_odd_tensors() -> None:
    """Partitions without shapes, with a strided tensor or with several dtypes are errors."""
    snapshot = read("zero3_fp32")
    with pytest.raises(MalformedFile, match="param_shapes"):
        deepspeed.join(replace(snapshot, values={}))
    name = f"optimizer.{LABEL}.fp32_flat_groups.0"
    twice = replace(snapshot.tensors[name], strides=(2,))
    with pytest.raises(MalformedFile, match="flat tensors of 2 ranks"):
        deepspeed.join(replace(snapshot, tensors={**snapshot.tensors, name: twice}))
    half = replace(snapshot.tensors[name], dtype="float16")
    with pytest.raises(MalformedFile, match="parts of dtype float16 and float32"):
        deepspeed.join(replace(snapshot, tensors={**snapshot.tensors, name: half}))


def test_the_number_of_parts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit of parts, join raises an error instead of filling the memory."""
    monkeypatch.setattr(deepspeed, "_MOST_SHARDS", 50)
    with pytest.raises(MalformedFile, match="more than 50 parts"):
        deepspeed.join(read("zero3_fp32"))


def test_values_of_all_ranks_are_merged() -> None:
    """Equal values of ranks lose their label, different values keep it, and values of the layout are removed."""
    snapshot = read("zero2_fp32")
    name = "optimizer.zero_pp_rank_2_mp_rank_00.param_groups.0.lr"
    values = deepspeed.join(replace(snapshot, values={**snapshot.values, name: 0.5})).values
    assert {key: value for key, value in values.items() if key.endswith("0.lr")} == {
        "optimizer.param_groups.0.lr": 0.01,
        name: 0.5,
    }
    assert find_texts(values, start=("param_shapes", "optimizer.zero_pp_rank_1")) == []


def test_folders_with_model_parallelism_stay_as_they_are(tmp_path: Path) -> None:
    """Folders with parts of several model-parallel ranks, or without ZeRO partitions, are not joined."""
    for file in (FIXTURES / "zero1_bf16" / "tag").iterdir():
        shutil.copy(file, tmp_path / file.name)
        shutil.copy(file, tmp_path / file.name.replace("mp_rank_00", "mp_rank_01"))
    snapshot = syncheck.read(str(tmp_path))
    assert deepspeed.join(snapshot) is snapshot
    for file in tmp_path.glob("*_optim_states.pt"):
        file.unlink()
    snapshot = syncheck.read(str(tmp_path))
    assert deepspeed.join(snapshot) is snapshot
