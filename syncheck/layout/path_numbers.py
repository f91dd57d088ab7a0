"""Classify the numbers in a path: rank, node, step, mesh coordinate, part of a checkpoint, or unknown."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Role = Literal["rank", "local", "node", "mesh", "step", "part", "shard", "plain"]
_Found = Role | Literal["short", "device"]  # before the other words of the path are known

_NUMBER = re.compile(r"\d+")
_LONGEST = 80  # characters before a number that are searched, to limit the time for long names
_START = r"(?:^|[^a-z])"
# Words right before the number of a step or an epoch, which is never a rank.
_STEP = re.compile(
    _START + r"(?:global_?step|step|epoch|ep|iter|iteration|batch|ba|update|checkpoint|ckpt)s?[-_=]?$", re.IGNORECASE
)
# rank_3, rank3, rank-3, .rank_3., zero_pp_rank_0; Accelerate writes random_states_3.
_RANK = re.compile(_START + r"(?:rank[-_=]?|random_states_)$", re.IGNORECASE)
# _r3, -r3: a rank if the path has no longer word for it.
_SHORT_RANK = re.compile(r"[-_.]r$", re.IGNORECASE)
# The rank of an adapter's matrices: files that differ here are different adapters.
_LORA = re.compile(r"lora[-_]?r(?:ank)?[-_=]?$", re.IGNORECASE)
_LOCAL = re.compile(_START + r"local(?:[-_]rank)?[-_=]?$", re.IGNORECASE)
# The device within a node: its local rank, if the path has no other word for the rank.
_DEVICE = re.compile(_START + r"(?:gpu|cuda|npu|xpu|tpu|device|proc(?:ess)?)[-_:=]?$", re.IGNORECASE)
# The machine: torchrun counts machines by GROUP_RANK, Accelerate by machine_rank.
_NODE = re.compile(
    r"(?:(?:node|host)(?:name|s)?|"
    + _START
    + r"(?:machine|server|worker|pod|instance|vm|compute|blade|dgx|cn|nid|group(?=[-_]rank)))"
    r"[-_]?(?:rank|id|idx|index)?[-_=]?$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?:(?<![\d.-])|(?<=ip-))(?:\d{1,3}[.-]){3}\d{1,3}(?![.-]?\d)")
# Coordinates in a mesh of ranks: dp0_tp1, and NeMo's tp_rank_00_pp_rank_001. The pp in DeepSpeed's zero_pp_rank stands
# for its data-parallel ranks.
_MESH = re.compile(
    _START + r"(?<!zero_)((?:dp_(?:shard|replicate)|e?dp|e?tp|v?pp|cp|sp|ep))([-_]?rank)?[-_=]?$", re.IGNORECASE
)
# Abbreviations of an epoch or a checkpoint too: mesh dimensions only beside another dimension, or with the word rank.
_AMBIGUOUS: dict[str, Role] = {"ep": "step", "cp": "plain", "sp": "plain"}
# Megatron's and DeepSpeed's model-parallel coordinate: files that differ here contain different parts of the model.
_MODEL_PARALLEL = re.compile(r"mp_rank_(?:\d+_)?$")
# DeepSpeed's other parts: ZeRO partitions of the optimizer, experts, and layers of a pipeline, by the text before and
# after the number. ZeRO's model states have a rank in their names too, and are replicas.
_DEEPSPEED = (
    (re.compile(r"(?:zero_pp|expp)_rank_$"), re.compile(r"_mp_rank_\d+(?:_\d+)*_optim_states$")),
    (re.compile(r"(?:^|_)layer_$"), re.compile(r"(?:_expert_|-model_)\d+.*model_states$")),
    (re.compile(r"(?:^|_)layer_\d+(?:_expert_|-model_)$"), re.compile(r".*model_states$")),
)
_EXTENSIONS = re.compile(r"(?:\.(?:pth|pt|ckpt|bin|safetensors|pkl|tar|fingerprint|json))+$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PathNumbers:
    """A path split at its numbers.

    texts: the text between the numbers; names with equal texts differ only in numbers. numbers, roles: one each per
    number. folders: whether each number is in a folder's name. host: the machine, as the path names it.
    """

    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    roles: tuple[Role, ...]
    folders: tuple[bool, ...]
    host: str | None = None

    def without(self, *positions: int) -> str:
        """Return the path with `*` for the numbers at the given positions."""
        parts = [self.texts[0]]
        for i, number in enumerate(self.numbers):
            parts += ["*" if i in positions else str(number), self.texts[i + 1]]
        return "".join(parts)

    def with_role(self, position: int, role: Role) -> PathNumbers:
        """Return the same numbers, one of them with another role."""
        roles = (*self.roles[:position], role, *self.roles[position + 1 :])
        return replace(self, roles=roles)

    def fixed(self) -> tuple[tuple[Role, int], ...]:
        """Return the numbers with equal values for all replicas: step, part and shard."""
        return tuple(
            (role, n) for role, n in zip(self.roles, self.numbers, strict=True) if role in ("step", "part", "shard")
        )

    def all_of(self, role: Role) -> list[int]:
        """Return the positions of this role."""
        return [i for i, found in enumerate(self.roles) if found == role]

    def find(self, role: Role) -> int | None:
        """Return the last position of this role: the one nearest to the file's own name."""
        return max(self.all_of(role), default=None)

    def mesh(self) -> dict[str, int]:
        """Return the coordinate by dimension of the mesh of ranks."""
        found = {}
        for i in self.all_of("mesh"):
            match = _MESH.search(self.texts[i])
            assert match is not None
            found[match[1].lower()] = self.numbers[i]
        return found

    def is_glued(self, position: int) -> bool:
        """Whether a letter precedes the number, as in seed3: then the number is part of a name, not a step."""
        return self.texts[position][-1:].isalpha()


