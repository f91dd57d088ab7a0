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
_CLASS = r"(?:EMA|Ema)(?![a-z])|ExponentialMovingAverage|Averaged|WeightAverag"
_LIST = "shadow_params"
# The model itself within an averaging object.
_ONLINE = "online_model"
# Lightning's WeightAveraging saves the averaged weights as the model, and the model under another key.
_SWAPPED_COUNT, _SWAPPED_MODEL = "averaging_state.n_averaged", "current_model_state."
# Prefixes of a model whose copy has an uncertain root: the keys of containers and of wrappers.
_MODEL_PREFIXES = ("", "model.", "module.", f"{_ONLINE}.")
# What an averaging object at the top of a checkpoint stores: the first parts of the names.
_TOP_KEYS = ("initted", "step", "n_averaged", "ema_model")
_SCALAR: tuple[Shape, ...] = ((), (1,))
# The number of an entry of a list.
_NUMBER = r"[0-9]{1,8}"
# Names of tensors that only averaging objects store, and the starts of the names of their copies.
_COPIES = {"n_averaged": "module.", "initted": "ema_model."}


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


class _Suffix(NamedTuple):
    """A parameter whose name ends with certain parts. prefix: the parts before, with a dot at the end."""

    prefix: str
    name: str


def is_averaging_class(kind: type) -> bool:
    """Whether a class, or a class that it is derived from, averages the weights of a model by its name."""
    return any(re.search(_CLASS, base.__name__) for base in kind.__mro__)


@lru_cache(maxsize=4096)
def is_average_key(part: str) -> bool:
    """Whether a part of a name may be the key of an averaged copy."""
    if part == "n_averaged":
        return True

    words = [word.lower() for word in _WORD.findall(part)]
    return not _WORDS.isdisjoint(words)


def find_roots(shapes: Mapping[str, Shape], declared: Iterable[str]) -> list[Root]:
    """Return the roots of possible copies, certain roots first. declared: names of objects of averaging classes."""
    # Dictionaries without values are sets that keep the order.
    certain = dict.fromkeys(declared)
    uncertain: dict[str, None] = {}
    for name in shapes:
        parts = name.split(".")
        marked_root = _find_marked_root(name, parts, shapes)
        if marked_root is not None:
            certain[marked_root] = None

        keyed_root = _find_keyed_root(parts)
        if keyed_root is not None:
            uncertain[keyed_root] = None

    roots = [Root(name, certain=True) for name in certain]
    roots += [Root(name, certain=False) for name in uncertain if name not in certain]
    return roots


def _find_marked_root(name: str, parts: Sequence[str], shapes: Mapping[str, Shape]) -> str | None:
    """Return the root of a tensor that only averaging classes store."""
    root, dot, last = name.rpartition(".")
    start = f"{root}{dot}"
    copy = _COPIES.get(last)
    if copy is not None:
        # `n_averaged` is the count of updates itself, and `initted` has the count beside it.
        is_count = shapes[name] in _SCALAR
        is_marked = is_count if last == "n_averaged" else f"{start}step" in shapes
        if is_marked and _has_below(f"{start}{copy}", shapes):
            return root

    if last.isdecimal() and _LIST in parts:
        position = parts.index(_LIST)
        # The list at the top of a checkpoint is the root itself.
        return ".".join(parts[:position]) or _LIST

    return None


def _find_keyed_root(parts: Sequence[str]) -> str | None:
    """Return the root with a key of an averaged copy, given the parts of the name of a tensor."""
    for position, part in enumerate(parts):
        if is_average_key(part):
            return ".".join(parts[: position + 1])

    return None


def _has_below(prefix: str, names: Iterable[str]) -> bool:
    return any(name.startswith(prefix) for name in names)


def find_candidates(roots: Sequence[Root], names: Iterable[str]) -> frozenset[str]:
    """Return the names below roots, without the model within an averaging object."""
    prefixes = tuple(root.prefix for root in roots if root.name)
    has_top_root = any(not root.name for root in roots)
    top_keys = _TOP_KEYS if has_top_root else ()
    candidates = set()
    for name in names:
        parts = name.split(".")
        if _ONLINE in parts:
            continue

        # The name of a number like `n_averaged` may be a key itself.
        key = f"{name}."
        if key.startswith(prefixes) or parts[0] in top_keys:
            candidates.add(name)

    return frozenset(candidates)


