"""The tensors of two models, and the comparison of a view of A with a tensor of B."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import starmap
from operator import eq
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert
from syncheck.conversion.recognition import are_readable
from syncheck.layout import views
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from syncheck.conversion.name_maps import NameMap
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Elements of the first, quick comparison: so many positions, with so many elements each.
_PROBES, _PROBE = 8, 16
# Fewer elements than this can be equal by chance.
FEW = 16
# The bytes of a few trained numbers. Integers and ranges like 0, 1, 2, 3 have fewer.
_MANY_BYTES = 9


@dataclass(slots=True)
class Models:
    """The tensors of two models by name."""

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    files: Files
    stored: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = field(default_factory=lambda: ({}, {}))
    """For each side, the stored tensor of each tensor after a map."""
    map: NameMap | None = None
    """The map of the names."""
    variables: Mapping[str, int] = field(default_factory=dict)
    """The variables of the map."""
    base: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors of the model before the update."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind of each tensor that differs."""
    local: frozenset[str] = frozenset()
    """The tensors of which few elements differ."""
    partial: frozenset[str] = frozenset()
    """The tensors of which a part agrees."""
    partners: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    """For each name, the names of tensors that are usually one weight with its tensor."""
    _probes: dict[tuple[str, tuple[int, ...], bool], dict[bytes, list[str]]] = field(default_factory=dict)

    def equals(self, view: Tensor, b: Tensor) -> dict[str, Any] | None:
        """Return the parameters of an additional conversion if a view has the bytes of a tensor of B, else None."""
        if view.shape != b.shape or not has_elements(view):
            return None
        converted = self.convert(view, b)
        if converted is None or not self._have_equal_bytes(converted, b):
            return None
        return {} if converted is view else {"dtype": b.dtype}

    def _have_equal_bytes(self, view: Tensor, b: Tensor) -> bool:
        """Whether two tensors of one shape and dtype have the same bytes."""
        # The probes spare most tensors from being read, and the first ones from further probes.
        pairs = zip(self._iterate_probes(view), self._iterate_probes(b), strict=True)
        if not all(starmap(eq, pairs)):
            return False
        clusters = cluster_replicas([view, b], self.files)
        return len(clusters) == 1

    def convert(self, view: Tensor, b: Tensor) -> Tensor | None:
        """Return a view in the dtype of a tensor of B: unchanged if the dtypes are equal, None without floats."""
        if view.dtype == b.dtype:
            return view
        if not are_readable(view, b):
            return None
        return convert(view, (b.dtype,), self.files)

    def is_part(self, name: str) -> bool:
        """Whether a tensor is a part of a tensor that is compared in parts, like the values of a sparse tensor."""
        owner, _, _ = name.rpartition(".")
        owners = [model[owner] for model in (self.a, self.b) if owner in model]
        return any(tensor.refused is not None for tensor in owners)

    def probe(self, tensor: Tensor) -> bytes:
        """Return some elements from all parts of a tensor."""
        return b"".join(self._iterate_probes(tensor))

    def _iterate_probes(self, tensor: Tensor) -> Iterator[bytes]:
        """Yield some elements from one part of a tensor after the other."""
        count = min(_PROBE, tensor.numel)
        last = tensor.numel - count
        # The positions coincide in a small tensor.
        starts = dict.fromkeys(last * i // (_PROBES - 1) for i in range(_PROBES))
        for start in starts:
            yield bytes(self.files.read(tensor, start, count, 0))

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether some elements from all parts of a tensor are equal."""
        return self.count_values(tensor) == 1

    def is_distinct(self, tensor: Tensor) -> bool:
        """Whether a tensor has enough elements, and different ones, so that an equal tensor is no coincidence."""
        return tensor.numel >= FEW and not self.is_constant(tensor)

    def count_values(self, tensor: Tensor) -> int:
        """Return the number of different values of some elements from all parts of a tensor."""
        data, size = self.probe(tensor), DTYPES[tensor.dtype].size
        return len({data[start : start + size] for start in range(0, len(data), size)})

    def find_elsewhere(self, name: str, *, transposed: bool = False) -> tuple[str, dict[str, Any]] | None:
        """Return the other tensor of A with the bytes of a tensor of B, if there is a tensor that is not constant.

        transposed: whether to look for matrices with exchanged dimensions.
        """
        b = self.b[name]
        # Few elements and constants are equal to constants of other tensors by chance, unless they have many bytes, as
        # the running statistics of a few channels do.
        different_bytes = set(self.probe(b))
        if not self.is_distinct(b) and len(different_bytes) < _MANY_BYTES:
            return None
        # The probes of A are read once for all tensors of one dtype and shape.
        key = b.dtype, b.shape, transposed
        if key not in self._probes:
            self._probes[key] = self._probe_all(b, transposed=transposed)
        candidates = self._probes[key].get(self.probe(b), [])
        for candidate in candidates:
            # The tensor of the same name is not elsewhere.
            if candidate == name:
                continue
            view = _view(self.a[candidate], transposed=transposed)
            conversion = self.equals(view, b)
            if conversion is not None:
                return candidate, conversion
        return None

    def _probe_all(self, b: Tensor, *, transposed: bool) -> dict[bytes, list[str]]:
        """Return the names of the tensors of A that may be a tensor of B, by their probes."""
        names_by_probe: dict[bytes, list[str]] = defaultdict(list)
        shape = b.shape[::-1] if transposed else b.shape
        names = [name for name, tensor in self.a.items() if tensor.shape == shape and has_elements(tensor)]
        for name in names:
            view = _view(self.a[name], transposed=transposed)
            converted = self.convert(view, b)
            # Integers are not converted to floats.
            if converted is not None:
                names_by_probe[self.probe(converted)].append(name)
        return names_by_probe


def find_different_dim(a: Tensor, b: Tensor) -> int | None:
    """Return the only dimension in which two shapes differ; None for several dimensions, or another number."""
    # Without a common number of dimensions, nothing shows which of them belong together.
    if len(a.shape) != len(b.shape):
        return None
    different_dims = [dim for dim in range(len(a.shape)) if a.shape[dim] != b.shape[dim]]
    return different_dims[0] if len(different_dims) == 1 else None


def _view(tensor: Tensor, *, transposed: bool) -> Tensor:
    """Return a tensor, or the transposed matrix."""
    return views.permute(tensor, (1, 0)) if transposed else tensor
