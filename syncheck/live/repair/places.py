"""Where the tensors and values that a report names live in this process, and how to change them in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from syncheck.comparison.replica_groups import Positions, divide, is_whole
from syncheck.errors import UsageError
from syncheck.live.digest.parts import is_torch
from syncheck.live.memory import snapshot
from syncheck.live.memory.held import Held, is_tensor
from syncheck.live.memory.sharded import sharding_of
from syncheck.live.repair.roots import roots
from syncheck.live.repair.trees import (
    Like,
    changed,
    filled,
    find,
    fits,
    leads_to,
    list_on,
    made_like,
    moved,
    outline,
    same,
    there,
    without,
)  # fmt: skip
from syncheck.names import normalize
from syncheck.snapshots import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.live.repair.roots import Root

Change = Literal["", "values", "created", "removed"]


@dataclass(frozen=True, slots=True)
class Content:
    """What a source holds under a name, as it is sent. keys: the way to it from the container.

    Of each kind:
    tensor: value is its `Like`, by which other ranks make one; its bytes follow apart.
    object: anything else; value is the object itself.
    list: the name is of something in a list or tuple, which is set as a whole: keys leads to that, value outlines it.
    absent: the source has nothing there; keys leads as far as there is something.
    """

    keys: tuple[Any, ...]
    kind: Literal["absent", "tensor", "object", "list"]
    value: Any = None


class Places:
    """The live tensors and values of this rank's replica, by the names of a report.

    parts: as `memory.snapshot` takes them. tensors: by normalized name.
    """

    def __init__(self, parts: tuple[Any, ...]) -> None:
        taken = snapshot(*parts)
        found = dict(roots(parts))
        short = normalize(taken.tensors)
        self.tensors: dict[str, Tensor] = {short[name]: tensor for name, tensor in taken.tensors.items()}
        self._made: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._outlines: dict[tuple[str, tuple[Any, ...]], Any] = {}
        self._filled: dict[tuple[str, tuple[Any, ...]], Any] = {}
        # Tensors are named without wrappers' prefixes, values with them. A name is normalized among its like only, and
        # a container by the name of something in it, x.
        like = [f"{name}.x" for name, root in found.items() if root.parameter is not None or root.whole]
        plain = normalize([*taken.tensors, *like])
        self._roots = {plain[name].removesuffix(".x"): found[name.removesuffix(".x")] for name in like} | found

    def require(self, name: str, *, writable: bool) -> None:
        """Raise UsageError where bytes cannot be copied from, or where writable into, the tensor of that name."""
        flags = getattr(self.live(name), "flags", None)  # of an array
        if writable and flags is not None and not flags.writeable:
            raise UsageError(
                f"{name} is an array that must not be written, such as np.broadcast_to and mmap_mode='r' give"
            )

    def live(self, name: str) -> Any:
        """Return the tensor of this rank into which bytes are copied. Raises UsageError where there is none."""
        if name in self._made:
            return self._made[name]
        tensor = self.tensors.get(name)
        if tensor is None:
            raise UsageError(f"{name} is not on this rank and cannot be created")
        if not isinstance(tensor.data, Held):
            raise UsageError(f"{name} has no bytes to copy: {tensor.refused or 'they are not in memory'}")
        return tensor.data.source

    def ties(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return those of some tensors that have other names too, each with the others; they are one in memory."""
        memory = {
            name: (source.device, source.data_ptr(), source.nbytes)
            for name, tensor in self.tensors.items()
            if isinstance(tensor.data, Held) and is_torch(source := tensor.data.source) and source.numel()
        }
        called: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name, place in memory.items():
            called[place].append(name)
        others = {name: [other for other in called[memory[name]] if other != name] for name in names if name in memory}
        return {name: tied for name, tied in others.items() if tied}

    def alike(self, first: str, second: str) -> bool:
        """Whether two tensors of this rank have the same bytes, as far as it has both."""
        data = [self.tensors[name].data for name in (first, second) if name in self.tensors]
        both = [held for held in data if isinstance(held, Held)]
        return len(both) < 2 or second in self.ties([first]).get(first, ()) or both[0][:] == both[1][:]

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the replica groups of the parameter that a state belongs to; nothing where it is on all ranks whole.

        Some ranks lack the state, so that it cannot tell its groups itself. The same on all ranks of a mesh.
        """
        parameter = self._place(name)[0].parameter
        if not hasattr(parameter, "placements"):
            return ()
        sharding = replace(sharding_of(parameter), coordinate=())
        part = Tensor(name, "", (), (), "", 0, sharding=sharding)
        whole = is_whole(sharding)
        return () if whole else divide(dict.fromkeys(sharding.ranks, part), sharding.ranks, Positions()).sets

    def known(self, name: str) -> None:
        """Raise UsageError where this rank could not set a value of that name."""
        self._place(name)

    def content(self, name: str, *, held: bool) -> Content:
        """Return what this rank holds under a name. held: there is something, so that nothing found is an error."""
        root, path = self._place(name)
        tree = root.read()
        found = find(tree, path)
        if found is None and held:
            raise UsageError(f"{name} is in no place from which it can be copied")

        def like(tensor: Any) -> Like:
            beside = root.parameter is not None and tensor.device == root.parameter.device
            return Like(tensor.dtype, tuple(tensor.shape), tensor.device.type, beside)

        keys = leads_to(tree, path) if found is None else found[0][:-1]
        listed = None if root.whole else list_on(tree, keys)
        if listed is not None:
            # Once for all that is in it: as one object it is sent once, too.
            at = name.removesuffix(path), listed
            if at not in self._outlines:
                self._outlines[at] = outline(there(tree, listed), like)
            return Content(listed, "list", self._outlines[at])
        if found is None:
            return Content(keys, "absent")
        keys, value = found
        if not is_tensor(value) or root.whole:
            return Content(keys, "object", moved(value, "cpu"))
        return Content(keys, "tensor", like(value))

    def take(self, name: str, content: Content) -> Change:
        """Make this rank hold what a source does, but for a tensor's bytes; say what had to be done for it."""
        root, path = self._place(name)
        tree = root.read()
        at = name.removesuffix(path)
        own = find(self._before.setdefault(at, dict(tree) if isinstance(tree, Mapping) else tree), path)
        if content.kind == "absent":
            if (found := find(tree, path)) is not None:
                root.write(without(tree, found[0][: len(content.keys) + 1]))
            return "removed" if own is not None else ""

        def make(like: Like, called: str) -> Any:
            made = made_like(like, root.parameter)
            self._made[called] = _local(made)
            return made

        value = content.value
        if content.kind == "list":
            way = ".".join(map(str, content.keys))
            if self._filled.get((at, content.keys)) is not value:
                self._filled[at, content.keys] = value
                made = filled(value, there(tree, content.keys), make, f"{at}{way}")
                root.write(changed(tree, content.keys, made))
            told = find(value, path[len(way) :].removeprefix("."))
            if told is None:
                return "removed" if own is not None else ""
            value = told[1]
        if isinstance(value, Like):
            if own is not None and fits(own[1], value):
                return ""
            if content.kind == "tensor":
                root.write(changed(tree, content.keys, make(value, name)))
            return "created"
        if own is not None and same(moved(own[1], "cpu"), value):
            return ""
        if content.kind == "object":
            device = "cpu" if root.parameter is None else root.parameter.device
            root.write(changed(tree, content.keys, moved(value, device)))
        return "values"

    def _place(self, name: str) -> tuple[Root, str]:
        """Return the container that a name is in, and the rest of the name: the container with the longest name."""
        at = name
        while at and at not in self._roots:
            at = at.rpartition(".")[0]
        if not at:
            raise UsageError(
                f"{name} differs and is in no place known to resync: of this rank's optimizer, scaler or another "
                "object with a state_dict(); set it to the same on all ranks and call it again"
            )
        root = self._roots[at]
        return root, "" if root.whole else name[len(at) + 1 :]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "placements") else tensor
