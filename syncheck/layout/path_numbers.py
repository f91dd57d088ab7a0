"""Classify the numbers in a path: rank, node, step, mesh coordinate, part of a checkpoint, or unknown."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

Role = Literal["rank", "local", "node", "mesh", "step", "part", "shard", "plain"]
# Before the other words of the path are known.
_PossibleRole = Role | Literal["short", "device"]
Use = Literal["replica", "step", "part", "run"]

# The meaning of a number for its file: which replica, which step, or which part of a checkpoint it is. Numbers without
# a role belong to the name of the run.
USES: Mapping[Role, Use] = {
    "rank": "replica",
    "local": "replica",
    "node": "replica",
    "mesh": "replica",
    "step": "step",
    "part": "part",
    "shard": "part",
    "plain": "run",
}

_NUMBER = re.compile(r"\d+")
_LONGEST = 80  # characters before a number that are searched, to limit the time for long names
_START = r"(?:^|[^a-z])"
_ADDRESS = re.compile(r"(?:(?<![\d.-])|(?<=ip-))(?:\d{1,3}[.-]){3}\d{1,3}(?![.-]?\d)")
# Coordinates in a mesh of ranks: dp0_tp1, and NeMo's tp_rank_00_pp_rank_001. The pp in DeepSpeed's zero_pp_rank stands
# for its data-parallel ranks.
_MESH = rf"(?i){_START}(?<!zero_)((?:dp_(?:shard|replicate)|e?dp|e?tp|v?pp|pipeline_stage|cp|sp|ep))([-_]?rank)?[-_=]?$"
# Abbreviations of an epoch or a checkpoint too: mesh dimensions only beside another dimension, or with the word rank.
_AMBIGUOUS: Mapping[str, Role] = {"ep": "step", "cp": "plain", "sp": "plain"}
# Roles of numbers whose words leave no doubt that they are ranks.
_CLEAR_WORDS = frozenset({"rank", "local"})
_EXTENSIONS = re.compile(r"(?:\.(?:pth|pt|ckpt|bin|safetensors|pkl|tar|fingerprint|json))+$", re.IGNORECASE)
_LAST_WORD = r"(?i)[a-z_=-]*$"


class _RoleRule(NamedTuple):
    """The text around the numbers of a role.

    before: matches the end of the text before the number, within its segment of the path.
    after: matches the start of the text after the number, to the end of the path.
    """

    role: _PossibleRole
    before: str
    after: str = ""


# The first rule that matches a number determines its role.
_RULES = (
    # Megatron's and DeepSpeed's model-parallel coordinate: files that differ here contain different parts of the model.
    _RoleRule("shard", r"mp_rank_(?:\d+_)?$"),
    # DeepSpeed's other parts: ZeRO partitions of the optimizer, experts, and layers of a pipeline. ZeRO's model states
    # have a rank in their names too, and are replicas.
    _RoleRule("shard", r"(?:zero_pp|expp)_rank_$", r"_mp_rank_\d+(?:_\d+)*_optim_states$"),
    _RoleRule("shard", r"(?:^|_)layer_$", r"(?:_expert_|-model_)\d+.*model_states$"),
    _RoleRule("shard", r"(?:^|_)layer_\d+(?:_expert_|-model_)$", r".*model_states$"),
    # The machine: torchrun counts machines by GROUP_RANK, Accelerate by machine_rank.
    _RoleRule(
        "node",
        rf"(?i)(?:(?:node|host)(?:name|s)?|{_START}"
        r"(?:machine|server|worker|pod|instance|vm|compute|blade|dgx|cn|nid|group(?=[-_]rank)))"
        r"[-_]?(?:rank|id|idx|index)?[-_=]?$",
    ),
    _RoleRule("local", rf"(?i){_START}local(?:[-_]rank)?[-_=]?$"),
    _RoleRule("mesh", _MESH),
    # The rank of an adapter's matrices: files that differ here are different adapters.
    _RoleRule("part", r"(?i)lora[-_]?r(?:ank)?[-_=]?$"),
    # rank_3, rank3, rank-3, .rank_3., zero_pp_rank_0; Accelerate writes random_states_3.
    _RoleRule("rank", rf"(?i){_START}(?:rank[-_=]?|random_states_)$"),
    _RoleRule("part", "", r"-of-"),
    _RoleRule("part", r"-of-$"),
    # Words right before the number of a step or an epoch, which is never a rank.
    _RoleRule(
        "step",
        rf"(?i){_START}(?:global_?step|step|epoch|ep|iter|iteration|batch|ba|update|checkpoint|ckpt)s?[-_=]?$",
    ),
    # _r3, -r3: a rank if the path has no longer word for it.
    _RoleRule("short", r"(?i)[-_.]r$"),
    # The device within a node: its local rank, if the path has no other word for the rank.
    _RoleRule("device", rf"(?i){_START}(?:gpu|cuda|npu|xpu|tpu|device|proc(?:ess)?)[-_:=]?$"),
)


class FileKey(NamedTuple):
    """What replicas have in common. Everything else in their paths is starred.

    run: the name of the run, with `*` for all other numbers.
    step: steps and epochs in the order of the path.
    part: roles and numbers of the part of a checkpoint.
    """

    run: str
    step: tuple[int, ...] = ()
    part: tuple[tuple[Role, int], ...] = ()


@record
class PathNumbers:
    """A path split at its numbers."""

    texts: tuple[str, ...]
    """The texts between the numbers; names with equal texts differ only in numbers."""
    numbers: tuple[int, ...]
    roles: tuple[Role, ...]
    """One for each number."""
    folders: tuple[bool, ...]
    """Whether each number is in a folder's name."""
    host: str | None = None
    """The machine, as the path names it."""

    def key(self) -> FileKey:
        """Return the key of the file: replicas have equal keys."""
        steps: list[int] = []
        part: list[tuple[Role, int]] = []
        for role, number in self.list_common():
            if role == "step":
                steps.append(number)
            else:
                part.append((role, number))

        starred = self.list_positions("replica", "step", "part")
        return FileKey(self.without(*starred), tuple(steps), tuple(part))

    def without(self, *positions: int) -> str:
        """Return the path with `*` for the numbers at the given positions."""
        texts = [self.texts[0]]
        for position, number in enumerate(self.numbers):
            texts.append("*" if position in positions else str(number))
            texts.append(self.texts[position + 1])

        return "".join(texts)

    def without_replica(self) -> str:
        """Return the path with `*` for the numbers that distinguish replicas."""
        return self.without(*self.list_positions("replica"))

    def list_positions(self, *uses: Use) -> list[int]:
        """Return the positions of the numbers with the given uses."""
        return [position for position, role in enumerate(self.roles) if USES[role] in uses]

    def with_role(self, role: Role, positions: Iterable[int]) -> PathNumbers:
        """Return the same numbers, those at some positions with another role."""
        roles = list(self.roles)
        for position in positions:
            roles[position] = role

        return replace(self, roles=tuple(roles))

    def list_common(self) -> tuple[tuple[Role, int], ...]:
        """Return the numbers with equal values for all replicas: step, part and shard."""
        positions = self.list_positions("step", "part")
        return tuple((self.roles[position], self.numbers[position]) for position in positions)

    def select(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers at some positions."""
        return tuple(self.numbers[position] for position in positions)

    def all_of(self, role: Role) -> list[int]:
        """Return the positions of this role."""
        return [position for position, number_role in enumerate(self.roles) if number_role == role]

    def find(self, role: Role) -> int | None:
        """Return the last position of this role: the one nearest to the file's own name."""
        return max(self.all_of(role), default=None)

    def number_of(self, role: Role) -> int | None:
        """Return the last number of this role."""
        position = self.find(role)
        if position is None:
            return None

        return self.numbers[position]

    def mesh(self) -> dict[str, int]:
        """Return the coordinate by dimension of the mesh of ranks."""
        coordinate = {}
        for position in self.all_of("mesh"):
            match = _match_mesh(self.texts[position])
            coordinate[match[1].lower()] = self.numbers[position]

        return coordinate

    def fills_folder(self, position: int) -> bool:
        """Whether the name of a folder has no other number."""
        is_first = position == 0 or "/" in self.texts[position]
        return is_first and "/" in self.texts[position + 1]

    def is_glued(self, position: int) -> bool:
        """Whether a letter precedes the number, as in seed3: then the number is part of a name, not a step."""
        return self.texts[position][-1:].isalpha()


@lru_cache(maxsize=2**16)
def split_path(path: str) -> PathNumbers:
    """Split a path at its numbers and classify them by the text before them. The file extension is removed."""
    stem = _EXTENSIONS.sub("", path.replace(os.sep, "/"))
    name_start = stem.rfind("/") + 1
    in_addresses: set[int] = set()
    for match in _ADDRESS.finditer(stem):
        in_addresses.update(range(*match.span()))

    texts, numbers, folders, roles = [], [], [], list[_PossibleRole]()
    text_start = 0
    host: str | None = None
    for match in _NUMBER.finditer(stem):
        texts.append(stem[text_start : match.start()])
        numbers.append(int(match.group()))
        folders.append(match.start() < name_start)
        role: _PossibleRole = "node"
        if match.start() not in in_addresses:
            role = _find_role(stem, match)

        if role == "node" and host is None:
            host = _name_host(stem, match, in_folder=folders[-1])

        roles.append(role)
        text_start = match.end()

    texts.append(stem[text_start:])
    return PathNumbers(
        texts=tuple(texts),
        numbers=tuple(numbers),
        roles=_resolve_roles(roles, texts),
        folders=tuple(folders),
        host=host,
    )


def _get_text_before(stem: str, match: re.Match[str]) -> str:
    """Return the text before a number in its segment of the path."""
    segment_start = stem.rfind("/", 0, match.start()) + 1
    return stem[segment_start : match.start()][-_LONGEST:]


def _name_host(stem: str, match: re.Match[str], *, in_folder: bool) -> str:
    """Return the name of the machine with this number: the folder, or the word before the number in a file's name."""
    before = _get_text_before(stem, match)
    if in_folder:
        return before + stem[match.start() :].partition("/")[0]

    last_word = re.search(_LAST_WORD, before)
    assert last_word is not None
    return last_word.group().lstrip("-_=") + match.group()


def _find_role(stem: str, match: re.Match[str]) -> _PossibleRole:
    """Return the role of a number by the text before it in its segment, and the text after it."""
    before, after = _get_text_before(stem, match), stem[match.end() :]
    for rule in _RULES:
        if re.search(rule.before, before) and re.match(rule.after, after):
            return rule.role

    return "plain"


def _resolve_roles(roles: Sequence[_PossibleRole], texts: Sequence[str]) -> tuple[Role, ...]:
    """Resolve roles by the other words of the path."""
    # The text after the last number has no role.
    mesh_words = [_match_mesh(text) for text, role in zip(texts, roles, strict=False) if role == "mesh"]
    resolved: list[Role] = []
    for position, role in enumerate(roles):
        if role == "mesh":
            mesh_word = _match_mesh(texts[position])
            resolved.append(_resolve_mesh(mesh_word, mesh_words, roles))
        elif _counts_ranks(position, roles, texts):
            resolved.append("plain")
        else:
            resolved.append(_resolve_rank(role, roles))

    # Beside a global rank, a local rank adds nothing.
    if "rank" not in resolved:
        resolved = ["rank" if role == "local" else role for role in resolved]

    return tuple(resolved)


def _match_mesh(text: str) -> re.Match[str]:
    """Return the word of a coordinate in a mesh at the end of the text before its number."""
    match = re.search(_MESH, text)
    assert match is not None
    return match


def _resolve_mesh(match: re.Match[str], matches: Collection[re.Match[str]], roles: Sequence[_PossibleRole]) -> Role:
    """Return the role of the coordinate in a mesh.

    match: its word.
    matches: the words of all coordinates in the path.
    """
    dimensions = {each_match[1].lower() for each_match in matches}
    dimension = match[1].lower()
    has_word_rank = match[2] is not None
    # Beside another dimension, an abbreviation is no epoch and no checkpoint.
    if dimensions <= _AMBIGUOUS.keys() and not has_word_rank:
        return _AMBIGUOUS[dimension]

    # In a data-parallel mesh, the coordinate is the rank.
    if dimensions == {"dp"} and "rank" not in roles:
        return "rank"

    return "mesh"


def _counts_ranks(position: int, roles: Sequence[_PossibleRole], texts: Sequence[str]) -> bool:
    """Whether a number is the number of ranks, as in rank_0-of-4."""
    # Before the first number, there is no rank: the slice is empty.
    roles_of_pair = tuple(roles[position - 1 : position + 1])
    return roles_of_pair == ("rank", "part") and texts[position].startswith("-of-")


def _resolve_rank(role: _PossibleRole, roles: Collection[_PossibleRole]) -> Role:
    """Return the role of a number whose word may stand for a rank, if the path has no clearer word."""
    clear_words = _CLEAR_WORDS.intersection(roles)
    if role == "short":
        return "plain" if clear_words else "rank"

    if role != "device":
        return role

    # A number after -r is clearer than the number of a device.
    if clear_words or "short" in roles:
        return "plain"

    # Within a node, the device is the local rank.
    return "local" if "node" in roles else "plain"
