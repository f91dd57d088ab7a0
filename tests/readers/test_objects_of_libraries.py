"""Objects that libraries pickle: methods, nested classes, objects with a parent, byte strings of Python 2."""

from __future__ import annotations

import enum
import io
import pickle
from argparse import Namespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from support.checkpoints import Call, Global, save_pth, save_records
from support.listings import find_texts, map_fields

import syncheck
from syncheck.errors import RefusedFile
from syncheck.readers.pickles.tree import LOST

torch = pytest.importorskip("torch")
nn = torch.nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

W = np.arange(6, dtype=np.float32).reshape(2, 3)
ODD = np.array([1.0, 2.0, 3.0], np.float32)


def get(owner: Any, name: Any, *more: Any) -> Call:
    """Return an attribute as protocol 2 writes it."""
    return Call(Global("__builtin__", "getattr"), (owner, name, *more))


LAYER = Global("models", "Layer")
# Values of getattr, and the class that is listed for each of them.
ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "static method": (get(LAYER, "_cosine"), "models.Layer._cosine"),
    "nested class": (get(get(LAYER, "Mode"), "Inner"), "models.Layer.Mode.Inner"),
    "bound method": (get(Call(LAYER, (1,)), "forward"), "models.Layer.forward"),
    "method named as a builtin": (get(Call(LAYER, (1,)), "eval"), "models.Layer.eval"),
    "callback": (get(Call(LAYER, (1,)), "__call__"), "models.Layer.__call__"),
    "method of a dict": (get({"a": 1}, "get"), "dict.get"),
    "method of a tensor": (get(W, "add"), "torch.Tensor.add"),
    "class method of a known class": (get(Global("collections", "OrderedDict"), "fromkeys"), "Ordered.fromkeys"),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_an_attribute_is_a_stub(tmp_path: Path, kind: str) -> None:
    """An attribute of a class or object is listed as not compared, and the file is read."""
    value, stub = ATTRIBUTES[kind]
    result = syncheck.read(str(save_pth(tmp_path / "a.pth", {"w": W, "x": value})))
    assert stub in result.stubs
    assert "w" in result.tensors


def test_objects_of_a_nested_class_are_found(tmp_path: Path) -> None:
    """A tensor in an object of a class that getattr looked up is compared."""
    stream = b"\x80\x02}(X\x01\x00\x00\x00xc__builtin__\ngetattr\ncmodels\nLayer\nX\x04\x00\x00\x00Mode\x86R"
    stream += b"ccollections\nOrderedDict\n)R\x85Ru."
    result = syncheck.read(str(save_records(tmp_path / "a.pth", stream)))
    assert result.stubs == ("models.Layer", "models.Layer.Mode")


def test_tensors_of_a_bound_method_are_compared(tmp_path: Path) -> None:
    """A changed element in the object of a bound method is found."""
    for name, values in (("a", ODD), ("b", ODD), ("c", ODD + 1)):
        save_pth(tmp_path / f"{name}.pth", {"w": W, "x": get(Call(LAYER, (values,)), "forward")})
    assert syncheck.compare(tmp_path / "a.pth", tmp_path / "b.pth").exit_code == 0
    assert syncheck.compare(tmp_path / "a.pth", tmp_path / "c.pth").exit_code == 1


@pytest.mark.parametrize(
    "attack",
    [
        get(get(LAYER, "forward"), "__globals__"),
        get(LAYER, "__class__"),
        get(get(LAYER, "__init__"), "__globals__"),
        get(Call(LAYER, (1,)), "__reduce_ex__"),
        get(Global("torch.serialization", "os"), "system"),
        get(Global("numpy", "builtins"), "eval"),
        get(Global("enum", "types"), "FunctionType"),
        get(get(Global("torch", "utils"), "cpp_extension"), "load"),
        get(LAYER, "forward.__globals__"),
        get(LAYER, b"forward"),
        get(LAYER, "forward", None),
        Call(Global("__builtin__", "getattr"), (LAYER,)),
        Global("torch.serialization", "os.system"),
        Global("models", "Layer.forward.__globals__"),
    ],
    ids=repr,
)
def test_an_attribute_that_executes_code_is_refused(tmp_path: Path, attack: Any) -> None:
    """Attributes that lead to the interpreter or to a module for code execution are refused."""
    with pytest.raises(RefusedFile, match="nothing was run"):
        syncheck.read(str(save_pth(tmp_path / "a.pth", {"w": W, "x": attack})))


class Activation(enum.Enum):
    """An enum, which Python 3.11 writes with getattr."""

    RELU = "relu"


