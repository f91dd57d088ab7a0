"""Cases that other tools get wrong, each with the correct result.

On each case, a script with torch.equal or torch.allclose or a published comparison tool crashes, misses a difference,
or reports a difference between equal files. The comments list the results of other tools.
"""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import changed, network, save, save_pth, save_records, save_safetensors
from support.listings import list_codes
from support.states import omit

import syncheck

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    State = dict[str, Any]

NAME = "fc.weight"


def with_bit(bit: int) -> State:
    """Flip one bit of one element."""
    state = network()
    state[NAME].view(np.uint32)[3, 2] ^= np.uint32(1 << bit)
    return state


def with_value(value: Any) -> State:
    """Set one element."""
    state = network()
    state[NAME][3, 2] = value
    return state


def with_tensor(array: Any) -> State:
    """Replace a tensor."""
    return network() | {NAME: array}


def without() -> State:
    """Remove a tensor."""
    return omit(network(), NAME)


def permuted() -> State:
    """Reverse the rows of a tensor, which keeps all summary statistics."""
    return with_tensor(network()[NAME][::-1].copy())


def training(state: State, epoch: int = 3) -> State:
    """Return a training checkpoint of a state dict, with optimizer, epoch and RNG state."""
    moments = {0: {"exp_avg": state[NAME].copy(), "step": np.array(4, np.float32)}}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {"model": state, "optimizer": optimizer, "epoch": epoch, "rng": np.zeros(4, np.int64)}


def single(*values: Any, dtype: Any) -> State:
    """Return one small tensor."""
    return {NAME: np.array(values, dtype)}


ONE, SMALL = network(), {"a": np.arange(10, dtype=np.float32), "b": np.ones(3, np.float32)}
PREFIXED = {f"module.{name}": array for name, array in network().items()}
BF16, HALF = ml_dtypes.bfloat16, np.float16

# name: (first, second, exit code, status of each tensor unless identical, code of the finding)
CASES: dict[str, tuple[State, State, int, dict[str, str], str | None]] = {
    # "fine-tuned conservatively, weights barely moved"; one difference, from the name of the folder in the zip
    "same": (ONE, network(), 0, {}, None),
    # passed by allclose; cosine 1.0000; "bit-identical, confidence high"
    "one mantissa bit": (ONE, with_bit(0), 1, {NAME: "different"}, "SYN220"),
    # "structurally identical"; inf / nan
    "exponent bit": (ONE, with_bit(30), 1, {NAME: "different"}, "SYN220"),
    # "bit-identical"; or a difference like any other
    "zeros of two signs": (with_value(0.0), with_value(-0.0), 0, {NAME: "equal"}, None),
    # "bit-identical, confidence high"; a traceback; the score suppressed
    "NaN on one": (ONE, with_value(np.nan), 1, {NAME: "different"}, "SYN222"),
    # a difference, because NaN is unequal to itself; a traceback
    "same NaN on both": (with_value(np.nan), with_value(np.nan), 0, {}, None),
    # "shape change, architecture"
    "infinity on one": (ONE, with_value(np.inf), 1, {NAME: "different"}, "SYN222"),
    # KeyError; not mentioned; no name; no difference
    "missing key": (ONE, without(), 1, {NAME: "not_compared"}, "SYN101"),
    # missed, because only the first file's names are compared
    "extra key": (without(), ONE, 1, {NAME: "not_compared"}, "SYN101"),
    # RuntimeError; skipped in silence
    "shape": (ONE, with_tensor(np.ones((4, 10), np.float32)), 1, {NAME: "not_compared"}, "SYN102"),
    # compared after broadcasting, and equal
    "shape that broadcasts": (ONE, with_tensor(np.ones((1, 1), np.float32)), 1, {NAME: "not_compared"}, "SYN102"),
    # RuntimeError; a difference of 0.0002; counted as values
    "dtype": (ONE, with_tensor(ONE[NAME].astype(np.float64)), 1, {NAME: "not_compared"}, "SYN102"),
    # KeyError; 244 names listed; ZeroDivisionError; "200.0%" changed
    "prefix on one": (ONE, PREFIXED, 0, {}, "SYN103"),
    # equal by summaries: mean, norm and histogram stay
    "permuted values": (ONE, permuted(), 1, {NAME: "different"}, "SYN299"),
    # equal after a cast to float; excluded; skipped; no result
    "2^53 and its neighbour": (
        single(2**53, dtype=np.int64), single(2**53 + 1, dtype=np.int64), 1, {NAME: "different"}, "SYN205",
    ),
    # ZeroDivisionError, because tensors with fewer than 1000 elements are skipped; identical
    "only small tensors, all differ": (
        SMALL, {name: array + 1 for name, array in SMALL.items()}, 1, {"a": "different", "b": "different"}, "SYN299",
    ),
    # TypeError; AttributeError; "shared 1, identical", for `rng` only
    "training checkpoints that agree": (training(network()), training(network()), 0, {}, None),
    "training checkpoints whose model differs": (
        training(network()), training(network()) | {"model": with_bit(3)}, 1, {NAME: "different"}, "SYN220",
    ),
    "epoch": (training(network()), training(network(), epoch=4), 1, {}, "SYN106"),
}  # fmt: skip


EXTENSIONS = [(".pth", ".pth"), (".safetensors", ".safetensors"), (".pth", ".safetensors")]
RUNS = [
    (case, endings)
    for case, (first, *_) in CASES.items()
    for endings in EXTENSIONS
    if endings == EXTENSIONS[0] or "model" not in first  # safetensors holds flat names only
]


