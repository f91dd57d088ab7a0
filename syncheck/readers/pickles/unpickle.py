"""The unpickler: it builds plain containers and tensor locations, and neither imports nor executes anything.

A pickle contains the names of callables that rebuild its objects. They are looked up in three tables and never
imported:

- `TABLE`, from `rebuild` and `dtensor`: stand-ins for the names that torch.save writes for tensors,
  arrays and plain containers.
- `refusals`: names whose only use is to execute code. The whole file is refused.
- All other names become inert classes that keep their arguments, so that tensors among them are found. An attribute of
  such a class or object, which protocol 2 looks up with getattr, is inert too.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from syncheck.errors import CheckpointError, MalformedFile, RefusedFile, UnsupportedFormat
from syncheck.readers import untrusted
from syncheck.readers.pickles.dtensor import SUBCLASSES
from syncheck.readers.pickles.limits import Keys, check_nesting, is_count, require, scan
from syncheck.readers.pickles.rebuild import NUMPY, REBUILT
from syncheck.readers.pickles.refusals import is_refused, is_refused_attribute, rename_module
from syncheck.readers.pickles.stand_ins import Inert, StandIn, Storage, StorageType, TensorLocation, name_class

if TYPE_CHECKING:
    from collections.abc import Callable
    from mmap import mmap


TABLE = REBUILT | NUMPY | SUBCLASSES

# Classes of libraries whose arrays follow outside the pickle: the contents and the next step.
UNREAD_CLASSES = {
    "joblib.numpy_pickle.NumpyArrayWrapper": (
        "an array of joblib.dump, whose bytes are not part of the pickle",
        "load the file with joblib, and save its arrays with torch.save or pickle.dump",
    ),
}
# Limit of characters in a name, which is kept and printed.
_LONGEST = 1_000


class Stream:
    """Consecutive pickles: `position` is the start of the next pickle, and after reading it, its end.

    A read never returns more bytes than the data has. With `peek`, the unpickler can read more than one opcode at a
    time.
    most: limit of objects per pickle, in place of `MOST_OBJECTS`.
    """

    def __init__(self, data: bytes | mmap, position: int = 0, most: int | None = None) -> None:
        self.data, self.position, self.most = data, position, most

    def peek(self, size: int) -> bytes:
        """Return the next bytes without consuming them."""
        return self.data[self.position : self.position + size]

    def read(self, size: int) -> bytes:
        """Consume and return the next bytes."""
        data = self.data[self.position : self.position + size]
        self.position += len(data)
        return data

    def readinto(self, buffer: bytearray) -> int:
        """Fill a buffer as far as the data suffices."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readline(self) -> bytes:
        """Return the rest of the line."""
        line_end = self.data.find(b"\n", self.position) + 1 or len(self.data)
        return self.read(line_end - self.position)


class _StorageOptions(NamedTuple):
    """Optional arguments of `unpickle`."""

    key_prefix: str
    load_storage: Callable[[bytes], Storage] | None


