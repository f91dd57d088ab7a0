"""Nothing in a checkpoint is executed, and no file affects the reading of the next file."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import Call, Global, _Pickler, _Stored, save_pth, save_records

import syncheck
from syncheck.errors import CheckpointError, MalformedFile, RefusedFile

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")

# An argument that would make the canary file if it were executed, and callables.
PAYLOADS = {
    "touch {canary}": "os:system posix:system nt:system subprocess:getoutput subprocess:Popen os.path:os.system",
    "open('{canary}', 'w')": "builtins:eval builtins:exec __builtin__:eval",
    "{canary}": "builtins:open runpy:run_path",
    "os": "builtins:__import__ builtins:getattr importlib:import_module importlib.util:find_spec",
    "x": "torch.hub:load torch.utils.cpp_extension:load types:FunctionType timeit:timeit pydoc:pipepager "
    "multiprocessing.util:spawnv_passfds socket:create_connection ctypes:CDLL operator:attrgetter pickle:loads "
    "_pickle:loads sys:exit",
}


@pytest.mark.parametrize(
    ("argument", "function"), [(argument, name) for argument, names in PAYLOADS.items() for name in names.split()]
)
def test_code_execution_is_refused(tmp_path: Path, argument: str, function: str) -> None:
    """A callable for code execution is refused by name, and nothing is executed."""
    canary = tmp_path / "canary"
    module, name = function.split(":")
    call = Call(Global(module, name), (argument.replace("{canary}", str(canary)),))
    with pytest.raises(RefusedFile, match="nothing was run") as caught:
        syncheck.read(str(save_pth(tmp_path / "evil.pth", {"w": WEIGHT, "evil": call})))
    assert name in str(caught.value)
    assert not canary.exists()


def test_reduce_of_a_real_object_is_refused(tmp_path: Path) -> None:
    """The classic payload, an object whose __reduce__ calls os.system, is refused in a raw pickle too."""
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = save_records(tmp_path / "evil.pth", pickle.dumps({"a": Evil()}, protocol))
        with pytest.raises(RefusedFile):
            syncheck.read(str(path))
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        syncheck.read(str(tmp_path / "raw.pth"))
    assert not canary.exists()


def test_dangerous_names_are_refused_without_a_call(tmp_path: Path) -> None:
    """A dangerous name is refused on lookup, because a later opcode may call it."""
    with pytest.raises(RefusedFile, match=r"builtins\.eval"):
        syncheck.read(str(save_pth(tmp_path / "a.pth", {"w": WEIGHT, "f": Global("builtins", "eval")})))


def test_harmless_unknown_names_are_inert(tmp_path: Path) -> None:
    """Paths, enums, partials, ranges and torch functions are inert, and their tensors are found."""
    names = [("pathlib", "PosixPath"), ("functools", "partial"), ("builtins", "range"), ("torch", "relu"), ("x", "Y")]
    tree = {"w": WEIGHT} | {name: Call(Global(module, name), (WEIGHT, "text")) for module, name in names}
    result = syncheck.read(str(save_pth(tmp_path / "a.pth", tree)))
    assert set(result.stubs) == {f"{module}.{name}" for module, name in names}
    assert list(result.tensors) == ["w", *(f"{name}.0" for _, name in names)]


STATES: list[Any] = [
    {"__defaults__": (1,)},
    {"__code__": 1},
    {"_call": 1},
    {"__class__": Global("x", "Y")},
    (None, {"__defaults__": (1,)}),
    (None, {"_call": Global("x", "Y")}),
    ({"_call": 1}, {"_call": 1}),
    (None, {"dtype": 1}),
]
TARGETS = [
    REBUILD,
    Global("torch._utils", "_rebuild_parameter"),
    Global("torch", "FloatStorage"),
    Global("torch", "float8_e5m2"),
    Global("torch", "Size"),
    Global("_codecs", "encode"),
    Global("collections", "OrderedDict"),
    Global("builtins", "set"),
    Global("numpy._core.multiarray", "_reconstruct"),
]


@pytest.mark.parametrize("state", STATES, ids=repr)
@pytest.mark.parametrize("target", TARGETS, ids=attrgetter("name"))
def test_stand_ins_cannot_be_changed(tmp_path: Path, target: Global, state: Any) -> None:
    """BUILD on a stand-in fails or has no effect, and the next file is read correctly."""
    path = tmp_path / "evil.pth"
    # A state without a call, as if the stand-in were a new object.
    stream = _pickled_build(target, state)
    with pytest.raises(MalformedFile):
        syncheck.read(str(save_records(path, stream)))
    good = syncheck.read(str(save_pth(tmp_path / "good.pth", {"w": WEIGHT}))).tensors["w"]
    assert (good.dtype, good.shape, good.strides) == ("float32", (2, 3), (3, 1))


def _pickled_build(target: Global, state: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.write(pickle.PROTO + b"\x02")
    pickler.save(target)
    pickler.save(state)
    pickler.write(pickle.BUILD + pickle.STOP)
    return buffer.getvalue()


def test_stub_classes_are_not_shared_between_files(tmp_path: Path) -> None:
    """Attributes set by a file on a stub's class do not affect the next file."""
    stream = _pickled_build(Global("x", "Y"), (None, {"__call__": 1, "append": 2, "name": "z"}))
    for _ in range(2):
        with contextlib.suppress(CheckpointError):
            syncheck.read(str(save_records(tmp_path / "evil.pth", stream)))
        result = syncheck.read(str(save_pth(tmp_path / "good.pth", {"y": Call(Global("x", "Y"), (WEIGHT,))})))
        assert list(result.tensors) == ["y.0"]


def parameter_group_bomb() -> bytes:
    """2^60 references in an optimizer's settings, which are converted to text."""
    inner = b"]q\x00" + b"".join(b"0](h%ch%ceq%c" % (i, i, i + 1) for i in range(60))
    return b"\x80\x02}(X\x05\x00\x00\x00state}X\x0c\x00\x00\x00param_groups]}X\x01\x00\x00\x00a" + inner + b"sau."


@pytest.mark.slow  # it unfolds up to the limit
@pytest.mark.timeout(30)
def test_endless_settings(tmp_path: Path) -> None:
    """Exponentially unfolding settings are malformed, detected in bounded time."""
    began = time.process_time()
    with pytest.raises(MalformedFile):
        syncheck.read(str(save_records(tmp_path / "a.pth", parameter_group_bomb())))
    assert time.process_time() - began < 25


STORED = _Stored("0", "FloatStorage", 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((storage, 0, (2,), (1,)), "without a storage") for storage in ("x", None, WEIGHT, ())),
        ((STORED, 4, (2, 2), (2, 1)), "ends at byte 32 of a record of 24"),
        ((STORED, 0, (2, 2**62), (1, 1)), "ends at byte"),
        ((STORED, 0, (2, 3), (1,)), "2 sizes but 1 strides"),
    ],
)
def test_impossible_tensors(tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    """A tensor without a storage, beyond its record or with impossible sizes is malformed before data is read."""
    path = save_pth(tmp_path / "a.pth", {"good": WEIGHT, "w": Call(REBUILD, arguments)})
    with pytest.raises(MalformedFile, match=message):
        syncheck.read(str(path))