def find_swapped(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Return the averaged tensors of Lightning's WeightAveraging, which have the names of the model."""
    if _SWAPPED_COUNT not in shapes:
        return frozenset()

    averaged = frozenset(name for name in shapes if f"{_SWAPPED_MODEL}{name}" in shapes)
    return averaged | {_SWAPPED_COUNT} if averaged else averaged


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
        wrappers = []
        for group in _find_groups(root, below, shapes, suffixes):
            if root.certain:
                is_copy = _has_equal_shapes(
                    root,
                    group,
                    below,
                    shapes,
                )
            else:
                is_copy = _is_complete(root, group, trained)

            if is_copy:
                wrappers.append(group.wrapper)

        for wrapper, entries in _find_lists(root, below).items():
            is_list = _is_list_of(
                entries,
                shapes,
                parameters,
                trained,
                certain=root.certain,
            )
            if is_list:
                wrappers.append(wrapper)

        for wrapper in wrappers:
            copies.update(_select_members(root, wrapper, below, shapes))

    return frozenset(copies)


def _index_suffixes(parameters: Iterable[str]) -> dict[str, list[_Suffix]]:
    """Return the parameters by the part of the name after a prefix, without dots."""
    suffixes: dict[str, list[_Suffix]] = defaultdict(list)
    for name in parameters:
        parts = name.split(".")
        prefix = ""
        for i, part in enumerate(parts):
            suffix = "".join(parts[i:])
            suffixes[suffix].append(_Suffix(prefix, name))
            prefix += f"{part}."

    return suffixes


def _find_groups(
    root: Root,
    below: Iterable[str],
    shapes: Mapping[str, Shape],
    suffixes: Mapping[str, Sequence[_Suffix]],
) -> list[_Group]:
    """Return the tensors below a root with names and shapes of the model, by wrapper."""
    groups: dict[str, _Group] = {}
    for name in below:
        parts = name.removeprefix(root.prefix).split(".")
        for position in range(len(parts)):
            originals = suffixes.get("".join(parts[position:]), ())
            prefixes = {suffix.prefix for suffix in originals if shapes[suffix.name] == shapes[name]}
            # The longest common part of the names counts.
            if prefixes:
                wrapper = ".".join([*parts[:position], ""])
                new_group = _Group(wrapper, [], set(prefixes))
                group = groups.setdefault(wrapper, new_group)
                group.names.append(name)
                group.prefixes.intersection_update(prefixes)
                break

    return [group for group in groups.values() if group.prefixes]


def _has_equal_shapes(root: Root, group: _Group, below: Iterable[str], shapes: Mapping[str, Shape]) -> bool:
    """Whether the tensors within a copy have the shapes of the model's tensors with the same names."""
    start = f"{root.prefix}{group.wrapper}"
    members = [name for name in below if name.startswith(start)]
    return any(_mirrors(members, start, prefix, shapes) for prefix in group.prefixes)


def _mirrors(members: Iterable[str], start: str, prefix: str, shapes: Mapping[str, Shape]) -> bool:
    """Whether no tensor of the model has the name of a member and another shape.

    start: of the names of the members.
    prefix: of the names of the model.
    """
    for member in members:
        shape = shapes[member]
        key = member.removeprefix(start)
        original = f"{prefix}{key}"
        # A member that the model does not have, for example a count, proves nothing.
        if shapes.get(original, shape) != shape:
            return False

    return True


def _is_complete(root: Root, group: _Group, trained: Sequence[str]) -> bool:
    """Whether a group has a copy of every trained parameter of a model with a usual prefix."""
    # The copy `encoder_ema` is one of `encoder`.
    last = root.name.rpartition(".")[2]
    words = last.split("_")
    original = "_".join(word for word in words if not is_average_key(word))
    usual_prefixes = {*_MODEL_PREFIXES, f"{original}."}

    start = f"{root.prefix}{group.wrapper}"
    copies = _strip_names(group.names, start)
    for prefix in group.prefixes & usual_prefixes:
        model = _strip_names(trained, prefix)
        if model and model <= copies:
            return True

    return False


def _strip_names(names: Iterable[str], prefix: str) -> set[str]:
    """Return the names with a prefix, without the prefix and without dots, because LitEma drops the dots."""
    return {name.removeprefix(prefix).replace(".", "") for name in names if name.startswith(prefix)}


def _find_lists(root: Root, below: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors of lists below a root in their order, by wrapper."""
    lists: dict[str, dict[int, str]] = defaultdict(dict)
    for name in below:
        head, dot, last = name.removeprefix(root.prefix).rpartition(".")
        if re.fullmatch(_NUMBER, last):
            wrapper = f"{head}{dot}"
            lists[wrapper][int(last)] = name

    ordered_lists = {}
    for wrapper, by_number in lists.items():
        numbers = sorted(by_number)
        # The entries of a list are numbered from 0 on without gaps.
        if numbers == list(range(len(numbers))):
            ordered_lists[wrapper] = [by_number[number] for number in numbers]

    return ordered_lists


def _is_list_of(
    entries: Sequence[str],
    shapes: Mapping[str, Shape],
    parameters: Sequence[str],
    trained: Sequence[str],
    *,
    certain: bool,
) -> bool:
    """Whether tensors have the shapes of the model's parameters, in their order; if certain, of some parameters."""

    def get_shapes(names: Iterable[str]) -> list[Shape]:
        return [shapes[name] for name in names]

    entry_shapes = get_shapes(entries)
    if entry_shapes in (get_shapes(parameters), get_shapes(trained)):
        return True

    if not certain:
        return False

    # The search continues after the last match, so the order counts.
    remaining = iter(get_shapes(parameters))
    return all(shape in remaining for shape in entry_shapes)


def _select_members(root: Root, wrapper: str, below: Iterable[str], shapes: Mapping[str, Shape]) -> list[str]:
    """Return everything within a copy, and the numbers directly below its root, for example the count of updates."""
    start = f"{root.prefix}{wrapper}"
    members = []
    for name in below:
        # Names directly below the root have no other dot.
        key = name.removeprefix(root.prefix)
        is_count = shapes[name] in _SCALAR and "." not in key
        if is_count or name.startswith(start):
            members.append(name)

    return members