class Schedule:
    """A scheduler with a static method and a nested enum."""

    class Mode(enum.Flag):
        """A nested class."""

        ON = 1

    @staticmethod
    def cosine(t: float) -> float:
        """Return the argument."""
        return t


def test_methods_and_enums_of_torch_save(tmp_path: Path) -> None:
    """torch.save writes static methods, bound methods, enums and nested classes, and all of them are read."""
    layer = nn.Linear(2, 2)
    layer.hook = layer.extra_repr  # type: ignore[assignment]
    state = {"f": Schedule.cosine, "mode": Schedule.Mode.ON, "act": Activation.RELU, "layer": layer}
    torch.save(state, tmp_path / "a.pth")
    assert len(syncheck.read(str(tmp_path / "a.pth")).tensors) == 2


class Node:
    """A node with a parent, as in OmegaConf."""

    def __init__(self, parent: Any = None, **content: Any) -> None:
        self.parent = parent
        self.__dict__.update(content)


def tree_of_nodes(w: torch.Tensor) -> Any:
    """A root whose children refer to it and to each other."""
    root = Node(w=w)
    root.parts = [Node(root, value=i) for i in range(12)]  # type: ignore[attr-defined]
    for part in root.parts:  # type: ignore[attr-defined]
        part.siblings = root.parts  # type: ignore[attr-defined]
    return root


def ring(w: torch.Tensor) -> Any:
    """A ring of 150 objects in both directions; pickle fails for a longer ring."""
    nodes = [Node(value=i) for i in range(150)]
    for node, after in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        node.after, after.before = after, node  # type: ignore[attr-defined]
    nodes[75].w = w  # type: ignore[attr-defined]
    return nodes


def complete_graph(w: torch.Tensor) -> Any:
    """Objects that all refer to all others: 12! paths."""
    nodes = [Node(value=i) for i in range(12)]
    for node in nodes:
        node.others = nodes  # type: ignore[attr-defined]
    nodes[7].w = w  # type: ignore[attr-defined]
    return nodes[3]