class _SafeUnpickling:
    """Handling of globals and storages, shared by both unpicklers."""

    def __init__(
        self, source: Stream, path: str, label: str, storages: dict[str, Storage] | None, options: _StorageOptions
    ) -> None:
        # Byte strings of Python 2 become text, as in torch.load. Other bytes survive the conversion back.
        super().__init__(source, encoding="utf-8", errors="surrogateescape")  # type: ignore[call-arg]  # of the subclass
        self.rebuilt: list[TensorLocation] = []
        self.path = path
        self.label = label
        self.storages = storages
        self.key_prefix, self.load_storage = options
        self.views: dict[str, Storage] = {}
        self.stubs: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = rename_module(module)
        full_name = f"{module}.{name}"
        if full_name in TABLE:
            return self._find_stand_in(full_name)

        if len(full_name) > _LONGEST:
            raise pickle.UnpicklingError(f"a name of {len(full_name)} characters")
        # Protocols before 4 have no names with dots.
        if full_name == "builtins.getattr":
            return StandIn(self._get_attribute)
        if full_name == "torch.storage._load_from_bytes" and self.load_storage is not None:
            return StandIn(self.load_storage)
        if full_name in UNREAD_CLASSES:
            content, next_step = UNREAD_CLASSES[full_name]
            raise UnsupportedFormat(
                self.path,
                place=self.label,
                found=content,
                next_step=next_step,
            )
        if is_refused(module, name):
            raise self._refuse(full_name)
        return self._make_stub(full_name)

    def _find_stand_in(self, full_name: str) -> Any:
        """Return the stand-in of a name, which adds the tensors of this file to `rebuilt`."""
        stand_in = TABLE[full_name]
        if type(stand_in) is StandIn:
            return StandIn(stand_in.call, self.rebuilt, full_name)
        return stand_in

    def _make_stub(self, full_name: str) -> type[Inert]:
        """Return the inert class of a name, always the same class for the same name."""
        if full_name not in self.stubs:
            if len(self.stubs) == untrusted.MOST_CLASSES:
                raise pickle.UnpicklingError(f"more than {untrusted.MOST_CLASSES} unknown classes")
            self.stubs[full_name] = type("Inert", (Inert,), {"name": full_name})
        return self.stubs[full_name]

    def _get_attribute(self, *arguments: Any) -> type[Inert] | Inert:
        """Stand in for getattr, with which pickle writes nested classes, methods, and enum members of Python 3.11.

        An attribute of a class is a class like any other. An attribute of an object, a bound method, keeps the object,
        so that its tensors are found.
        """
        if len(arguments) != 2 or not _is_attribute_name(arguments[1]):
            raise self._refuse("builtins.getattr")

        owner, name = arguments
        owner_name = name_class(owner)
        if is_refused_attribute(owner_name, name):
            raise self._refuse(f"builtins.getattr(..., {name!r})")

        stub = self._make_stub(f"{owner_name}.{name}")
        return stub if isinstance(owner, type) else stub(owner)

    def _refuse(self, name: str) -> RefusedFile:
        return RefusedFile(
            self.path,
            place=self.label,
            found=f"the pickle calls {name}, which runs code; nothing was run",
            next_step="do not load this file with weights_only=False; check its origin",
        )

    def persistent_load(self, pid: Any) -> Any:
        is_legacy = self.storages is not None
        if is_legacy and _is_class_with_source(pid):
            check_nesting(pid)
            return pid[1]

        # As in torch.load. Before torch 1.6, the sixth element describes a view of the storage.
        length = 6 if is_legacy else 5
        require(isinstance(pid, tuple), "persistent id {} is not a storage", pid)
        require(len(pid) == length, "persistent id {} is not a storage", pid)
        require(pid[0] == "storage", "persistent id {} is not a storage", pid)
        _, kind, key, location, numel = pid[:5]
        check_nesting(kind, location)
        require(isinstance(key, str), "invalid storage key or size in {}", pid)
        require(is_count(numel), "invalid storage key or size in {}", pid)
        require(isinstance(location, (str, bytes)), "invalid storage class or location in {}", pid)
        require(isinstance(kind, (StorageType, type)), "invalid storage class or location in {}", pid)

        # The location is a device, on which the storage was; the bytes are in the file.
        storage = self._make_storage(kind, key, numel)
        if self.storages is None:
            return storage

        self.storages.setdefault(key, storage)
        require(key not in self.views, "a storage with the key of a view, in {}", pid)
        if pid[5] is None:
            return storage
        return self._view(storage, pid[5], self.storages)

    def _make_storage(self, kind: StorageType | type, key: str, numel: int) -> Storage:
        full_key = self.key_prefix + key
        if isinstance(kind, StorageType):
            return Storage(kind.dtype, full_key, numel, kind.itemsize, 0, numel, kind.quantized)
        # Tensors in an unknown storage class, like quantized storages, are counted but not read.
        return Storage(None, full_key, numel, None, 0, numel)

    def _view(self, root: Storage, view: Any, storages: dict[str, Storage]) -> Storage:
        """Return a view of a storage, as written before torch 0.4."""
        require(isinstance(view, tuple), "invalid view of a storage: {}", view)
        require(len(view) == 3, "invalid view of a storage: {}", view)
        key, start, size = view
        require(isinstance(key, str), "invalid view of a storage: {}", view)
        is_within = is_count(start) and is_count(size) and start + size <= root.numel
        require(is_within, "a view of {} into a storage of {} elements", view, root.numel)
        storage = replace(root, start=start, size=size)
        # torch.load would use the first view with this key.
        is_first = key not in storages and self.views.setdefault(key, storage) == storage
        require(is_first, "two views with the same key, {}", key)
        return storage