@pytest.mark.parametrize("case, endings", RUNS, ids=lambda value: value if isinstance(value, str) else "".join(value))
@pytest.mark.parametrize("swapped", [False, True])
def test_each_case_has_the_right_result(tmp_path: Path, case: str, endings: tuple[str, str], swapped: bool) -> None:
    """Each case has its verdict, statuses and finding, in each format and any order of the files."""
    first, second, code, statuses, finding = CASES[case]
    for rank, state in enumerate((second, first) if swapped else (first, second)):
        save(tmp_path / f"rank{rank}{endings[rank]}", state)
    report = syncheck.compare(tmp_path)
    (group,) = report.groups
    assert report.exit_code == code
    assert {diff.name: diff.status for diff in group.tensors if diff.kind != "rng"} == statuses
    assert list_codes(group.findings) == ([finding] if finding else [])


@pytest.mark.parametrize(
    "save, ending", [(save_pth, ".pth"), (save_safetensors, ".safetensors")], ids=[".pth", ".safetensors"]
)
def test_batchnorm_alone(tmp_path: Path, save: Callable[..., Any], ending: str) -> None:
    """Only the BatchNorm statistics differ, and the finding is SYN201."""
    for rank in range(2):
        save(tmp_path / f"rank{rank}{ending}", changed(network(), "running_mean", "running_var", by=rank))
    (group,) = syncheck.compare(tmp_path).groups
    assert group.counts.different == 4
    assert list_codes(group.findings) == ["SYN201"]


@pytest.mark.parametrize("dtype", [BF16, HALF, ml_dtypes.float8_e4m3fn], ids=lambda dtype: np.dtype(dtype).name)
def test_low_precision(tmp_path: Path, dtype: Any) -> None:
    """A difference in a bfloat16, float16 or float8 tensor is reported with its size and index."""
    for rank in range(2):
        save_safetensors(tmp_path / f"rank{rank}.safetensors", single(1.0, 1.5 if rank else 1.0, dtype=dtype))
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.status, diff.max_abs, diff.index) == ("different", 0.5, (1,))


@pytest.mark.parametrize("rtol", [None, 0.1])
def test_float16_and_float32_differ(tmp_path: Path, rtol: float | None) -> None:
    """A float32 and a float16 tensor differ in dtype, with any tolerance."""
    for rank, dtype in enumerate((np.float32, HALF)):
        save_safetensors(tmp_path / f"rank{rank}.safetensors", {NAME: network()[NAME].astype(dtype)})
    report = syncheck.compare(tmp_path, options=syncheck.Options(rtol=rtol, atol=rtol))
    (diff,) = report.groups[0].tensors
    assert (report.exit_code, diff.status, diff.reason) == (1, "not_compared", "dtype")


def test_zeroed_bytes_inside_a_tensor(tmp_path: Path) -> None:
    """64 zeroed bytes are reported as 16 contiguous elements of one tensor."""
    for rank in range(2):
        path = save_pth(tmp_path / f"rank{rank}.pth", network())
    tensor = syncheck.read(str(path)).tensors[NAME]
    data = bytearray(path.read_bytes())
    data[tensor.offset + 16 : tensor.offset + 80] = bytes(64)
    path.write_bytes(data)
    (diff,) = syncheck.compare(tmp_path).groups[0].tensors
    assert (diff.name, diff.mismatched, diff.extent) == (NAME, 16, "contiguous")


def test_files_saved_on_two_gpus(tmp_path: Path) -> None:
    """Tensors saved from cuda:0 and cuda:1 are in sync, and no GPU is needed to read them."""
    for rank in range(2):
        path = save_pth(tmp_path / f"rank{rank}.pth", network())
        with zipfile.ZipFile(path) as archive:
            pickled = archive.read(f"{path.stem}/data.pkl")
            records = {str(i): archive.read(f"{path.stem}/data/{i}") for i in range(len(network()))}
        # The pickle names the device of a storage as text: opcode, length, characters.
        cpu, cuda = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:%d" % rank
        assert cpu in pickled
        save_records(path, pickled.replace(cpu, cuda), records)
    report = syncheck.compare(tmp_path)
    assert report.verdict == "in_sync", report.unreadable


@pytest.mark.parametrize("tree", [[np.ones(2, np.float32)], np.ones(2, np.float32)], ids=["list", "bare tensor"])
def test_lists_and_bare_tensors(tmp_path: Path, tree: Any) -> None:
    """A list or a bare tensor is compared like a dict."""
    for rank in range(2):
        save_pth(tmp_path / f"rank{rank}.pth", tree)
    assert syncheck.compare(tmp_path).exit_code == 0
    save_pth(tmp_path / "rank1.pth", [tree[0] + 1] if isinstance(tree, list) else tree + 1)
    assert syncheck.compare(tmp_path).exit_code == 1


def test_empty_dicts_are_not_in_sync(tmp_path: Path) -> None:
    """Two checkpoints without a tensor are not in sync."""
    for rank in range(2):
        save_pth(tmp_path / f"rank{rank}.pth", {})
    assert syncheck.compare(tmp_path).exit_code == 2


def test_the_odd_rank_is_reported(tmp_path: Path) -> None:
    """The odd rank of eight is reported, even if it is rank 0."""
    for outlier in (0, 5):
        for rank in range(8):
            save_pth(tmp_path / f"{outlier}/rank{rank}.pth", changed(network(), "fc.bias", by=float(rank == outlier)))
        (finding,) = syncheck.compare(tmp_path / str(outlier)).groups[0].findings
        assert finding.ranks == (outlier,)