def modules(w: torch.Tensor) -> Any:
    """A module whose submodule refers to it without being its parent."""
    outer = nn.Sequential(nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        outer[0].weight.copy_(w)
    object.__setattr__(outer[0], "owner", outer)
    outer[0].weight.module = outer[0]
    return outer


def mappings(w: torch.Tensor) -> Any:
    """Plain containers that contain themselves."""
    inner: dict[str, Any] = {"w": w}
    outer: list[Any] = [inner, 1]
    inner["up"], inner["self"] = outer, inner
    return outer


def below_the_metadata(w: torch.Tensor) -> Any:
    """An object that refers to the whole checkpoint, with its metadata block."""
    state: dict[str, Any] = {"model": {"w": w}, "syncheck": syncheck.metadata(run="a", rank=97, world_size=98)}
    state["trainer"] = Node(state)
    return state


GRAPHS: list[Callable[[torch.Tensor], Any]] = [tree_of_nodes, ring, complete_graph, modules, mappings]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("make", [*GRAPHS, below_the_metadata])
def test_a_container_that_contains_itself(tmp_path: Path, make: Callable[[torch.Tensor], Any], legacy: bool) -> None:
    """Every tensor in a graph of objects has one name, and a changed element is found."""
    for name, last in (("a", 3.0), ("b", 3.0), ("c", 4.0)):
        state = {"x": make(torch.tensor([1.0, 2.0, last]))}
        if make is below_the_metadata:
            state = state["x"]
        torch.save(state, tmp_path / f"{name}.pth", _use_new_zipfile_serialization=not legacy)
    result = syncheck.read(str(tmp_path / "a.pth"))
    assert len(result.tensors) == 1
    assert not find_texts(result.tensors, start=LOST)
    assert not find_texts(result.values, "world_size")
    assert syncheck.compare(tmp_path / "a.pth", tmp_path / "b.pth").exit_code == 0
    assert syncheck.compare(tmp_path / "a.pth", tmp_path / "c.pth").exit_code == 1


def test_names_do_not_lead_through_siblings(tmp_path: Path) -> None:
    """A tensor in a graph has the name of its shortest path."""
    first, second = Node(), Node(w=torch.ones(2))
    root = Node(first=first, second=second)
    first.parent = second.parent = root
    first.sibling = second  # type: ignore[attr-defined]
    torch.save({"net": root}, tmp_path / "a.pth")
    assert list(syncheck.read(str(tmp_path / "a.pth")).tensors) == ["net.second.w"]


def test_a_tensor_keeps_all_its_names_in_a_graph(tmp_path: Path) -> None:
    """A tied tensor with a reference to its module has the names of both places."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.module = layer
    torch.save({"a": layer, "b": layer.weight}, tmp_path / "a.pth")
    assert len(syncheck.read(str(tmp_path / "a.pth")).tensors) == 2


class _Python2(pickle._Pickler):
    """Writes bytes as the byte strings of Python 2."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, data: bytes) -> None:
        """Write the opcode of a byte string."""
        if self.proto == 0:
            self.write(b"S" + repr(data)[1:].encode() + b"\n")
        else:
            self.write(pickle.BINSTRING + len(data).to_bytes(4, "little") + data)

    dispatch[bytes] = save_bytes

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Write globals without importing them."""
        if isinstance(obj, Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Call):
            self.save_reduce(obj.function, obj.arguments, state=obj.state)
        else:
            super().save(obj, save_persistent_id)


def python_2(tree: Any, protocol: int = 2) -> bytes:
    """Return a pickle of Python 2."""
    buffer = io.BytesIO()
    _Python2(buffer, protocol).dump(tree)
    return buffer.getvalue()


def array_2(array: np.ndarray[Any, Any]) -> Call:
    """Return an array as numpy writes it under Python 2."""
    kind = Call(Global("numpy", "dtype"), (b"f4", 0, 1), (3, b"<", None, None, None, -1, -1, 0))
    state = (1, array.shape, kind, False, array.tobytes())
    return Call(Global("numpy.core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"), state)


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_pickles_of_python_2(tmp_path: Path, protocol: int) -> None:
    """Arrays, text in UTF-8 and other bytes, objects of copy_reg and numpy scalars are read."""
    kind = Call(Global("numpy", "dtype"), (b"f8", 0, 1), (3, b"<", None, None, None, -1, -1, 0))
    tree = {
        b"w": array_2(W),
        "größe".encode(): 3,
        b"raw": b"\xff\xfe\x80 bytes",
        b"lr": Call(Global("numpy.core.multiarray", "scalar"), (kind, np.float64(0.25).tobytes())),
        b"old": Call(Global("copy_reg", "_reconstructor"), (LAYER, Global("__builtin__", "object"), None), {b"t": 1}),
        b"sub": Call(
            Global("copy_reg", "_reconstructor"), (LAYER, Global("__builtin__", "dict"), {b"v": array_2(ODD)})
        ),
    }
    (tmp_path / "a.pkl").write_bytes(python_2(tree, protocol))
    result = syncheck.read(str(tmp_path / "a.pkl"))
    assert map_fields(result.tensors, "data") == {"w": W.tobytes(), "sub.v": ODD.tobytes()}
    assert result.values["größe"] == 3
    assert result.values["lr"] == 0.25
    assert result.values["raw"].encode("utf-8", "surrogateescape") == b"\xff\xfe\x80 bytes"
    assert result.values["old.t"] == 1


def test_a_changed_bit_in_a_pickle_of_python_2(tmp_path: Path) -> None:
    """Bytes that are no text in UTF-8 are compared exactly."""
    values = np.array([-1.5, np.nan, 1e-30], np.float32)
    for name, array in (("a", values), ("b", values), ("c", values * np.float32(-1))):
        (tmp_path / f"{name}.pkl").write_bytes(python_2({b"w": array_2(array)}))
    assert syncheck.compare(tmp_path / "a.pkl", tmp_path / "b.pkl").exit_code == 0
    assert syncheck.compare(tmp_path / "a.pkl", tmp_path / "c.pkl").exit_code == 1


def test_values_with_bytes_of_python_2_are_printed(tmp_path: Path, cli: Any) -> None:
    """Every output format contains values that are no text."""
    for i in range(2):
        (tmp_path / f"m_rank{i}.pkl").write_bytes(python_2({b"w": array_2(W), b"lr": b"\xff%d" % i}))
    for ending in ("json", "html", "md", "xml", "txt"):
        assert (
            cli("compare", tmp_path / "m_rank0.pkl", tmp_path / "m_rank1.pkl", "-o", tmp_path / f"r.{ending}").code == 1
        )


def test_a_namespace_in_itself(tmp_path: Path) -> None:
    """Arguments that refer to themselves are read."""
    arguments = Namespace(lr=0.1)
    arguments.me = arguments
    torch.save({"w": torch.ones(2), "args": arguments}, tmp_path / "a.pth")
    assert syncheck.read(str(tmp_path / "a.pth")).values["args.lr"] == 0.1
