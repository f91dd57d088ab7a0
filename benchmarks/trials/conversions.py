"""Trials of likely causes of `syncheck diff`: a copy of a random model is changed in a known way and compared.

Only changes whose finding may be `likely` are drawn, and changes that are easily taken for them.
"""

from __future__ import annotations

import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import syncheck
from benchmarks.trials.models import MODELS, Sizes
from benchmarks.trials.trial import TEMPORARY

if TYPE_CHECKING:
    from collections.abc import Callable

    State = dict[str, Tensor]


def draw_model(numbers: random.Random) -> State:
    """Return the weights of a random model. Norms and biases get random values, as after training."""
    torch.manual_seed(numbers.randrange(1 << 30))
    name = numbers.choice(list(MODELS))
    sizes = Sizes(width=numbers.choice((16, 24, 32, 48)), depth=1 + numbers.randrange(3))
    state: State = {}
    for key, tensor in MODELS[name].build(sizes).state_dict().items():
        state[key] = tensor + 0.05 * torch.randn(tensor.shape) if tensor.is_floating_point() else tensor
    return state


def list_matrices(state: State) -> list[str]:
    """Return the names of the matrices."""
    return [name for name, tensor in state.items() if tensor.ndim == 2]


def choose_matrices(numbers: random.Random, state: State) -> list[str]:
    """Return one matrix or all of them."""
    names = list_matrices(state)
    return numbers.choice(([numbers.choice(names)], names))


def add_constant(numbers: random.Random, state: State) -> None:
    """Add a constant to all vectors of a kind, or to one tensor."""
    ending = numbers.choice(("weight", "bias"))
    names = [name for name, tensor in state.items() if tensor.ndim == 1 and name.endswith(ending)]
    constant = numbers.choice((1.0, -1.0, 0.5, 0.1))
    for name in names or [numbers.choice(list_matrices(state))]:
        state[name] = state[name] + constant


def scale(numbers: random.Random, state: State) -> None:
    """Multiply tensors by a constant."""
    factor = numbers.choice((2.0, 0.5, 8.0, 1.0 / 3, 0.99, 1.1, 32.0**0.5))
    for name in choose_matrices(numbers, state):
        state[name] = state[name] * factor


def scale_rows(numbers: random.Random, state: State) -> None:
    """Multiply each row or column of matrices by a factor of its own."""
    axis = numbers.randrange(2)
    for name in choose_matrices(numbers, state):
        factors = 0.05 + torch.rand(state[name].shape[axis])
        state[name] = state[name] * (factors[:, None] if axis == 0 else factors)


def quantize(numbers: random.Random, state: State) -> None:
    """Round to integers of 8 or 4 bits with a step per tensor or row, stored as floats."""
    largest = numbers.choice((127, 7))
    by_row = numbers.random() < 0.5
    for name in choose_matrices(numbers, state):
        tensor = state[name]
        bound = tensor.abs().amax(1, keepdim=True) if by_row else tensor.abs().max()
        step = bound / largest
        state[name] = (tensor / step).round() * step


def initialize(numbers: random.Random, state: State) -> None:
    """Draw matrices again, as if they had not been loaded."""
    for name in choose_matrices(numbers, state):
        state[name] = state[name].std() * torch.randn_like(state[name])


def fine_tune(numbers: random.Random, state: State) -> None:
    """Add noise to all tensors, up to half of their own size."""
    size = numbers.choice((0.001, 0.01, 0.1, 0.5))
    for name, tensor in state.items():
        if tensor.is_floating_point():
            state[name] = tensor + size * tensor.abs().mean() * torch.randn_like(tensor)


def add_low_rank(numbers: random.Random, state: State) -> None:
    """Add a product of small matrices, as an adapter does."""
    for name in choose_matrices(numbers, state):
        rows, columns = state[name].shape
        product = torch.randn(rows, 2) @ torch.randn(2, columns)
        state[name] = state[name] + 0.3 * state[name].std() * product


