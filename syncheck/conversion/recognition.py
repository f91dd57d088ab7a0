"""Find the map between two models: recognize the names of a library, and compute the variables of a map."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from syncheck.conversion.map_files import list_built_in, read_map
from syncheck.conversion.map_prefixes import drop_prefix
from syncheck.conversion.mapped_models import apply_map
from syncheck.conversion.name_maps import split_tensor
from syncheck.errors import UsageError
from syncheck.tensors.blocks import Files, has_elements, is_contiguous, ranges
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.conversion.name_maps import NameMap, Rule
    from syncheck.snapshots import Tensor

# Possible sizes of a head, in this order, if no configuration names it.
HEAD_SIZES = (128, 64, 256, 96, 80, 112, 160, 192, 512, 32, 16, 8, 4)
# Number of the joined tensors that a layer has at most.
_MOST_JOINED = 4
# The cosine that a correct size reaches at least: fine-tuned models have 0.9 or more, and unrelated rows about 0.
_LEAST = 0.5


class _Computed(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


_Data = TypeVar("_Data", bound=_Computed)


class _Joined(NamedTuple):
    """A stored tensor of one model whose parts the other model may store separately."""

    rule: Rule
    """The rule that splits the tensor."""
    values: Mapping[str, str]
    """The values of the placeholders of the rule."""
    tensor: Tensor
    """The stored tensor."""
    partner: Mapping[str, Tensor]
    """The tensors of the other model."""

    def list_rows(self) -> Iterator[tuple[str, int]]:
        """Yield each variable of the sizes, and the number of rows of its part in the other model."""
        for template, share in zip(self.rule.part_templates, self.rule.shares, strict=True):
            # A share that is a number shows no variable.
            if not isinstance(share, str):
                continue
            name = template.fill(self.values)
            part = self.partner.get(name)
            if part is not None and part.shape:
                yield share, part.shape[0]


def recognize_map(models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int]) -> NameMap | None:
    """Return the built-in map with the most matching names of two models, None if no map helps.

    models: tensors by name.
    """
    matches_without_map = _count_matches(models)
    sizes = [len(model) for model in models]
    # With equal names, no map is needed.
    if matches_without_map == max(sizes):
        return None
    best: NameMap | None = None
    # A name or two, like `output.weight`, do not show a library.
    most = matches_without_map + (min(sizes) - matches_without_map) // 2
    # Placeholders for unknown variables: the names of the parts do not depend on variables.
    placeholders = {"heads": 1, "kv_heads": 1, "head_dim": 2}
    for title in list_built_in():
        names = drop_prefix(read_map(title), models)
        mapped, _ = apply_map(names, models, {**placeholders, **variables})
        matches = _count_matches([model.tensors for model in mapped])
        if matches > most:
            best, most = names, matches
    return best


def _count_matches(models: Sequence[Mapping[str, Tensor]]) -> int:
    """Return the number of names that both models have."""
    model_a, model_b = models
    return len(model_a.keys() & model_b.keys())


def complete_variables(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int], files: Files
) -> dict[str, int]:
    """Return the variables, with the numbers of heads and their size if shapes and data of the models show them.

    The number of heads follows from the rows of the other model's tensors for each part. The size of a head is the size
    that makes the parts of the first layers most similar to the other model.
    """
    joined_tensors = _list_joined(names, models)
    needed: set[str] = set()
    for joined in joined_tensors:
        needed |= joined.rule.variables
    if needed <= variables.keys():
        return dict(variables)
    # With the size of a head, the shapes show the numbers of heads.
    if "head_dim" in variables:
        return {**variables, **_count_heads(joined_tensors, variables["head_dim"])}
    best, highest = dict(variables), _LEAST
    for size in HEAD_SIZES:
        sized_variables = {**variables, "head_dim": size, **_count_heads(joined_tensors, size)}
        similarity = _measure_similarity(joined_tensors, sized_variables, files)
        # The first of several sizes that fit equally well.
        if similarity > highest + 1e-9:
            best, highest = sized_variables, similarity
    return best


def _list_joined(names: NameMap, models: Sequence[Mapping[str, Tensor]]) -> list[_Joined]:
    """Return the stored tensors of both models that a rule with variables splits."""
    # The parts of other rules do not depend on variables.
    return [joined for joined in _list_mapped(names, models) if joined.rule.variables]


def _list_mapped(names: NameMap, models: Sequence[Mapping[str, Tensor]]) -> Iterator[_Joined]:
    """Yield the stored tensors of both models that a rule of the map names as the other model does."""
    for model, partner in (models, models[::-1]):
        stored_names = [name for name in model if name not in partner]
        for match in names.match_names(stored_names):
            yield _Joined(
                match.rule,
                values=match.values,
                tensor=model[match.name],
                partner=partner,
            )


def _measure_similarity(joined_tensors: Sequence[_Joined], variables: Mapping[str, int], files: Files) -> float:
    """Return the mean cosine between the parts of some tensors and the other model; 0 without a comparable part."""
    usable_tensors = [joined for joined in joined_tensors if joined.rule.variables <= variables.keys()]
    cosines: list[float] = []
    for joined in _select_layers(usable_tensors):
        cosines += _list_cosines(joined, variables, files)
    return math.fsum(cosines) / max(1, len(cosines))


def _select_layers(joined_tensors: Sequence[_Joined]) -> list[_Joined]:
    """Return the joined tensors of the first layer, of a layer in the middle, and of the last layer.

    A fault in neighbouring layers must not outvote all layers.
    """
    last = max(0, len(joined_tensors) - _MOST_JOINED)
    selected: dict[int, _Joined] = {}
    for first in (0, last // 2, last):
        layer = joined_tensors[first : first + _MOST_JOINED]
        selected |= dict(enumerate(layer, first))
    return list(selected.values())


def _list_cosines(joined: _Joined, variables: Mapping[str, int], files: Files) -> list[float]:
    """Return the cosine between each comparable part of a tensor and the other model."""
    parts = split_tensor(
        joined.rule,
        values=joined.values,
        tensor=joined.tensor,
        variables=variables,
    )
    cosines = []
    for name, part in (parts or {}).items():
        # A part that the other model lacks is like a part of another shape.
        partner = joined.partner.get(name)
        cosine = None if partner is None else _cosine(part, partner, files)
        if cosine is not None:
            cosines.append(cosine)
    return cosines


def find_guessed(
    names: NameMap, models: Sequence[Mapping[str, Tensor]], variables: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the variables that no configuration states, and that decide which rows of a tensor are which part.

    variables: those that a configuration states.
    """
    guessed: set[str] = set()
    for joined in _list_mapped(names, models):
        rule = joined.rule
        # Without groups and rotary order, the shapes of the parts determine their rows.
        if rule.rotary or isinstance(rule.groups, str):
            guessed |= rule.variables - variables.keys()

    return tuple(sorted(guessed))


