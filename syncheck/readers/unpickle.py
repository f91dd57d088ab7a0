"""The one unpickler: builds plain containers and tensor places, imports nothing, runs nothing.

A pickle names the callables that rebuild its objects. Each name is looked up in three tables, never imported:

- `ALLOWED`: our own stand-ins for the few names that torch.save writes for tensors and plain containers.
- `REFUSED`: names that can only be there to run something. The whole file is refused.
- any other name becomes an inert stub that keeps what it was given, so that tensors inside are still found.

Stand-ins are slotted instances without settable attributes, not functions: pickle's BUILD opcode can set attributes
on whatever the stream holds, and a function whose defaults were set by one file would serve the next file too.

Formats of the rebuilt calls: torch/_utils.py and torch/_tensor.py of torch 2.6 to 2.15.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

from syncheck.dtypes import BY_STORAGE, DTYPES, DType
from syncheck.errors import MalformedFile, RefusedFile

if TYPE_CHECKING:
    from collections.abc import Callable

# Roots of modules that no tensor, number or configuration lives in.
REFUSED_MODULES = frozenset(
    "_ctypes _frozen_importlib _imp _pickle _posixsubprocess _socket _thread _winapi asyncio bdb cPickle "
    "cloudpickle code codeop commands ctypes dill ftplib http imp importlib joblib marshal mmap msvcrt multiprocessing "
    "nt os pdb pickle pickletools pip pkgutil platform posix profile pty pydoc requests runpy shelve shutil signal "
    "smtplib socket ssl subprocess sys tempfile threading timeit trace urllib venv webbrowser winreg".split()
)
REFUSED_PREFIXES = (
    "torch.hub",
    "torch.utils.cpp_extension",
    "torch.utils.bottleneck",
    "numpy.testing",
    "numpy.f2py",
)
REFUSED_BUILTINS = frozenset(
    "__build_class__ __import__ apply breakpoint classmethod compile delattr eval exec execfile exit file getattr "
    "globals help input locals memoryview open print quit raw_input reload setattr staticmethod super vars".split()
)
REFUSED_NAMES = frozenset({"types.CodeType", "types.FunctionType", "operator.attrgetter", "operator.methodcaller"})


class Storage:
    """A storage record of the archive: its key, dtype (None when untyped) and size in elements."""

    __slots__ = ("dtype", "key", "numel")

    def __init__(self, dtype: DType | None, key: str, numel: int) -> None:
        self.dtype, self.key, self.numel = dtype, key, numel


class TensorPlace:
    """Where a tensor's bytes lie: `offset` and `strides` in elements of `dtype` within `storage`.

    refused: why its bytes cannot be compared; then only dtype and shape mean something.
    """

    __slots__ = ("dtype", "lazy", "offset", "refused", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage | None,
        dtype: DType | None,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        lazy: str = "",
        refused: str = "",
    ) -> None:
        self.storage, self.dtype, self.offset, self.shape, self.strides = (
            storage,
            dtype,
            offset,
            shape,
            strides,
        )
        self.lazy, self.refused = lazy, refused


class NumpyArray(TensorPlace):
    """A numpy array that the pickle holds itself. It is counted; its bytes are not compared yet."""

    __slots__ = ()

    def __init__(self, *_: Any) -> None:
        super().__init__(None, None, 0, (), (), refused="a numpy array is not read")

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1:
            self.shape = _sizes(state[1])


class Inert:
    """An object of an unknown class: remembers what the pickle gave it and does nothing."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Keep what the pickle gave."""
        self = super().__new__(cls)
        self.given = [*args, *kwargs.values()]
        self.items = {}
        return self

    given: list[Any]
    items: dict[Any, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything, as a class unknown to us may."""

    def __setstate__(self, state: Any) -> None:
        self.given.append(state)

    def append(self, item: Any) -> None:
        """Stand in for list.append (opcode APPEND)."""
        self.given.append(item)

    def extend(self, items: Any) -> None:
        """Stand in for list.extend (opcode APPENDS)."""
        self.given.extend(items)

    def add(self, item: Any) -> None:
        """Stand in for set.add (opcode ADDITEMS)."""
        self.given.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __call__(self, *args: Any) -> Inert:
        """Stand in for an object that is called to rebuild another."""
        self.given.extend(args)
        return self


class _StandIn:
    """A callable of ours that a pickle may name; it has no attribute that could be set."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle sets attribute {name!r} of a rebuild function")

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class _StorageType(_StandIn):
    """A storage class such as torch.FloatStorage, as the persistent id of a storage names it."""

    __slots__ = ("dtype",)
    dtype: DType | None

    def __init__(self, dtype: DType | None) -> None:
        super().__init__(_not_callable)
        object.__setattr__(self, "dtype", dtype)


