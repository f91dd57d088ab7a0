"""Find the map between two models: recognize the names of a library, and compute the variables of a map."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar

from syncheck.conversion.map_files import list_built_in, read_map
from syncheck.conversion.mapped_models import apply_map
from syncheck.conversion.name_maps import split_tensor
from syncheck.conversion.templates import parse_template
from syncheck.errors import UsageError
from syncheck.tensors.blocks import Files, has_elements, is_contiguous, ranges
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap, Rule
    from syncheck.snapshots import Tensor

# Possible sizes of a head, in this order, if no configuration names it.
HEAD_SIZES = (128, 64, 256, 96, 80, 112, 160, 192, 512, 32, 16, 8, 4)
# Number of layers whose data is compared, and the cosine that a correct size reaches at least: fine-tuned models have
# 0.9 or more, and unrelated rows about 0.
_LAYERS, _LEAST = 2, 0.5


class _Computed(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


_Data = TypeVar("_Data", bound=_Computed)


def recognize_map(models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int]) -> NameMap | None:
    """Return the built-in map with the most matching names of two models, None if no map helps.

    models: tensors by name.
    """
    best, most = None, _count_matches(models)
    if most == max(map(len, models)):
        return None
    # A name or two, like `output.weight`, do not show a library.
    most += (min(map(len, models)) - most) // 2
    for title in list_built_in():
        names = read_map(title)
        # Placeholders for unknown variables: the names of the parts do not depend on them.
        mapped, _ = apply_map(names, models, {"heads": 1, "kv_heads": 1, "head_dim": 2, **variables})
        matches = _count_matches([own.tensors for own in mapped])
        if matches > most:
            best, most = names, matches
    return best


def _count_matches(models: Sequence[Mapping[str, Tensor]]) -> int:
    return len(models[0].keys() & models[1].keys())


def complete_variables(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int], files: Files
) -> dict[str, int]:
    """Return the variables, with the numbers of heads and their size if shapes and data of the models show them.

    The number of heads follows from the rows of the other model's tensors for each part. The size of a head is the size
    that makes the parts of the first layers most similar to the other model.
    """
    joined = [
        (rule, values, own[name], other)
        for own, other in (models, models[::-1])
        for name in own
        if name not in other and (found := names.find_rule(name)) and found[0].variables
        for rule, values in [found]
    ]
    if not joined or all(rule.variables <= variables.keys() for rule, *_ in joined):
        return dict(variables)
    best, highest = dict(variables), _LEAST
    sizes = [variables["head_dim"]] if "head_dim" in variables else HEAD_SIZES
    for size in sizes:
        tried = {**variables, "head_dim": size, **_count_heads(joined, size)}
        usable = [row for row in joined if row[0].variables <= tried.keys()]
        if len(sizes) == 1:
            return tried
        similar: list[float] = []
        for rule, values, tensor, other in usable[: _LAYERS * 4]:
            for name, part in (split_tensor(rule, values, tensor, tried) or {}).items():
                if name not in other or other[name].shape != part.shape:
                    continue
                cosine = _cosine(part, other[name], files)
                if cosine is not None:
                    similar.append(cosine)
        if similar and (mean := math.fsum(similar) / len(similar)) > highest + 1e-9:
            best, highest = tried, mean
    return best


def find_guessed(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the variables that no configuration states, and that decide which rows of a tensor are which part.

    variables: those that a configuration states.
    """
    guessed: set[str] = set()
    for own, other in (models, models[::-1]):
        for name in own.keys() - other.keys():
            match = names.find_rule(name)
            if match is None:
                continue
            rule, _ = match
            # Without groups and rotary order, the shapes of the parts determine their rows.
            if rule.rotary or isinstance(rule.groups, str):
                guessed |= rule.variables - variables.keys()

    return tuple(sorted(guessed))


def require_equal_heads(variables: Sequence[Mapping[str, int]]) -> None:
    """Raise UsageError if the configurations of two models state different numbers of heads.

    variables: those that the configuration of each model states.
    """
    counts = [stated.get("heads") for stated in variables]
    if None not in counts and len(set(counts)) > 1:
        raise UsageError(
            f"A has {counts[0]} attention heads and B has {counts[1]}, as their configurations state; "
            "two models with one map need equal numbers. Correct config.json or the saved arguments"
        )


def _count_heads(
    joined: Sequence[tuple[Rule, Mapping[str, str], Tensor, Mapping[str, Tensor]]], size: int
) -> dict[str, int]:
    """Return the numbers of heads of this size, from the other model's tensors for the parts of a rule."""
    counts = {}
    for rule, values, _, other in joined:
        for template, share in zip(rule.parts, rule.sizes, strict=False):
            part = other.get(parse_template(template).fill(values))
            if isinstance(share, str) and part is not None and part.shape and part.shape[0] % size == 0:
                counts[share] = part.shape[0] // size
    return counts


def _cosine(a: Tensor, b: Tensor, files: Files) -> float | None:
    """Return the cosine between two tensors of equal shape.

    None for unreadable data, for zeros, and if an element is not finite.
    """
    import numpy as np

    if not all(is_readable(tensor) for tensor in (a, b)):
        return None
    products = np.zeros(3)
    with np.errstate(all="ignore"):
        for x, y in read_pairs(a, b, files):
            products += (x @ y, x @ x, y @ y)
    if not np.isfinite(products).all() or not products[1:].all():
        return None
    return float(products[0] / math.sqrt(products[1]) / math.sqrt(products[2]))


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor has floating-point numbers that can be read."""
    return has_elements(tensor) and DTYPES[tensor.dtype].family == "float"


def get_computed(tensor: Tensor, kind: type[_Data]) -> _Data | None:
    """Return the computed data of a tensor; None if it has other data, or is a view of a part of it."""
    data = tensor.data
    if not isinstance(data, kind) or not has_elements(tensor) or tensor.offset or tensor.shape != data.shape:
        return None
    return data if is_contiguous(tensor.shape, tensor.strides) else None


def read_pairs(a: Tensor, b: Tensor, files: Files) -> Iterator[tuple]:  # type: ignore[type-arg]  # arrays of numpy
    """Yield the elements of two tensors of equal shape as float64, in blocks. Infinities and NaNs stay as they are."""
    from syncheck.tensors.differences import read_float64

    for start, count in ranges([max(a, b, key=lambda tensor: DTYPES[tensor.dtype].size)]):
        yield tuple(read_float64(tensor, files, start, count, slot) for slot, tensor in enumerate((a, b)))
