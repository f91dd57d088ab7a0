"""What the numbers in a file's path mean: rank, step, part of a snapshot, or not known."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["rank", "local", "step", "part", "shard", "plain"]

_NUMBER = re.compile(r"\d+")
# What stands right before a number that is a moment of the run: never a rank.
_STEP = re.compile(r"(?:^|[^a-z])(?:global_?step|step|epoch|ep|iter|iteration|checkpoint|ckpt)s?[-_=]?$", re.IGNORECASE)
# rank_3, rank3, rank-3, .rank_3., zero_pp_rank_0, _r3, -r3; Accelerate writes random_states_3.
# A rank of nodes is none: torchrun counts nodes by GROUP_RANK, Accelerate by machine_rank.
_RANK = re.compile(
    r"(?:(?:^|[^a-z])(?<!node[-_])(?<!group[-_])(?<!machine[-_])rank[-_=]?|[-_.]r|random_states_)$", re.IGNORECASE
)
_LOCAL = re.compile(r"(?:^|[^a-z])local[-_]rank[-_=]?$", re.IGNORECASE)
# DeepSpeed's and Megatron's model-parallel coordinates, and NeMo's (tp_rank_00_pp_rank_001): files that differ here
# hold different parts of the model. The pp in DeepSpeed's zero_pp_rank stands for its data-parallel ranks.
_MODEL_PARALLEL = re.compile(r"(?:mp_rank_(?:\d+_)?|(?:^|[^a-z])(?:tp|ep|(?<!zero_)pp)_rank[-_=]?)$")
# DeepSpeed's other parts: ZeRO partitions of the optimizer, experts, and layers of a pipeline. What stands before the
# number and after it; ZeRO's model states have the rank in their name too, and hold what all ranks have alike.
_DEEPSPEED = (
    (re.compile(r"(?:zero_pp|expp)_rank_$"), re.compile(r"_mp_rank_\d+(?:_\d+)*_optim_states$")),
    (re.compile(r"(?:^|_)layer_$"), re.compile(r"(?:_expert_|-model_)\d+.*model_states$")),
    (re.compile(r"(?:^|_)layer_\d+(?:_expert_|-model_)$"), re.compile(r".*model_states$")),
)
_ENDINGS = re.compile(r"(?:\.(?:pth|pt|ckpt|bin|safetensors|pkl|tar|fingerprint\.json))+$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PathNumbers:
    """A path taken apart at its numbers.

    texts: what stands between them; equal texts are "otherwise equal names". numbers, roles: one each per number.
    folders: for each number, whether it stands in a folder's name.
    """

    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    roles: tuple[Role, ...]
    folders: tuple[bool, ...]

    def without(self, *positions: int) -> str:
        """Return the path with the numbers at these positions left open: `*` stands for them."""
        parts = [self.texts[0]]
        for i, number in enumerate(self.numbers):
            parts += ["*" if i in positions else str(number), self.texts[i + 1]]
        return "".join(parts)

    def fixed(self) -> tuple[tuple[Role, int], ...]:
        """Return the numbers that replicas have in common: step, part and shard."""
        return tuple(
            (role, n) for role, n in zip(self.roles, self.numbers, strict=True) if role in ("step", "part", "shard")
        )

    def find(self, role: Role) -> int | None:
        """Return the last number of this role: the one nearest to the file's own name."""
        return max((i for i, found in enumerate(self.roles) if found == role), default=None)


def take_apart(path: str) -> PathNumbers:
    """Split a path at its numbers and name their roles by what stands before them. The ending is no part of it."""
    stem = _ENDINGS.sub("", path.replace(os.sep, "/"))
    name_starts = stem.rfind("/") + 1
    texts, numbers, roles, folders, last = [], [], [], [], 0
    for match in _NUMBER.finditer(stem):
        texts.append(stem[last : match.start()])
        numbers.append(int(match.group()))
        segment_starts = stem.rfind("/", 0, match.start()) + 1
        roles.append(_role(stem[segment_starts : match.start()], stem[match.end() :]))
        folders.append(match.start() < name_starts)
        last = match.end()
    texts.append(stem[last:])
    if roles.count("rank") > 1:  # beside a global rank, the one within the node says nothing more
        roles = ["local" if role == "rank" and _LOCAL.search(texts[i]) else role for i, role in enumerate(roles)]
        roles = ["rank" if role == "local" else role for role in roles] if "rank" not in roles else roles
    return PathNumbers(tuple(texts), tuple(numbers), tuple(roles), tuple(folders))


def _role(before: str, after: str) -> Role:
    if after.startswith("-of-") or before.endswith("-of-"):
        return "part"
    if _MODEL_PARALLEL.search(before) or any(b.search(before) and a.match(after) for b, a in _DEEPSPEED):
        return "shard"
    if _STEP.search(before):
        return "step"
    return "rank" if _RANK.search(before) else "plain"
