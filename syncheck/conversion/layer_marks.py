"""Mark the numbers of layers inside of parts of names, like the 2 in `blk2/wo`, `layer_2.w` and `net[02].w`.

A number that is a whole part, like the 2 in `blk.2.wo`, always counts and needs no mark. Other numbers may be a layer's
or belong to a word, as in `w1`, `fc2`, `conv2d` and `8bit`. Numbers of layers have the same text before them in several
names of a model, and tensors of one shape after all or most numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.conversion.numbering import MARK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.snapshots import Tensor

# Longer numbers are text, and so are those of words like `conv2d`, `conv3x3` and `8bit`.
_CANDIDATE = re.compile(r"(?<![0-9])(?<![0-9]x)([0-9]{1,9})(?![0-9])(?!d(?![a-z])|x[0-9]|bit)")
# A whole part of a name, without leading zeros.
_PART = re.compile(r"0|[1-9][0-9]*")
# The first number of programs, with leading zeros.
_ZEROS = frozenset(("0", "00", "000", "0000"))


def mark_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model by their names, with marks around the numbers of layers inside of parts.

    No name may contain a mark.
    """
    names: list[_Name] = []
    for text, tensor in tensors.items():
        sizes = tuple(sorted(tensor.shape))
        names.append(_Name(_CANDIDATE.split(text), sizes))
    unread = _select_unread(names)
    while unread:
        groups: dict[tuple[str, ...], list[_Name]] = defaultdict(list)
        for name in unread:
            groups[*name.pattern, name.rest[0]].append(name)
        for group in groups.values():
            is_layer = _are_layers(group)
            for name in group:
                name.read_number(is_layer)
        unread = _select_unread(unread)
    return dict(zip(map(str, names), tensors.values(), strict=True))


@dataclass(slots=True)
class _Name:
    """A name whose numbers are read from left to right."""

    rest: list[str]
    """Text, number, text, number and so on, up to the text after the last number."""
    sizes: tuple[int, ...]
    """The sorted shape of the tensor, which does not show an orientation."""
    marked: str = ""
    """The name before the rest, with marks."""
    pattern: tuple[str, ...] = ()
    """The text before each number that was read, and the number; empty for the number of a layer."""
    is_nested: bool = False
    """Whether the number of a layer was read."""

    def __str__(self) -> str:
        """The name with marks, after all numbers were read."""
        return self.marked + self.rest[0]

    @property
    def is_part(self) -> bool:
        """Whether the next number is a whole part of the name, which needs no mark."""
        before, number, after = self.rest[:3]
        edges = {(self.marked + before)[-1:], after[:1]}
        return edges <= {"", "."} and _PART.fullmatch(number) is not None

    def read_number(self, is_layer: bool) -> None:
        """Move after the next number. is_layer: whether numbers at this place are numbers of layers."""
        is_part = self.is_part
        before, number, *self.rest = self.rest
        has_mark = is_layer and not is_part
        self.marked += f"{before}{MARK}{number}{MARK}" if has_mark else before + number
        counts = is_layer or is_part
        self.is_nested |= counts
        self.pattern = (*self.pattern, before, "" if counts else number)


def _select_unread(names: Iterable[_Name]) -> list[_Name]:
    """Return the names that have another number."""
    return [name for name in names if len(name.rest) > 1]


def _are_layers(group: Sequence[_Name]) -> bool:
    """Whether the next number is a layer's, in names that have the same text before it."""
    # Layers contain tensors with the same name and shape, apart from layers of another kind or with a fault.
    owners: dict[object, set[int]] = defaultdict(set)
    texts_by_number: dict[int, str] = {}
    for name in group:
        _, text, *after = name.rest
        number = int(text)
        owners[tuple(after), name.sizes].add(number)
        # Names with 1 and 01 would be the same layer.
        if texts_by_number.setdefault(number, text) != text:
            return False
    numbers = texts_by_number.keys()
    # One number shows no layers.
    if len(numbers) < 2:
        return False
    most = len(max(owners.values(), key=len))
    if 0 in numbers:
        return 2 * most > len(numbers)
    # People count the modules of one layer from 1, like `w1`, `w2` and `w3`; programs count from 0.
    return most == len(numbers) and not group[0].is_nested and _have_no_layers(group)


def _have_no_layers(group: Iterable[_Name]) -> bool:
    """Whether the text after the next number contains no number from 0, which is a better number of a layer."""
    from_zero: dict[tuple[str, ...], bool] = defaultdict(bool)
    for name in group:
        later_texts, later_numbers = name.rest[2::2], name.rest[3::2]
        from_zero[tuple(later_texts)] |= not _ZEROS.isdisjoint(later_numbers)
    return not all(from_zero.values())
