"""Weights for each finding of `syncheck parity`, as tests/parity measures them with real ranks. Needs numpy only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.parity.causes import CAUSES
from syncheck.parity.check import explain_pattern, make_finding
from syncheck.parity.measurements import Owner, Partial, Refined, Solution, TensorWeights
from syncheck.parity.patterns import Situation, find_patterns, find_right
from syncheck.parity.step import Projection, Step, explain_norm, explain_update

if TYPE_CHECKING:
    from syncheck.findings import Finding
    from syncheck.parity.trained import Explanation

THRESHOLD = 1e-13
NAMES = ("embed.weight", "norm.weight", "up.weight", "head.weight")
# Two data ranks, with the tokens of four samples each.
OWNERS = (Owner(0, 0, 25, (0, 2, 4, 6)), Owner(1, 0, 30, (1, 3, 5, 7)))
RIGHT = (1.0, 1.0)


def make_tensor(name: str, rows: dict[int, tuple[float, ...]], residual: float = 0.0) -> TensorWeights:
    """Return the weights of a tensor by rank. residual: what no weights explain."""
    solutions = {}
    for rank, row in rows.items():
        error = residual + max(abs(weight - 1) for weight in row)
        solutions[rank] = Solution(row, residual, error, 1e-9, size=1.0)
    return TensorWeights(name, (16, 16), solutions, dict.fromkeys(rows, ()))


def find(
    rows: dict[int, tuple[float, ...]],
    *,
    wrong: tuple[str, ...] = NAMES,
    mesh: dict[str, int] | None = None,
    partial: Partial | None = None,
    residual: float = 0.0,
    refined: Refined | None = None,
) -> Finding:
    """Return the finding of the wrong tensors. rows: their weights by rank; all other tensors are right."""
    tensors = {}
    for name in NAMES:
        is_wrong = name in wrong
        tensor = make_tensor(name, rows if is_wrong else dict.fromkeys(rows, RIGHT), residual if is_wrong else 0.0)
        tensor.partial = partial if is_wrong else None
        tensors[name] = tensor
    sizes = dict(mesh or {"dp": 2})
    situation = Situation(
        tensors=tensors,
        order=NAMES,
        owners=OWNERS,
        right=find_right(tensors, THRESHOLD),
        patterns=find_patterns(tensors, THRESHOLD, refined),
        mesh=sizes,
        sizes={**sizes, "accumulation": 1},
        counts={"terms": 55, "samples": 8},
        divisor=55.0,
        refined=refined,
    )
    return explain_pattern(situation, situation.patterns[0])


def find_step(code: str, explanation: Explanation | None, names: tuple[str, ...]) -> Finding:
    """Return the finding about a step."""
    assert explanation is not None
    cause = next(cause for cause in CAUSES if cause.code == code)
    return make_finding(cause, explanation, list(names), (0, 1))


def make_findings() -> dict[str, tuple[str, Finding]]:
    """Return for each code a description of the program and its finding."""
    both = {0: RIGHT, 1: RIGHT}
    lost = Refined("sample", tuple((i,) for i in range(8)), (5, 9, 2, 12, 7, 3, 11, 6), (1.0,) * 7 + (0.0,), NAMES)
    norms = {rank: Step(5.07, None, 5.07**2 / 2, (rank,), true_norm=3.34) for rank in range(2)}
    settings = {"optimizer": "AdamW", "lr": 1e-3, "weight_decay": 0.1}
    updates = {rank: Step(settings=settings) for rank in range(2)}
    for step in updates.values():
        step.projections["up.weight"] = Projection((-1e-4, -1e-4), (0.0, 0.0), float("nan"))
    return {
        "SYN441": (
            "DDP averages a loss that is already divided by the tokens of all ranks.",
            find({0: (0.5, 0.5), 1: (0.5, 0.5)}),
        ),
        "SYN442": (
            "two ranks divide their losses by their own numbers of tokens, 25 and 30.",
            find({0: (1.1, 55 / 60), 1: (1.1, 55 / 60)}),
        ),
        "SYN443": ("FSDP on two ranks with a mesh of one rank.", find({0: (2.0, 0.0), 1: (0.0, 2.0)})),
        "SYN444": (
            "one tensor is summed over two ranks, all others are averaged.",
            find({0: (2.0, 2.0), 1: (2.0, 2.0)}, wrong=("head.weight",)),
        ),
        "SYN445": (
            "the norm under sequence parallelism on two ranks, without an all-reduce.",
            find(both, wrong=("norm.weight",), mesh={"tp": 2}, partial=Partial(("tp",), 1.0), residual=0.1),
        ),
        "SYN446": (
            "replicated tensors count once for each tensor-parallel rank.",
            find_step("SYN446", explain_norm(norms, {"tp": 2}, None), NAMES),
        ),
        "SYN447": ("the last of eight samples is dropped.", find(both, residual=0.1, refined=lost)),
        "SYN448": (
            "two parameter groups apply the weight decay of one tensor.",
            find_step("SYN448", explain_update(updates), ("up.weight",)),
        ),
        "SYN449": (
            "one tensor has the gradient of another computation.",
            find(both, wrong=("up.weight",), residual=0.2),
        ),
    }