@lru_cache(maxsize=2**16)
def split_path(path: str) -> PathNumbers:
    """Split a path at its numbers and classify them by the text before them. The file extension is removed."""
    stem = _EXTENSIONS.sub("", path.replace(os.sep, "/"))
    name_starts = stem.rfind("/") + 1
    addresses = [match.span() for match in _ADDRESS.finditer(stem)]
    texts, numbers, folders, last, host = [], [], [], 0, None
    roles: list[_Found] = []
    for match in _NUMBER.finditer(stem):
        texts.append(stem[last : match.start()])
        numbers.append(int(match.group()))
        before = _last_segment(stem[: match.start()])[-_LONGEST:]
        in_address = any(start <= match.start() < end for start, end in addresses)
        roles.append("node" if in_address else _find_role(before, stem[match.end() :]))
        folders.append(match.start() < name_starts)
        last = match.end()
        if roles[-1] == "node" and host is None:
            host = (
                before + stem[match.start() :].partition("/")[0] if folders[-1] else _last_word(before) + match.group()
            )
    texts.append(stem[last:])
    return PathNumbers(tuple(texts), tuple(numbers), _resolve_roles(roles, texts), tuple(folders), host)


def _last_segment(path: str) -> str:
    return path[path.rfind("/") + 1 :]


def _last_word(before: str) -> str:
    """Return the word at the end of a text: node_ of run7_node_."""
    found = re.search(r"[a-z_=-]*$", before, re.IGNORECASE)
    return found.group().lstrip("-_=") if found else ""


def _find_role(before: str, after: str) -> _Found:
    """Return the role of a number by the text before it in its segment, and the whole text after it."""
    if _MODEL_PARALLEL.search(before) or any(b.search(before) and a.match(after) for b, a in _DEEPSPEED):
        return "shard"
    if _NODE.search(before):
        return "node"
    if _LOCAL.search(before):
        return "local"
    if _MESH.search(before):
        return "mesh"
    if _LORA.search(before):
        return "part"
    if _RANK.search(before):
        return "rank"
    if after.startswith("-of-") or before.endswith("-of-"):
        return "part"
    if _STEP.search(before):
        return "step"
    if _SHORT_RANK.search(before):
        return "short"
    return "device" if _DEVICE.search(before) else "plain"


def _resolve_roles(roles: list[_Found], texts: list[str]) -> tuple[Role, ...]:
    """Resolve roles by the other words of the path."""
    dimensions = {i: match for i, role in enumerate(roles) if role == "mesh" and (match := _MESH.search(texts[i]))}
    certain = any(match[1].lower() not in _AMBIGUOUS for match in dimensions.values())
    only_data = all(match[1].lower() == "dp" for match in dimensions.values())
    has = set(roles)
    resolved: list[Role] = []
    for i, role in enumerate(roles):
        if role == "short":
            resolved.append("plain" if has & {"rank", "local"} else "rank")
        elif role == "device":
            resolved.append("plain" if has & {"rank", "local", "short"} or "node" not in has else "local")
        elif role == "mesh":
            dimension, with_rank = dimensions[i][1].lower(), dimensions[i][2]
            doubtful = dimension in _AMBIGUOUS and not certain and not with_rank
            resolved.append(
                _AMBIGUOUS[dimension] if doubtful else "rank" if only_data and "rank" not in has else "mesh"
            )
        elif role == "part" and i and roles[i - 1] == "rank" and texts[i].startswith("-of-"):
            resolved.append("plain")  # rank_0-of-4: the number of ranks
        else:
            resolved.append(role)
    if "rank" not in resolved:  # beside a global rank, a local rank adds nothing
        resolved = ["rank" if role == "local" else role for role in resolved]
    return tuple(resolved)