def _not_callable(*_: Any) -> NoReturn:
    raise pickle.UnpicklingError("a storage type or dtype is called")


class _DTypeName(_StandIn):
    """A dtype such as torch.float8_e4m3fn, given by name to _rebuild_tensor_v3."""

    __slots__ = ("dtype",)
    dtype: DType

    def __init__(self, dtype: DType) -> None:
        super().__init__(_not_callable)
        object.__setattr__(self, "dtype", dtype)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and n >= 0 for n in value):
        raise pickle.UnpicklingError(f"sizes and strides must be non-negative integers, found {value!r:.60}")
    return tuple(value)


def _place(storage: Any, offset: Any, shape: Any, strides: Any, dtype: DType | None, bits: Any) -> TensorPlace:
    if not isinstance(storage, Storage) or type(offset) is not int or offset < 0:
        raise pickle.UnpicklingError("a tensor without a storage, or with a negative offset")
    shape, strides = _sizes(shape), _sizes(strides)
    if len(shape) != len(strides):
        raise pickle.UnpicklingError(f"{len(shape)} sizes but {len(strides)} strides")
    lazy = ",".join(name for name in ("conj", "neg") if isinstance(bits, dict) and bits.get(name))
    return TensorPlace(storage, dtype, offset, shape, strides, lazy)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorPlace:
    return _place(storage, offset, shape, strides, getattr(storage, "dtype", None), None)


def _rebuild_tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any = None,
    _hooks: Any = None,
    bits: Any = None,
) -> TensorPlace:
    return _place(storage, offset, shape, strides, getattr(storage, "dtype", None), bits)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, bits: Any = None
) -> TensorPlace:
    if not isinstance(dtype, _DTypeName):
        return refused_place("its dtype is not known")
    return _place(storage, offset, shape, strides, dtype.dtype, bits)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(call: Any, kind: Any, args: Any, _state: Any) -> Any:
    """Rebuild a tensor subclass: a DTensor holds a shard, any other wraps one ordinary tensor or is not known."""
    if isinstance(kind, type) and getattr(kind, "name", "").endswith(".DTensor"):
        return refused_place("sharded: a DTensor holds this rank's shard only")
    if isinstance(call, _StandIn) and isinstance(args, tuple):
        return call(*args)
    return refused_place(f"a tensor subclass that is not read: {getattr(kind, 'name', kind)!s:.80}")


def refused_place(reason: str) -> TensorPlace:
    """Stand in for a tensor whose bytes are not read, so that it is counted."""
    return TensorPlace(None, None, 0, (), (), refused=reason)


def _refuse(what: str) -> _StandIn:
    return _StandIn(lambda *_: refused_place(what))


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Stand in for _codecs.encode, by which protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8"):
        raise pickle.UnpicklingError("bytes in an unknown encoding")
    return text.encode(encoding)


def _reconstructor(kind: Any, _base: Any = None, state: Any = None) -> Any:
    """Stand in for copyreg._reconstructor, by which protocol 0 and 1 write plain objects."""
    return kind(state) if isinstance(kind, type) and issubclass(kind, Inert) else None