def list_fitted(names: NameMap, models: Sequence[Mapping[str, Tensor]]) -> tuple[str, ...]:
    """Return the names of the tensors whose rows a map orders by the size of a head, as the other model names them."""
    fitted_names: set[str] = set()
    for joined in _list_mapped(names, models):
        if joined.rule.rotary:
            fitted_names.update(template.fill(joined.values) for template in joined.rule.part_templates)
    return tuple(sorted(fitted_names))


def require_equal_heads(variables: Sequence[Mapping[str, int]]) -> None:
    """Raise UsageError if the configurations of two models state different numbers of heads.

    variables: those that the configuration of each model states.
    """
    counts = [stated["heads"] for stated in variables if "heads" in stated]
    # One number is the number of both models.
    if len(set(counts)) > 1:
        raise UsageError(
            f"A has {counts[0]} attention heads and B has {counts[1]}, as their configurations state; "
            "two models with one map need equal numbers. Correct config.json or the saved arguments"
        )


def _count_heads(joined_tensors: Sequence[_Joined], size: int) -> dict[str, int]:
    """Return the numbers of heads of this size, from the other model's tensors for the parts of a rule."""
    counts: dict[str, int] = {}
    for joined in joined_tensors:
        for variable, rows in joined.list_rows():
            heads, remainder = divmod(rows, size)
            # Rows of half a head belong to a head of another size.
            if not remainder:
                counts[variable] = heads
    return counts


def _cosine(a: Tensor, b: Tensor, files: Files) -> float | None:
    """Return the cosine between two tensors.

    None for different shapes, for unreadable data, for zeros, and if an element is not finite.
    """
    import numpy as np

    # Parts of another shape have other rows.
    if a.shape != b.shape or not are_readable(a, b):
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


def are_readable(*tensors: Tensor) -> bool:
    """Whether all of the tensors have floating-point numbers that can be read."""
    return all(is_readable(tensor) for tensor in tensors)


def get_computed(tensor: Tensor, kind: type[_Data]) -> _Data | None:
    """Return the computed data of a tensor; None if it has other data, or is a view of a part of it."""
    data = tensor.data
    if not isinstance(data, kind) or not has_elements(tensor):
        return None
    # A view of all elements in another order is not the data either.
    is_complete = (tensor.offset, tensor.shape) == (0, data.shape)
    if not is_complete or not is_contiguous(tensor.shape, tensor.strides):
        return None
    return data


def are_finite(x: Any, y: Any) -> bool:
    """Whether two arrays of floats have neither NaN nor infinity."""
    import numpy as np

    return bool(np.isfinite(x).all() and np.isfinite(y).all())


def read_pairs(a: Tensor, b: Tensor, files: Files) -> Iterator[tuple]:  # type: ignore[type-arg]  # arrays of numpy
    """Yield the elements of two tensors of equal shape as float64, in blocks. Infinities and NaNs stay as they are."""
    from syncheck.tensors.differences import read_float64

    # Blocks of the wider dtype have the fewest elements.
    wider = b if DTYPES[b.dtype].size > DTYPES[a.dtype].size else a
    for start, count in ranges([wider]):
        yield read_float64(a, files, start, count, 0), read_float64(b, files, start, count, 1)
