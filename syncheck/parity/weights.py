"""The mechanism: with which weight each owner's terms entered each rank's copy of each gradient.

For the copy `g` of a tensor on a rank, least squares solve `g = sum over owners o of W[o] * g[o]`, where `g[o]` is the
gradient of the sum of o's terms, divided by the number of all terms, as one process computes it. The right weights are
1. The residual is the part of `g` that no weights explain, and the error is the distance to the definition. Both are
relative to the sum over owners of the norm of g[o] over the whole model, in which rounding errors are measured. The
residual is also divided by the largest weight above 1: a copy that is eight times too large has eight times the
rounding errors.

Memory of each rank: the model twice, as `build` and `parallelize` return it; the gradients of its own share of the
owners; its copies of values and gradients in float64; two more gradients while the floor is measured, and four in
float64 while a step is compared; of one tensor at a time the gradients of all owners in float64. `refinement` states
its own limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import UsageError
from syncheck.parity.case import DATA_DIMENSIONS
from syncheck.parity.measurements import CLEAR, UNKNOWN, Partial, Solution, TensorWeights
from syncheck.parity.precision import find_threshold

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.parity.program import LocalTensor, Program
    from syncheck.parity.reference import Reference

# Owners whose gradients are linearly dependent, relative to the largest singular value.
_DEPENDENT = 1e-9


class Copy(NamedTuple):
    """A rank's copy of a gradient, flattened, with the same part of the definition.

    coordinate: of the rank. box: of the copy in the whole tensor.
    """

    coordinate: tuple[int, ...]
    box: str
    gradient: Any
    definition: Any


@dataclass(slots=True)
class Mechanism:
    """One check on one rank. All methods but `solve` are collectives.

    scale: sum over owners of the norm of their gradient. floor: measured error of a reordered reference, relative.
    """

    reference: Reference
    program: Program
    channel: Any
    own_gradients: dict[int, dict[str, Any]] = field(default_factory=dict)
    scale: float = 0.0
    floor: float = 0.0
    threshold: float = 0.0

    def prepare(self) -> None:
        """Compute the gradients of this rank's share of the owners, and measure the floor."""
        ranks = sorted(self.channel.ranks)
        position = ranks.index(self.channel.rank)
        norms: dict[int, float] = {}
        for owner in range(position, len(self.reference.owners), len(ranks)):
            gradients = self.reference.differentiate(self.reference.masks[owner])
            self.own_gradients[owner] = gradients
            norms[owner] = norm_of(gradients)
        for by_owner in self.channel.gather(norms, "norms").values():
            self.scale += sum(by_owner.values())
        # NaN fails this comparison too.
        if not 0 < self.scale < float("inf"):
            raise UsageError(f"{self.reference.case.title}: the gradient of one process is zero or not finite")
        base = self.reference.differentiate(self.reference.masks.any(0))
        reordered = self.reference.reorder(position + 1)
        errors = [float((reordered[name] - base[name]).double().norm()) for name in base]
        # The same on all ranks, so that all agree on which tensors are wrong.
        self.floor = max(self.channel.gather(max(errors) / self.scale, "floor").values())
        self.threshold = find_threshold(self.floor, len(self.reference.owners), self.reference.dtype)

    def gather_gradients(self, name: str) -> Any:
        """Return the gradient of each owner for one tensor: [owners, *shape] in float64."""
        import torch

        local = {owner: gradients[name] for owner, gradients in self.own_gradients.items()}
        by_owner: dict[int, Any] = {}
        for part in self.channel.gather(local, "gradients of owners").values():
            by_owner.update(part)
        # In the order of the owners, which is not that of the ranks that computed them.
        return torch.stack([gradient for _, gradient in sorted(by_owner.items())]).double()

    def measure(self) -> dict[str, TensorWeights]:
        """Return the weights of all tensors, by name in the order of the model."""
        solutions: dict[str, tuple[Solution, LocalTensor, float, int]] = {}
        for name in self.reference.names:
            gradients = self.gather_gradients(name)
            local = self.program.tensors.get(name)
            if local is not None:
                self.program.choose_copies(name, local.take(gradients.sum(0)))
                columns = take_columns(gradients, local)
                solution = self.solve(columns, local.gradient.flatten())
                solution = replace(solution, missing=local.missing, frozen=local.frozen)
                errors = (local.gradient.flatten() - columns.sum(0)).abs()
                finite_errors = errors[errors.isfinite()]
                largest = float(finite_errors.max()) if finite_errors.numel() else 0.0
                # A NaN is never within the threshold.
                differing = int((~(errors <= self.threshold * self.scale)).sum())
                solutions[name] = (solution, local.without_values(), largest, differing)
        by_rank = self.channel.gather(solutions, "weights")
        shapes = {name: tuple(p.shape) for name, p in self.reference.model.named_parameters()}
        tensors: dict[str, TensorWeights] = {}
        for name in self.reference.names:
            tensor = TensorWeights(name, shapes[name], {}, {}, is_extra=name in self.reference.extra)
            for rank, of_rank in by_rank.items():
                if name in of_rank:
                    solution, layout, largest, differing = of_rank[name]
                    tensor.solutions[rank] = solution
                    tensor.boxes[rank] = layout.runs
                    tensor.placements = tensor.placements or layout.placements
                    tensor.untied = tensor.untied or layout.names
                    tensor.max_error = max(tensor.max_error, largest)
                    tensor.differing = max(tensor.differing, differing)
            tensors[name] = tensor
        return tensors

    def solve(self, columns: Any, local: Any) -> Solution:
        """Return the weights of one copy. columns: [owners, elements]. local: [elements]."""
        import torch

        owners, elements = columns.shape
        not_finite = int((~torch.isfinite(local)).sum())
        # No weights give NaN, and the solvers fail.
        if not_finite:
            size = float(columns.sum(0).norm()) / self.scale
            infinite = float("inf")
            return Solution((UNKNOWN,) * owners, infinite, infinite, infinite, size=size, not_finite=not_finite)
        definition = columns.sum(0)
        error = float((local - definition).norm()) / self.scale
        size = float(definition.norm()) / self.scale
        norms = columns.norm(dim=1)
        used = norms > self.threshold * self.scale
        weights = torch.full((owners,), UNKNOWN, dtype=torch.float64)
        count = int(used.sum())
        if not count or elements < count:
            # Any copy of few elements is some combination, which shows nothing.
            residual = min(error, float(local.norm()) / self.scale) if not count else 0.0
            return Solution(tuple(weights.tolist()), residual, error, float("inf"), size=size)
        # Columns of equal length: an owner with few terms is not a dependent one.
        matrix = (columns[used] / norms[used, None]).T
        left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
        # Then many combinations of weights give the same gradient.
        is_dependent = bool(singular[-1] < _DEPENDENT * singular[0])
        inverse = right.T @ torch.diag(1 / singular.clamp_min(1e-300)) @ left.T
        solved = inverse @ local
        residual = float((matrix @ solved - local).norm()) / self.scale
        if is_dependent or not torch.isfinite(solved).all():
            solved = torch.linalg.lstsq(matrix, local[:, None], driver="gelsd").solution.flatten()
            residual = float((matrix @ solved - local).norm()) / self.scale
            return Solution(tuple(weights.tolist()), residual, error, float("inf"), size=size)
        doubts = inverse.norm(dim=1) * self.threshold * self.scale / norms[used]
        clear = doubts <= CLEAR
        weights[used] = torch.where(clear, solved / norms[used], UNKNOWN)
        residual /= find_growth(weights.tolist())
        doubt = float(doubts[clear].max()) if clear.any() else float("inf")
        return Solution(tuple(weights.tolist()), residual, error, doubt, size=size)

    def settle_small(self, tensors: dict[str, TensorWeights]) -> None:
        """Find the weights of tensors that do not determine them alone, from other tensors or from all of them jointly.

        A right tensor has weights 1. A wrong one may have the weights of another tensor, joint weights of all small
        tensors, or one factor for all owners.
        """
        ones = (1.0,) * len(self.reference.owners)
        small = []
        candidates: dict[tuple[float, ...], None] = {}
        for tensor in tensors.values():
            for rank, solution in tensor.solutions.items():
                # Only complete rows are candidates, because an unknown weight fits nothing.
                if solution.is_complete:
                    candidates[solution.weights] = None
                elif not solution.is_determined and solution.error <= self.threshold:
                    tensor.solutions[rank] = replace(solution, weights=ones, residual=0.0, doubt=CLEAR)
            if tensor.doubt == float("inf") and tensor.is_finite and not tensor.is_extra:
                small.append(tensor.name)
        if small:
            self._settle_wrong(tensors, small, list(candidates))

    def _settle_wrong(
        self, tensors: dict[str, TensorWeights], names: Sequence[str], candidates: Sequence[tuple[float, ...]]
    ) -> None:
        """Find the weights of some wrong tensors. candidates: weights of other tensors."""
        import torch

        columns_of: dict[str, Any] = {}
        copies: dict[str, Any] = {}
        for name in names:
            gradients = self.gather_gradients(name)
            if name in self.program.tensors:
                columns_of[name] = take_columns(gradients, self.program.tensors[name])
                copies[name] = self.program.tensors[name].gradient.flatten()
        rows = list(candidates)
        if columns_of:
            # Several small tensors may determine together what none determines alone.
            joint = self.solve(torch.cat(list(columns_of.values()), dim=1), torch.cat(list(copies.values())))
            if joint.is_determined and joint.residual <= self.threshold:
                rows.append(joint.weights)
        settled: dict[str, Solution] = {}
        for name, columns in columns_of.items():
            solution = tensors[name].solutions[self.channel.rank]
            settled[name] = self._fit(solution, columns, copies[name], rows)
        for rank, of_rank in self.channel.gather(settled, "weights of small tensors").items():
            for name, solution in of_rank.items():
                tensors[name].solutions[rank] = solution

    def _fit(self, solution: Solution, columns: Any, local: Any, rows: Sequence[tuple[float, ...]]) -> Solution:
        """Return the first row of weights that explains a copy, else one factor for all owners, else no weights."""
        import torch

        if solution.is_determined:
            return solution
        total = columns.sum(0)
        # Without a gradient in the definition, NaN: no factor fits.
        factor = float(local @ total / (total @ total))
        constant = (factor,) * len(columns)
        for row in ((1.0,) * len(columns), *rows, constant):
            weights = torch.tensor(row, dtype=torch.float64)
            residual = float((weights @ columns - local).norm()) / self.scale / find_growth(row)
            if residual <= self.threshold:
                return replace(solution, weights=row, residual=residual, doubt=CLEAR, assumed=row is constant)
        return replace(solution, residual=max(solution.residual, solution.error))

    def find_partial(self, tensors: dict[str, TensorWeights]) -> None:
        """Find the mesh dimensions along which the copies of unexplained tensors add up to the definition."""
        for tensor in tensors.values():
            if tensor.is_open(self.threshold):
                total = self.gather_gradients(tensor.name).sum(0)
                local = self.program.tensors.get(tensor.name)
                copy = None
                if local is not None:
                    copy = Copy(
                        self.program.coordinate, str(local.runs), local.gradient.flatten(), local.take(total).flatten()
                    )
                # A rank of another stage has none.
                copies = list(filter(None, self.channel.gather(copy, "copies").values()))
                tensor.partial = self._find_dimensions(copies)
                tensor.split = self._find_split(copies)

    def _find_split(self, copies: Sequence[Copy]) -> tuple[str, ...]:
        """Return the mesh dimensions without data along which copies of one box differ."""
        names = tuple(self.program.mesh)
        split = []
        for dimension in names:
            firsts: dict[Any, Copy] = {}
            largest = 0.0
            for copy in copies:
                place = (drop_dimensions(copy.coordinate, names, (dimension,)), copy.box)
                first = firsts.setdefault(place, copy)
                largest = max(largest, float((copy.gradient - first.gradient).norm()))
            # Ranks with other samples may have other gradients for many reasons.
            if dimension.lower() not in DATA_DIMENSIONS and largest > self.threshold * self.scale:
                split.append(dimension)
        return tuple(split)

    def _find_dimensions(self, copies: Sequence[Copy]) -> Partial | None:
        """Return the fewest mesh dimensions with a sum of `factor` times the definition."""
        import torch

        for chosen in list_subsets(tuple(self.program.mesh)):
            groups: dict[Any, list[Copy]] = defaultdict(list)
            for copy in copies:
                remaining = drop_dimensions(copy.coordinate, tuple(self.program.mesh), chosen)
                # Ranks with different parts of the tensor have nothing to add.
                groups[(remaining, copy.box)].append(copy)
            # Copies that are not added to any other copy prove no sum.
            if len(groups) == len(copies):
                continue
            factors = torch.tensor(list(map(self._find_factor, groups.values())), dtype=torch.float64)
            # A group without a factor has NaN, which makes the comparison false.
            if factors.max() - factors.min() <= CLEAR:
                return Partial(chosen, float(factors[0]))
        return None

    def _find_factor(self, copies: Sequence[Copy]) -> float:
        """Return the factor between the sum of some copies and the definition; NaN without a factor."""
        definition = copies[0].definition
        total = sum(copy.gradient for copy in copies)
        square = float(definition @ definition)
        # Rounding would change the factor.
        if CLEAR * square**0.5 <= self.threshold * self.scale * len(copies):
            return UNKNOWN
        factor = float(total @ definition) / square
        residual = float((total - factor * definition).norm()) / self.scale
        # Each copy has an error of its own.
        return factor if residual <= self.threshold * len(copies) * find_growth([factor]) else UNKNOWN


