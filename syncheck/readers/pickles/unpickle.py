"""The one unpickler: builds plain containers and tensor places, imports nothing, runs nothing.

A pickle names the callables that rebuild its objects. Each name is looked up in three tables, never imported:

- `TABLE`, put together of those of `rebuild`, `numpy_stand_ins` and `dtensor`: our own stand-ins for the few names that
  torch.save writes for tensors, arrays and plain containers.
- `REFUSED_*`: names that can only be there to run something. The whole file is refused.
- any other name becomes an inert stub that keeps what it was given, so that tensors inside are still found.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from syncheck.errors import MalformedFile, RefusedFile, brief
from syncheck.readers import bounds
from syncheck.readers.pickles.dtensor import SUBCLASSES
from syncheck.readers.pickles.inert import Inert
from syncheck.readers.pickles.limits import Keys, light, scan
from syncheck.readers.pickles.numpy_stand_ins import NUMPY
from syncheck.readers.pickles.rebuild import REBUILT
from syncheck.readers.pickles.stand_ins import StandIn, Storage, StorageType, TensorPlace
from syncheck.snapshots import MOST_ELEMENTS

if TYPE_CHECKING:
    from mmap import mmap


TABLE = REBUILT | NUMPY | SUBCLASSES

# Roots of modules that no tensor, number or configuration lives in.
REFUSED_MODULES = frozenset(
    "_ctypes _frozen_importlib _imp _pickle _posixsubprocess _socket _thread _winapi asyncio bdb cPickle "
    "cloudpickle code codeop commands ctypes dill ftplib http imp importlib joblib marshal mmap msvcrt multiprocessing "
    "nt os pdb pickle pickletools pip pkgutil platform posix profile pty pydoc requests runpy shelve shutil signal "
    "smtplib socket ssl subprocess sys tempfile threading timeit trace urllib venv webbrowser winreg".split()
)
REFUSED_PREFIXES = (
    "torch.hub.",
    "torch.utils.cpp_extension.",
    "torch.utils.bottleneck.",
    "numpy.testing.",
    "numpy.f2py.",
)
REFUSED_BUILTINS = frozenset(
    "__build_class__ __import__ apply breakpoint classmethod compile delattr eval exec execfile exit file getattr "
    "globals help input locals memoryview open print quit raw_input reload setattr staticmethod super vars".split()
)
REFUSED_NAMES = frozenset({"types.CodeType", "types.FunctionType", "operator.attrgetter", "operator.methodcaller"})

# Characters of a name that is kept and printed; nobody's classes have longer ones.
_LONGEST = 1_000
# Names that Python 2 protocols write.
ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg", "__builtins__": "builtins"}


def is_refused(module: str, name: str) -> bool:
    """Whether a global can only be there to run something."""
    root = module.partition(".")[0]
    if root == "builtins":
        return name.partition(".")[0] in REFUSED_BUILTINS
    full = f"{module}.{name}"
    return root in REFUSED_MODULES or full in REFUSED_NAMES or f"{full}.".startswith(REFUSED_PREFIXES)


class Stream:
    """Bytes with pickles in a row: `at` is where the next one begins, and after reading it, where it ended.

    A pickle never gets more than there are bytes. most: objects that one may make, where not those of `bounds`. With
    its `peek` the unpickler takes more than an opcode at a time.
    """

    def __init__(self, data: bytes | mmap, at: int = 0, most: int | None = None) -> None:
        self.data, self.at, self.most = data, at, most

    def peek(self, size: int) -> bytes:
        """Return the next bytes without moving on."""
        return self.data[self.at : self.at + size]

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        found = self.data[self.at : self.at + size]
        self.at += len(found)
        return found

    def readinto(self, buffer: bytearray) -> int:
        """Fill a buffer as far as there are bytes."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def readline(self) -> bytes:
        """Return the rest of the line."""
        return self.read((self.data.find(b"\n", self.at) + 1 or len(self.data)) - self.at)