ALLOWED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "_codecs.encode": _StandIn(_encode),
    "copyreg._reconstructor": _StandIn(_reconstructor),
    "torch.Size": _StandIn(_sizes),
    "torch._utils._rebuild_tensor": _StandIn(_rebuild_tensor),
    "torch._utils._rebuild_tensor_v2": _StandIn(_rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v3": _StandIn(_rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": _StandIn(_rebuild_parameter),
    "torch._utils._rebuild_parameter_with_state": _StandIn(_rebuild_parameter),
    "torch._tensor._rebuild_from_type_v2": _StandIn(_rebuild_from_type),
    "torch._utils._rebuild_wrapper_subclass": _refuse("a wrapper tensor that is not read"),
    "torch._utils._rebuild_qtensor": _refuse("a quantized tensor"),
    "torch._utils._rebuild_sparse_tensor": _refuse("a sparse tensor"),
    "torch._utils._rebuild_sparse_csr_tensor": _refuse("a sparse tensor"),
    "torch._utils._rebuild_nested_tensor": _refuse("a nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _refuse("a meta tensor: it has no values"),
    "torch._utils._rebuild_device_tensor_from_numpy": _refuse("a tensor stored as a numpy array"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _StandIn(_rebuild_parameter),
    "numpy._core.multiarray._reconstruct": _StandIn(NumpyArray),
    "numpy.core.multiarray._reconstruct": _StandIn(NumpyArray),
    "torch.storage.UntypedStorage": _StorageType(None),
    "torch.UntypedStorage": _StorageType(None),
    **{f"torch.{name}": _StorageType(row) for name, row in BY_STORAGE.items()},
    **{f"torch.{name}": _DTypeName(row) for name, row in DTYPES.items()},
}
# Names that Python 2 protocols write.
ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg", "__builtins__": "builtins"}


def is_refused(module: str, name: str) -> bool:
    """Whether a global can only be there to run something."""
    root = module.partition(".")[0]
    if root == "builtins":
        return name.partition(".")[0] in REFUSED_BUILTINS
    full = f"{module}.{name}"
    return (
        root in REFUSED_MODULES
        or full in REFUSED_NAMES
        or f"{full}.".startswith(tuple(f"{p}." for p in REFUSED_PREFIXES))
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: str, place: str) -> None:
        super().__init__(io.BytesIO(data))
        self.path, self.place = path, place
        self.stubs: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = ALIASES.get(module, module)
        full = f"{module}.{name}"
        if full in ALLOWED:
            return ALLOWED[full]
        if is_refused(module, name):
            raise RefusedFile(
                self.path,
                place=self.place,
                found=f"the pickle calls {full}, which runs code; nothing was run",
                next_step="do not load this file with weights_only=False; find out where it comes from",
            )
        if full not in self.stubs:
            self.stubs[full] = type("Inert", (Inert,), {"name": full})
        return self.stubs[full]

    def persistent_load(self, pid: Any) -> Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError(f"persistent id {pid!r:.60} is not a storage")
        _, kind, key, _location, numel = pid
        if not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise pickle.UnpicklingError(f"storage key or size is off in {pid!r:.60}")
        # Of a storage class that is not known, such as a quantized one, tensors are counted and not read.
        return Storage(kind.dtype if isinstance(kind, _StorageType) else None, key, numel)


def unpickle(data: bytes, path: str, place: str) -> tuple[Any, tuple[str, ...]]:
    """Return the object tree of a torch.save pickle and the names of the globals that became inert stubs.

    path, place: for error texts. Raises RefusedFile for a global that can only be there to run something, and
    MalformedFile for anything else that is wrong with the stream.
    """
    unpickler = _Unpickler(data, path, place)
    try:
        tree = unpickler.load()
    except RefusedFile:
        raise
    # A broken stream can fail in any way that the C unpickler and our stand-ins can.
    except Exception as error:  # noqa: BLE001
        raise MalformedFile(
            path,
            place=place,
            found=f"the pickle cannot be read ({type(error).__name__}: {error!s:.120})",
            next_step="the file is damaged or not written by torch.save: save or copy it again",
        ) from None
    return tree, tuple(sorted(unpickler.stubs))