def prune(numbers: random.Random, state: State) -> None:
    """Set the smallest elements to 0."""
    share = numbers.choice((0.2, 0.5, 0.9))
    for name in choose_matrices(numbers, state):
        sizes = state[name].abs()
        state[name] = torch.where(sizes < sizes.flatten().quantile(share), 0.0, state[name])


def clamp(numbers: random.Random, state: State) -> None:
    """Limit the elements."""
    share = numbers.choice((0.5, 0.9))
    for name in choose_matrices(numbers, state):
        bound = float(state[name].abs().flatten().quantile(share))
        state[name] = state[name].clamp(-bound, bound)


def average(_: random.Random, state: State) -> None:
    """Average with another model."""
    for name, tensor in state.items():
        if tensor.is_floating_point():
            state[name] = (tensor + tensor.std().nan_to_num() * torch.randn_like(tensor)) / 2


def shift_rows(numbers: random.Random, state: State) -> None:
    """Add a number of its own to each row."""
    for name in choose_matrices(numbers, state):
        state[name] = state[name] + 0.5 * state[name].std() * torch.randn(state[name].shape[0], 1)


def replace_rows(numbers: random.Random, state: State) -> None:
    """Draw some rows again."""
    for name in choose_matrices(numbers, state):
        count = max(1, state[name].shape[0] // numbers.choice((4, 8)))
        state[name] = state[name].clone()
        state[name][:count] = torch.randn_like(state[name][:count])


# Each change with the likely causes that are right for it.
CHANGES: dict[str, tuple[Callable[[random.Random, State], None], frozenset[str]]] = {
    "constant added": (add_constant, frozenset({"SYN315"})),
    "scaled": (scale, frozenset({"SYN312"})),
    "rows or columns scaled": (scale_rows, frozenset({"SYN316"})),
    "quantized": (quantize, frozenset({"SYN308"})),
    "initialized again": (initialize, frozenset({"SYN311"})),
    "fine-tuned": (fine_tune, frozenset()),
    "product of low rank added": (add_low_rank, frozenset()),
    "pruned": (prune, frozenset()),
    "limited": (clamp, frozenset()),
    "averaged with another model": (average, frozenset()),
    "rows shifted": (shift_rows, frozenset()),
    "some rows initialized again": (replace_rows, frozenset()),
}


def run_change(seed: int) -> tuple[str, list[str], list[str]]:
    """Compare a changed copy. Return the change, the right and the wrong codes of likely causes."""
    torch.set_num_threads(1)
    numbers = random.Random(seed)
    title = list(CHANGES)[seed % len(CHANGES)]
    change, right_codes = CHANGES[title]
    model = draw_model(numbers)
    # Changes replace the tensors that they change.
    copy = dict(model)
    change(numbers, copy)
    dtype = numbers.choice((torch.float32, torch.float32, torch.bfloat16))
    with tempfile.TemporaryDirectory(dir=TEMPORARY) as folder:
        paths = []
        for side, state in (("a", model), ("b", copy)):
            path = Path(folder, f"{side}.pt")
            torch.save({name: convert(tensor, dtype) for name, tensor in state.items()}, path)
            paths.append(path)
        report = syncheck.diff(*paths)
    codes = [finding.code for group in report.groups for finding in group.findings if finding.certainty == "likely"]
    return title, [code for code in codes if code in right_codes], [code for code in codes if code not in right_codes]


def count_likely_of_conversions(count: int, jobs: int) -> dict[str, dict[str, int]]:
    """Return how often each code states a likely cause, and how often another cause is true."""
    counts: dict[str, dict[str, int]] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for _, right, wrong in pool.map(run_change, range(count), chunksize=10):
            for code in {*right, *wrong}:
                entry = counts.setdefault(code, {"stated": 0, "wrong": 0})
                entry["stated"] += 1
                entry["wrong"] += code in wrong
    return dict(sorted(counts.items()))


def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert floating-point tensors."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