def take_columns(gradients: Any, local: LocalTensor) -> Any:
    """Return the part of all owners' gradients that a rank holds: [owners, elements]. gradients: [owners, *shape]."""
    import torch

    return torch.stack([local.take(gradient).flatten() for gradient in gradients])


def find_growth(weights: Sequence[float]) -> float:
    """Return how many times the rounding errors of a copy exceed the errors of a right copy.

    The result is the largest known weight, at least 1.
    """
    known = [abs(weight) for weight in weights if not math.isnan(weight)]
    return max([1.0, *known])


def norm_of(tensors: Mapping[str, Any]) -> float:
    """Return the Euclidean norm of all tensors together."""
    square = 0.0
    for tensor in tensors.values():
        square += float(tensor.double().square().sum())
    # A sum in Python's float64, also of tensors in bfloat16.
    return math.sqrt(square)


def drop_dimensions(coordinate: Sequence[int], names: Sequence[str], dropped: Sequence[str]) -> tuple[int, ...]:
    """Return the coordinate of a rank in the remaining dimensions of a mesh."""
    return tuple(number for number, name in zip(coordinate, names, strict=True) if name not in dropped)


def list_subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the nonempty sets of mesh dimensions, the smallest first."""
    for size in range(1, len(names) + 1):
        yield from combinations(names, size)