class _Rules:
    """What an unpickler makes of names and storages."""

    def __init__(
        self, source: Stream, path: str, place: str, storages: dict[str, Storage] | None, made: list[TensorPlace]
    ) -> None:
        super().__init__(source)  # type: ignore[call-arg]  # of the unpickler that it stands before
        self.made = made
        self.path, self.place, self.storages = path, place, storages
        self.views: dict[str, Storage] = {}
        self.stubs: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = ALIASES.get(module, module)
        full = f"{module}.{name}"
        if full in TABLE:
            known = TABLE[full]
            return StandIn(known.call, self.made) if type(known) is StandIn else known
        if len(full) > _LONGEST:
            raise pickle.UnpicklingError(f"a name of {len(full)} characters")
        if is_refused(module, name):
            raise RefusedFile(
                self.path,
                place=self.place,
                found=f"the pickle calls {full}, which runs code; nothing was run",
                next_step="do not load this file with weights_only=False; find out where it comes from",
            )
        if full not in self.stubs:
            if len(self.stubs) == bounds.MOST_CLASSES:
                raise pickle.UnpicklingError(f"more than {bounds.MOST_CLASSES} classes that are not known")
            self.stubs[full] = type("Inert", (Inert,), {"name": full})
        return self.stubs[full]

    def persistent_load(self, pid: Any) -> Any:
        legacy = self.storages is not None
        if legacy and isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":  # a class and its source
            light(pid)
            return pid[1]
        # As many as torch.load takes apart; before torch 1.6 the sixth says which part of a storage another one is.
        if not isinstance(pid, tuple) or len(pid) != (6 if legacy else 5) or pid[0] != "storage":
            raise pickle.UnpicklingError(f"persistent id {brief(pid)} is not a storage")
        _, kind, key, location, numel = pid[:5]
        light(kind, location)
        if not isinstance(key, str) or type(numel) is not int or not 0 <= numel <= MOST_ELEMENTS:
            raise pickle.UnpicklingError(f"storage key or size is off in {brief(pid)}")
        if not isinstance(location, (str, bytes)) or not isinstance(kind, (StorageType, type)):
            raise pickle.UnpicklingError(f"storage class or location is off in {brief(pid)}")
        # Of a storage class that is not known, such as a quantized one, tensors are counted and not read.
        row = (kind.dtype, kind.itemsize) if isinstance(kind, StorageType) else (None, None)
        storage = Storage(row[0], key, numel, row[1], 0, numel)
        if self.storages is None:
            return storage
        self.storages.setdefault(key, storage)
        if key in self.views:
            raise pickle.UnpicklingError(f"a storage with the key of a view, in {brief(pid)}")
        return storage if pid[5] is None else self._view(storage, pid[5], self.storages)

    def _view(self, root: Storage, view: Any, storages: dict[str, Storage]) -> Storage:
        """Return the part of a storage that another one was, in files of before torch 0.4."""
        if not isinstance(view, tuple) or len(view) != 3 or not isinstance(view[0], str):
            raise pickle.UnpicklingError(f"the view of a storage is {brief(view)}")
        key, start, size = view
        if type(start) is not int or type(size) is not int or not 0 <= start <= start + size <= root.numel:
            raise pickle.UnpicklingError(f"a view of {brief(view)} into a storage of {root.numel} elements")
        storage = Storage(root.dtype, root.key, root.numel, root.itemsize, start, size)
        # torch.load takes the first of those that bear one key.
        if key in storages or self.views.setdefault(key, storage) != storage:
            raise pickle.UnpicklingError(f"two views of one key, {brief(key)}")
        return storage


class _Unpickler(_Rules, pickle.Unpickler):
    pass


_Slow: Any = pickle._Unpickler  # noqa: SLF001 - Python's own, in which each opcode can be another
# Opcodes that hash, and which of the top of the stack.
_HASHED = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}


class _CheckedUnpickler(_Rules, _Slow):  # type: ignore[misc]  # it has no type
    """Checks each key before it is hashed."""

    keys: Keys
    dispatch: ClassVar[dict[int, Any]] = dict(_Slow.dispatch)

    def _check(self, opcode: bytes) -> None:
        self.keys.check(self.stack[_HASHED[opcode]])
        _Slow.dispatch[opcode[0]](self)

    for _opcode in _HASHED:
        dispatch[_opcode[0]] = partial(_check, opcode=_opcode)


def unpickle(
    data: bytes | Stream,
    path: str,
    place: str,
    storages: dict[str, Storage] | None = None,
    made: list[TensorPlace] | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Return the object tree of a torch.save pickle and the names of the globals that became inert stubs.

    data: the pickle, or a stream that stands at its first byte. path, place: for error texts. storages: of the format
    of before torch 1.6 only, to be filled by key. made: to be filled with every tensor that the pickle rebuilds, also
    if nothing in the tree refers to it. Raises RefusedFile for a global that can only be there to run something, and
    MalformedFile for anything else that is wrong.
    """
    source = Stream(data) if isinstance(data, bytes) else data
    found = scan(source.data, source.at, source.most)
    if found.fault:
        raise MalformedFile(
            path, place=place, found=f"the pickle would take all memory or time: {found.fault}",
            next_step="no library writes this; find out where the file comes from",
        )  # fmt: skip
    unpickler = (_CheckedUnpickler if found.slow else _Unpickler)(
        source, path, place, storages, [] if made is None else made
    )
    if isinstance(unpickler, _CheckedUnpickler):
        unpickler.keys = Keys(found.size)
    try:
        tree = unpickler.load()
    except (RefusedFile, MemoryError):  # what it asks for was held against the file before
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
