"""Find averaged copies of a model (EMA, SWA) among the tensors of a checkpoint.

A copy has a root: the name of the object that averages. The roots come from three sources: classes of objects in memory
and tensors that only averaging classes store are certain; a key like `ema` is not, because a module may have this name.
Below a root, the names and shapes of the tensors are compared with those of the model:

- torch's AveragedModel: `n_averaged` beside `module.*`.
- ema-pytorch: `initted` and `step` beside `ema_model.*`, and `online_model.*`, which is the model itself.
- torch-ema and diffusers: a list `shadow_params` in the order of the parameters.
- timm, Lightning and others: the tensors of the model, with their names, below a key like `state_dict_ema`.
- LitEma: the names of the model without dots.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    Shape = tuple[int, ...]

# Words of keys under which trainers save averaged copies.
_WORDS = frozenset("ema swa averaged average averaging shadow".split())
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
# Words of classes that average a model.
_CLASS = re.compile(r"(?:EMA|Ema)(?![a-z])|ExponentialMovingAverage|Averaged|WeightAverag")
_LIST = "shadow_params"
# The model itself within an averaging object.
_ONLINE = "online_model"
# Lightning's WeightAveraging saves the averaged weights as the model, and the model under another key.
_SWAPPED_COUNT, _SWAPPED_MODEL = "averaging_state.n_averaged", "current_model_state."
# Prefixes of a model whose copy has an uncertain root: the keys of containers and of wrappers.
_MODEL_PREFIXES = ("", "model.", "module.", f"{_ONLINE}.")
_SCALAR: tuple[Shape, ...] = ((), (1,))


class Root(NamedTuple):
    """Where a copy may be.

    name: of the averaging object; empty for the whole checkpoint.
    certain: whether the object averages a model, regardless of its name.
    """

    name: str
    certain: bool

    @property
    def prefix(self) -> str:
        """The prefix of the names below the root."""
        return f"{self.name}." if self.name else ""


class _Group(NamedTuple):
    """Tensors below a root with the names of the model after one wrapper.

    wrapper: the common part of the names between the root and the names of the model, with a dot at the end.
    prefixes: the parts of the model's names before the common names.
    """

    wrapper: str
    names: list[str]
    prefixes: set[str]


def is_averaging_class(kind: type) -> bool:
    """Whether a class, or a class that it is derived from, averages the weights of a model by its name."""
    return any(_CLASS.search(base.__name__) is not None for base in kind.__mro__)


@lru_cache(maxsize=4096)
def is_average_key(part: str) -> bool:
    """Whether a part of a name may be the key of an averaged copy."""
    return part == "n_averaged" or any(word.lower() in _WORDS for word in _WORD.findall(part))


def find_roots(shapes: Mapping[str, Shape], declared: Iterable[str]) -> list[Root]:
    """Return the roots of possible copies, certain roots first. declared: names of objects of averaging classes."""
    certain = dict.fromkeys(declared)
    uncertain: dict[str, None] = {}
    for name in shapes:
        parts = name.split(".")
        marked = _find_marked_root(name, parts, shapes)
        if marked is not None:
            certain[marked] = None
        position = next((i for i, part in enumerate(parts) if is_average_key(part)), None)
        if position is not None:
            uncertain[".".join(parts[: position + 1])] = None
    return [*(Root(name, True) for name in certain), *(Root(name, False) for name in uncertain if name not in certain)]


def _find_marked_root(name: str, parts: Sequence[str], shapes: Mapping[str, Shape]) -> str | None:
    """Return the root of a tensor that only averaging classes store."""
    root, dot, last = name.rpartition(".")
    if last == "n_averaged" and shapes[name] in _SCALAR and _has_below(f"{root}{dot}module.", shapes):
        return root
    if last == "initted" and f"{root}{dot}step" in shapes and _has_below(f"{root}{dot}ema_model.", shapes):
        return root
    if last.isdecimal() and _LIST in parts:
        position = parts.index(_LIST)
        return ".".join(parts[:position]) or _LIST
    return None


def _has_below(prefix: str, shapes: Iterable[str]) -> bool:
    return any(name.startswith(prefix) for name in shapes)


def find_candidates(roots: Sequence[Root], names: Iterable[str]) -> frozenset[str]:
    """Return the names below roots, without the model within an averaging object."""
    named = [root.prefix for root in roots if root.name]
    whole = any(not root.name for root in roots)
    candidates = set()
    for name in names:
        # The name of a number such as `n_averaged` may be a key itself.
        below = any(f"{name}.".startswith(prefix) for prefix in named)
        own = whole and name.split(".")[0] in ("initted", "step", "n_averaged", "ema_model")
        if (below or own) and _ONLINE not in name.split("."):
            candidates.add(name)
    return frozenset(candidates)


def find_swapped(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Return the averaged tensors of Lightning's WeightAveraging, which have the names of the model."""
    if _SWAPPED_COUNT not in shapes:
        return frozenset()
    averaged = [name for name in shapes if f"{_SWAPPED_MODEL}{name}" in shapes]
    return frozenset({*averaged, _SWAPPED_COUNT}) if averaged else frozenset()