class _Unpickler(_SafeUnpickling, pickle.Unpickler):
    pass


_Slow: Any = pickle._Unpickler  # noqa: SLF001 - the Python implementation, whose opcodes can be replaced
# Opcodes that hash, and the hashed elements at the top of the stack.
_HASHED = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}


class _CheckedUnpickler(_SafeUnpickling, _Slow):  # type: ignore[misc]  # the base has type Any
    """Checks each key before it is hashed."""

    keys: Keys
    dispatch: ClassVar[dict[int, Any]] = dict(_Slow.dispatch)

    def _check(self, opcode: bytes) -> None:
        self.keys.check(self.stack[_HASHED[opcode]])
        _Slow.dispatch[opcode[0]](self)

    for _opcode in _HASHED:
        dispatch[_opcode[0]] = partial(_check, opcode=_opcode)


def _is_attribute_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= _LONGEST and name.isidentifier()


def _is_class_with_source(pid: Any) -> bool:
    """Whether a persistent id is a class with its source code, as torch.save wrote modules before torch 1.6."""
    return isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module"


class Pickled(NamedTuple):
    """The content of a pickle."""

    tree: Any
    stubs: tuple[str, ...]
    """Names of globals that became inert classes."""
    rebuilt: list[TensorLocation]
    """All tensors that the pickle rebuilds, also outside the tree."""
    size: int
    """In bytes."""


def unpickle(
    data: bytes | Stream,
    path: str,
    label: str,
    storages: dict[str, Storage] | None = None,
    *,
    key_prefix: str = "",
    load_storage: Callable[[bytes], Storage] | None = None,
) -> Pickled:
    """Read a torch.save pickle.

    data: the pickle, or a stream at its first byte.
    path, label: of the file, and of the pickle in it, for errors.
    storages: collects storages by key, only for the format before torch 1.6.
    key_prefix: the start of the keys of all storages, to distinguish several pickles.
    load_storage: reads the bytes of a storage within a plain pickle, which is a torch.save file.
    Raises RefusedFile for a global that executes code, UnsupportedFormat for arrays that are not in the pickle, and
    MalformedFile for all other faults.
    """
    source = Stream(data) if isinstance(data, bytes) else data
    start = source.position
    scanned = scan(source.data, start, source.most)
    if scanned.fault:
        raise MalformedFile(
            path,
            place=label,
            found=f"the pickle would take all memory or time: {scanned.fault}",
            next_step="no library writes this; check the origin of the file",
        )

    options = _StorageOptions(key_prefix, load_storage)
    kind = _CheckedUnpickler if scanned.slow else _Unpickler
    unpickler: Any = kind(source, path, label, storages, options)
    if scanned.slow:
        unpickler.keys = Keys(scanned.size)
    try:
        tree = unpickler.load()
    except (CheckpointError, MemoryError):  # the scan has already limited what the file can request
        raise
    # A damaged stream can raise any exception of the C unpickler and of the stand-ins.
    except Exception as error:  # noqa: BLE001
        raise MalformedFile(
            path,
            place=label,
            found=f"the pickle cannot be read ({type(error).__name__}: {error!s:.120})",
            next_step="the file is damaged or not written by torch.save: save or copy it again",
        ) from None
    return Pickled(tree, tuple(sorted(unpickler.stubs)), unpickler.rebuilt, source.position - start)
