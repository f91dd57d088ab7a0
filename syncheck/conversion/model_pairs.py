"""The tensors of two models, and the comparison of a view of A with a tensor of B."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert
from syncheck.conversion.recognition import is_readable
from syncheck.layout import views
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from syncheck.conversion.name_maps import NameMap
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Elements of the first, quick comparison: so many positions, with so many elements each.
_PROBES, _PROBE = 8, 16
# Fewer elements than this can be equal by chance.
FEW = 16


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
    partners: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    """For each name, the names of tensors that are usually one weight with its tensor."""
    _probes: dict[tuple[str, tuple[int, ...], bool], dict[bytes, list[str]]] = field(default_factory=dict)

    def equals(self, view: Tensor, b: Tensor) -> dict[str, Any] | None:
        """Return the parameters of an additional conversion if a view has the bytes of a tensor of B, else None."""
        if view.shape != b.shape or not has_elements(view):
            return None
        converted = view.dtype != b.dtype
        if converted:
            if not (is_readable(view) and is_readable(b)):
                return None
            view = convert(view, (b.dtype,), self.files)
        if self.probe(view) != self.probe(b) or len(cluster_replicas([view, b], self.files)) > 1:
            return None
        return {"dtype": b.dtype} if converted else {}

    def is_part(self, name: str) -> bool:
        """Whether a tensor is a part of a tensor that is compared in parts, like the values of a sparse tensor."""
        owner, _, _ = name.rpartition(".")
        return any(owner in model and model[owner].refused is not None for model in (self.a, self.b))

    def probe(self, tensor: Tensor) -> bytes:
        """Return some elements from all parts of a tensor."""
        count = min(_PROBE, tensor.numel)
        starts = sorted({(tensor.numel - count) * i // (_PROBES - 1) for i in range(_PROBES)})
        return b"".join(bytes(self.files.read(tensor, start, count, 0)) for start in starts)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether some elements from all parts of a tensor are equal."""
        return self.count_values(tensor) == 1

    def count_values(self, tensor: Tensor) -> int:
        """Return the number of different values of some elements from all parts of a tensor."""
        data, size = self.probe(tensor), DTYPES[tensor.dtype].size
        return len({data[start : start + size] for start in range(0, len(data), size)})

    def find_elsewhere(self, name: str, *, transposed: bool = False) -> tuple[str, dict[str, Any]] | None:
        """Return the other tensor of A with the bytes of a tensor of B, if there is a tensor that is not constant.

        transposed: whether to look for matrices with exchanged dimensions.
        """
        b = self.b[name]
        probe = self.probe(b)
        if b.numel < FEW or self.is_constant(b):
            return None
        key = b.dtype, b.shape, transposed
        if key not in self._probes:
            self._probes[key] = self._probe_all(b, transposed=transposed)
        for other in self._probes[key].get(probe, ()):
            if other == name:
                continue
            view = views.permute(self.a[other], (1, 0)) if transposed else self.a[other]
            extra = self.equals(view, b)
            if extra is not None:
                return other, extra
        return None

    def _probe_all(self, b: Tensor, *, transposed: bool) -> dict[bytes, list[str]]:
        """Return the names of the tensors of A that may be a tensor of B, by their probes."""
        names_by_probe: dict[bytes, list[str]] = defaultdict(list)
        shape = b.shape[::-1] if transposed else b.shape
        for name, tensor in self.a.items():
            if tensor.shape != shape or not has_elements(tensor):
                continue
            view = views.permute(tensor, (1, 0)) if transposed else tensor
            if tensor.dtype != b.dtype:
                if not (is_readable(tensor) and is_readable(b)):
                    continue
                view = convert(view, (b.dtype,), self.files)
            names_by_probe[self.probe(view)].append(name)
        return names_by_probe