def find_copies(
    roots: Sequence[Root],
    candidates: Collection[str],
    shapes: Mapping[str, Shape],
    parameters: Sequence[str],
    trained: Sequence[str],
) -> frozenset[str]:
    """Return the tensors of averaged copies.

    candidates: names below roots.
    parameters: the parameters of the model, outside of the roots, in their order.
    trained: the parameters of which an uncertain copy must have all: the trained parameters, if they are known.
    """
    suffixes = _index_suffixes(parameters)
    copies: set[str] = set()
    for root in roots:
        below = [name for name in candidates if name.startswith(root.prefix) and name != root.name]
        for group in _find_groups(root, below, shapes, suffixes):
            if root.certain:
                mirrors = _has_equal_shapes(root, group, below, shapes)
            else:
                mirrors = _is_complete(root, group, trained)
            if mirrors:
                copies.update(_select_members(root, group.wrapper, below, shapes))
        for wrapper, numbers in _find_lists(root, below).items():
            if _is_list_of(numbers, shapes, parameters, trained, certain=root.certain):
                copies.update(_select_members(root, wrapper, below, shapes))
    return frozenset(copies)


def _index_suffixes(parameters: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Return (prefix, name) of the parameters by the part of the name after the prefix, without dots."""
    suffixes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name in parameters:
        parts = name.split(".")
        prefix = ""
        for i, part in enumerate(parts):
            suffixes["".join(parts[i:])].append((prefix, name))
            prefix += f"{part}."
    return suffixes


def _find_groups(
    root: Root,
    below: Iterable[str],
    shapes: Mapping[str, Shape],
    suffixes: Mapping[str, Sequence[tuple[str, str]]],
) -> list[_Group]:
    """Return the tensors below a root with names and shapes of the model, by wrapper."""
    groups: dict[str, _Group] = {}
    for name in below:
        parts = name.removeprefix(root.prefix).split(".")
        # The longest common part of the names counts.
        for i in range(len(parts)):
            matches = suffixes.get("".join(parts[i:]), ())
            prefixes = {prefix for prefix, parameter in matches if shapes[parameter] == shapes[name]}
            if not prefixes:
                continue
            wrapper = "".join(f"{part}." for part in parts[:i])
            group = groups.setdefault(wrapper, _Group(wrapper, [], set(prefixes)))
            group.names.append(name)
            group.prefixes.intersection_update(prefixes)
            break
    return [group for group in groups.values() if group.prefixes]


def _has_equal_shapes(root: Root, group: _Group, below: Iterable[str], shapes: Mapping[str, Shape]) -> bool:
    """Whether the tensors within a copy have the shapes of the model's tensors with the same names."""
    start = f"{root.prefix}{group.wrapper}"
    for prefix in group.prefixes:
        model = {name: f"{prefix}{name.removeprefix(start)}" for name in below if name.startswith(start)}
        if all(shapes.get(original, shapes[name]) == shapes[name] for name, original in model.items()):
            return True
    return False


def _is_complete(root: Root, group: _Group, trained: Sequence[str]) -> bool:
    """Whether a group has a copy of every trained parameter of a model with a usual prefix."""
    words = [word for word in root.name.rpartition(".")[2].split("_") if not is_average_key(word)]
    usual = {*_MODEL_PREFIXES, f"{'_'.join(words)}."}
    copies = {name.removeprefix(f"{root.prefix}{group.wrapper}").replace(".", ""): name for name in group.names}
    for prefix in group.prefixes & usual:
        model = [name for name in trained if name.startswith(prefix)]
        if model and all(name.removeprefix(prefix).replace(".", "") in copies for name in model):
            return True
    return False


def _find_lists(root: Root, below: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors of lists below a root in their order, by wrapper."""
    lists: dict[str, dict[int, str]] = defaultdict(dict)
    for name in below:
        head, dot, last = name.removeprefix(root.prefix).rpartition(".")
        if last.isdecimal() and last.isascii() and len(last) < 9:
            lists[f"{head}{dot}"][int(last)] = name
    ordered = {}
    for wrapper, by_number in lists.items():
        if sorted(by_number) == list(range(len(by_number))):
            ordered[wrapper] = [by_number[i] for i in range(len(by_number))]
    return ordered


def _is_list_of(
    numbers: Sequence[str],
    shapes: Mapping[str, Shape],
    parameters: Sequence[str],
    trained: Sequence[str],
    *,
    certain: bool,
) -> bool:
    """Whether tensors have the shapes of the model's parameters, in their order; if certain, of some parameters."""
    listed = [shapes[name] for name in numbers]
    all_shapes = [shapes[name] for name in parameters]
    if listed in (all_shapes, [shapes[name] for name in trained]):
        return True
    # The search goes on after the last found shape, so the order counts.
    remaining = iter(all_shapes)
    return certain and all(shape in remaining for shape in listed)


def _select_members(root: Root, wrapper: str, below: Iterable[str], shapes: Mapping[str, Shape]) -> list[str]:
    """Return everything within a copy, and the numbers directly below its root, such as the count of updates."""
    start = f"{root.prefix}{wrapper}"
    members = []
    for name in below:
        direct = "." not in name.removeprefix(root.prefix)
        if name.startswith(start) or (direct and shapes[name] in _SCALAR):
            members.append(name)
    return members
