"""Weights of single samples or tokens, for gradients that weights of ranks and micro-batches do not explain."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.parity.measurements import CLOSE, Refined
from syncheck.parity.weights import find_growth, take_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.parity.measurements import Level, TensorWeights
    from syncheck.parity.weights import Mechanism

# Each unit costs a backward pass.
MOST_UNITS = 512
# The largest tensors determine the weights of many units best.
_TENSORS = 3
# Bytes of the gradients of all units, which each rank holds in float64.
_MOST_BYTES = 1 << 30


def refine(mechanism: Mechanism, tensors: dict[str, TensorWeights]) -> Refined | None:
    """Return the weights of samples, else of tokens, that explain unexplained tensors; None if neither does."""
    unexplained = []
    small = []
    for tensor in tensors.values():
        if tensor.is_open(mechanism.threshold):
            unexplained.append(tensor)
        elif tensor.is_assumed:
            small.append(tensor)
    if not unexplained:
        return None
    counted = mechanism.reference.masks.any(0)
    levels: dict[Level, int] = {"sample": 1, "token": counted.ndim}
    for level, dimensions in levels.items():
        # The terms of each sample, then of each token.
        terms = counted.reshape(*counted.shape[:dimensions], -1).sum(-1)
        units = terms.nonzero()
        if 1 < len(units) <= MOST_UNITS:
            refinement = _Refinement(mechanism, level, units, terms[tuple(units.T)].tolist())
            refined = refinement.run(unexplained, small)
            if refined is not None:
                return refined
    return None


@dataclass(frozen=True, slots=True)
class _Refinement:
    """One level of the refinement. units: [units, dimensions] indices of terms. counts: terms of each unit."""

    mechanism: Mechanism
    level: Level
    units: Any
    counts: list[int]

    def run(self, tensors: list[TensorWeights], small: list[TensorWeights]) -> Refined | None:
        """Return the weights of units if they are equal on all ranks and explain tensors. A collective.

        small: tensors with too few elements to determine weights, which may be explained too.
        """
        channel = self.mechanism.channel
        largest = self._choose(tensors)
        rows: list[Any] = []
        for rows_of_rank in channel.gather(self._solve(largest), "weights of samples").values():
            rows += rows_of_rank
        # Ranks with other weights need another explanation.
        if not rows or np.ptp(np.array(rows), axis=0).max() > CLOSE:
            return None
        explained = set(self._find_explained([*tensors, *small], rows[0]))
        explained.intersection_update(*channel.gather(explained, "explained tensors").values())
        if not explained:
            return None
        units = tuple(map(tuple, self.units.tolist()))
        return Refined(self.level, units, tuple(self.counts), rows[0], tuple(sorted(explained)))

    def _choose(self, tensors: list[TensorWeights]) -> list[TensorWeights]:
        """Return the largest tensors whose gradients of all units fit into memory, at most `_TENSORS`."""
        chosen: list[TensorWeights] = []
        room = _MOST_BYTES
        for tensor in sorted(tensors, key=attrgetter("elements"), reverse=True):
            size = 8 * len(self.units) * tensor.elements
            if size <= room and len(chosen) < _TENSORS:
                chosen.append(tensor)
                room -= size
        return chosen

    def _solve(self, tensors: Sequence[TensorWeights]) -> list[tuple[float, ...]]:
        """Return the weights of the units for each tensor of this rank that they explain."""
        mechanism = self.mechanism
        gradients = self._differentiate([tensor.name for tensor in tensors])
        rows = []
        for tensor in tensors:
            local = mechanism.program.tensors.get(tensor.name)
            # The tensor belongs to another stage of a pipeline.
            if local is None:
                continue
            solution = mechanism.solve(take_columns(gradients[tensor.name], local), local.gradient.flatten())
            if solution.is_complete and solution.residual <= mechanism.threshold:
                rows.append(solution.weights)
        return rows

    def _differentiate(self, names: list[str]) -> dict[str, Any]:
        """Return the gradients of the units for some tensors, [units, *shape] each. Each rank computes its share."""
        import torch

        channel, reference = self.mechanism.channel, self.mechanism.reference
        counted = reference.masks.any(0)
        ranks = sorted(channel.ranks)
        local: dict[int, dict[str, Any]] = {}
        for number in range(ranks.index(channel.rank), len(self.units), len(ranks)):
            mask = torch.zeros_like(counted)
            mask[tuple(self.units[number])] = True
            local[number] = reference.differentiate(mask & counted, names)
        by_unit: dict[int, dict[str, Any]] = {}
        for part in channel.gather(local, "gradients of samples").values():
            by_unit.update(part)
        # In the order of the units, which is not that of the ranks that computed them.
        ordered = [gradients for _, gradients in sorted(by_unit.items())]
        stacked = {}
        for name in names:
            stacked[name] = torch.stack(list(map(itemgetter(name), ordered))).double()
        return stacked

    def _find_explained(self, tensors: Sequence[TensorWeights], weights: Sequence[float]) -> list[str]:
        """Return the names of the tensors whose copy on this rank is the gradient of the weighted terms."""
        import torch

        mechanism = self.mechanism
        mask = mechanism.reference.masks.any(0)
        weight_of_term = torch.zeros(mask.shape, dtype=torch.float64)
        for unit, weight in zip(self.units, weights, strict=True):
            weight_of_term[tuple(unit)] = weight
        predicted = mechanism.reference.differentiate_weighted(weight_of_term)
        names: list[str] = []
        for tensor in tensors:
            local = mechanism.program.tensors.get(tensor.name)
            # A rank without the tensor contradicts nothing.
            error = 0.0
            if local is not None:
                error = float((local.gradient - local.take(predicted[tensor.name].double())).norm())
            # The weights have an error themselves.
            if error <= 4 * mechanism.threshold * mechanism.scale * find_growth(weights):
                names.append(tensor.name)
        return names
