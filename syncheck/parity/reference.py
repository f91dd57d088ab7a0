"""The definition of the gradient, computed by one process: the gradient of each owner's terms, and its rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.parity.case import count_samples
from syncheck.parity.measurements import Owner
from syncheck.parity.precision import cast_batch, cast_model, unit_roundoff, without_autocast
from syncheck.parity.validation import check_built, check_count, check_ignored, check_owners, check_terms, require

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.parity.case import ParityCase

# Terms of samples that are computed alone differ by rounding only. Models that compute parts in float32 round to 1e-7.
_SEPARABLE = 1e-6


@dataclass(slots=True)
class Reference:
    """The model, the batch and the terms of one process. Every rank has the same one.

    names: of the parameters with gradients, and of `extra`.
    aliases: the name of the first of all tied parameters by each of their names, frozen parameters included.
    owners: of the terms, in order.
    masks: of the terms of each owner, [owners, *shape of the terms].
    divisor: of the sum of all terms.
    positions: number of terms, ignored terms included.
    samples: size of the first dimension of the terms.
    separable: whether no term depends on other samples; None if this could not be checked.
    order: names in the order in which modules run.
    extra: names of parameters that `build` freezes and the program trains. Their gradient is zero.
    """

    case: ParityCase
    dtype: str
    model: Any
    batch: Any
    names: tuple[str, ...]
    aliases: dict[str, str]
    owners: tuple[Owner, ...]
    masks: Any
    divisor: float
    positions: int
    samples: int
    separable: bool | None
    order: tuple[str, ...] = field(default=())
    extra: frozenset[str] = frozenset()

    def add_frozen(self, names: Collection[str]) -> None:
        """Add parameters that `build` freezes to the compared parameters, in the order of the model."""
        self.extra = frozenset(names)
        chosen = self.extra.union(self.names)
        self.names = tuple(filter(chosen.__contains__, dict(self.model.named_parameters())))

    def differentiate(self, mask: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the gradient of the sum of some terms divided by `divisor`, by name. mask: of the terms."""
        chosen = tuple(names or self.names)
        parameters = dict(self.model.named_parameters())
        with without_autocast():
            terms = self.case.loss_terms(self.model, self.batch)
            # Ignored terms may be infinite, and infinity times zero is NaN.
            total = terms[mask.expand_as(terms)].sum() / self.divisor
            return differentiate(total, {name: parameters[name] for name in chosen})

    def differentiate_weighted(self, weights: Any) -> dict[str, Any]:
        """Return the gradient of the sum of all terms times their weights, divided by `divisor`, by name."""
        parameters = dict(self.model.named_parameters())
        mask = self.masks.any(0)
        with without_autocast():
            terms = self.case.loss_terms(self.model, self.batch)
            total = (terms[mask] * weights[mask].to(terms)).sum() / self.divisor
            return differentiate(total, {name: parameters[name] for name in self.names})

    def reorder(self, seed: int) -> dict[str, Any]:
        """Return the gradient of all terms with other rounding: another order, other parameters, another scale.

        The samples have another order, the parameters are changed by rounding, and the loss is scaled during the
        backward pass. All three matter for models with parts in a lower precision, in which small errors grow.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        parameters = dict(self.model.named_parameters())
        originals = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        mask = self.masks.any(0)
        batch = self.batch
        if self.separable:
            permutation = torch.randperm(self.samples, generator=generator)
            batch, mask = self.case.select(batch, permutation), mask[permutation]
        # A power of two would round like 1.
        scale = 1.5 + 0.4 * float(torch.rand((), generator=generator))
        try:
            with torch.no_grad():
                for parameter in parameters.values():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
                    parameter.mul_(1 + unit_roundoff(self.dtype) * noise)
            with without_autocast():
                terms = self.case.loss_terms(self.model, batch)
                total = terms[mask.expand_as(terms)].sum() * (scale / self.divisor)
                gradients = differentiate(total, {name: parameters[name] for name in self.names})
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(originals[name])
        # In place: the gradients belong to nobody else.
        for gradient in gradients.values():
            gradient /= scale
        return gradients


def differentiate(total: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the gradient by name, zeros for parameters that are frozen or do not affect the total."""
    import torch

    gradients = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not (trained and total.requires_grad):
        return gradients
    results = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    for name, gradient in zip(trained, results, strict=True):
        # None: the total does not depend on the parameter.
        if gradient is not None:
            gradients[name] = gradient.detach()
    return gradients


def make_reference(case: ParityCase, dtype: str) -> Reference:
    """Build the model and the batch, and check that the loss is a sum of terms. Raises UsageError with the reason."""
    import torch

    model = cast_model(check_built(case, case.build()), dtype)
    batch = cast_batch(case.batch(), dtype)
    order: list[str] = []
    with torch.no_grad(), without_autocast():
        hooks = _record_order(model, order)
        terms = case.loss_terms(model, batch)
        check_terms(case, terms, batch)
        for hook in hooks:
            hook.remove()
        again = case.loss_terms(model, batch)
    require(
        _are_close(terms, again, 1e-4),
        f"{case.title}.loss_terms: two calls with the same batch return different losses, for example because of "
        "dropout; disable it in `build`, with p=0 or model.eval()",
    )
    counted = _find_counted(case, batch, terms)
    samples = int(terms.shape[0])
    owners, masks = _list_owners(case, batch, counted)
    divisor = check_count(case, case.count(batch), counted)
    owners = _share_count(case, batch, owners, divisor)
    named = dict(model.named_parameters())
    names = tuple(name for name, parameter in named.items() if parameter.requires_grad)
    return Reference(
        case=case,
        dtype=dtype,
        model=model,
        batch=batch,
        names=names,
        aliases=_find_aliases(model),
        owners=owners,
        masks=masks,
        divisor=divisor,
        positions=counted.numel(),
        samples=samples,
        separable=_is_separable(case, model, batch, terms, counted),
        order=tuple(dict.fromkeys(order)),
    )


def _record_order(model: Any, order: list[str]) -> list[Any]:
    """Add the names of parameters to a list in the order in which their modules run. Returns the hooks to remove."""
    hooks = []
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(path, recurse=False)]

        # A name that occurs again later belongs to a layer that runs twice.
        def add(_module: Any, _inputs: Any, names: list[str] = names) -> None:
            order.extend(names)

        hooks.append(module.register_forward_pre_hook(add))
    return hooks


def _are_close(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two tensors of terms are equal apart from rounding."""
    import torch

    if a.shape != b.shape:
        return False
    finite = torch.isfinite(a) & torch.isfinite(b)
    scale = a[finite].abs().max().clamp_min(1e-30) if finite.any() else 1.0
    return bool(((a - b)[finite].abs() <= tolerance * scale).all())


def _find_counted(case: ParityCase, batch: Any, terms: Any) -> Any:
    """Return a mask of the terms that count. Raises UsageError if none does."""
    import torch

    ignored = case.ignored(batch)
    counted = torch.ones(terms.shape, dtype=torch.bool)
    if ignored is not None:
        check_ignored(case, ignored, terms.shape)
        counted &= ~ignored.view(ignored.shape + (1,) * (terms.ndim - ignored.ndim))
    require(bool(counted.any()), f"{case.title}: the batch has no terms that count")
    is_finite = bool(torch.isfinite(terms[counted]).all())
    require(is_finite, f"{case.title}.loss_terms: some terms are NaN or infinite")
    return counted


def _list_owners(case: ParityCase, batch: Any, counted: Any) -> tuple[tuple[Owner, ...], Any]:
    """Return the owners with terms, in order, and the mask of each. Owners without terms are dropped."""
    import torch

    ranks, micro_batches = check_owners(case, case.owner(batch), counted.shape)
    dimensions = counted.ndim
    ranks = ranks.view(ranks.shape + (1,) * (dimensions - ranks.ndim)).expand(counted.shape)
    micro_batches = micro_batches.view(micro_batches.shape + (1,) * (dimensions - micro_batches.ndim))
    micro_batches = micro_batches.expand(counted.shape)
    owners = []
    masks = []
    pairs = torch.unique(torch.stack((ranks[counted], micro_batches[counted])), dim=1).T.tolist()
    for rank, micro_batch in pairs:
        mask = counted & (ranks == rank) & (micro_batches == micro_batch)
        samples = mask.view(len(mask), -1).any(1).nonzero().flatten().tolist()
        owners.append(Owner(rank, micro_batch, int(mask.sum()), tuple(samples)))
        masks.append(mask)
    return tuple(owners), torch.stack(masks)


def _share_count(case: ParityCase, batch: Any, owners: tuple[Owner, ...], divisor: float) -> tuple[Owner, ...]:
    """Return the owners with shares of `count`, for example sums; unchanged unless the shares add up."""
    import torch

    # Samples that cannot be selected cannot be counted alone.
    if count_samples(batch) <= max(max(owner.samples) for owner in owners):
        return owners
    shares = []
    for owner in owners:
        share = case.count(case.select(batch, torch.tensor(owner.samples)))
        # The default: the number of terms.
        if share is None:
            return owners
        shares.append(float(share))
    # A number of the whole batch has no shares.
    if not math.isclose(sum(shares), divisor, rel_tol=_SEPARABLE):
        return owners
    return tuple(replace(owner, share_of_count=share) for owner, share in zip(owners, shares, strict=True))


def _is_separable(case: ParityCase, model: Any, batch: Any, terms: Any, counted: Any) -> bool | None:
    """Whether the terms of some samples stay the same without the other samples; None if they cannot be selected."""
    import torch

    if count_samples(batch) != len(terms) or len(terms) < 2:
        return None
    samples = torch.arange(1, len(terms), 2)
    with torch.no_grad(), without_autocast():
        alone = case.loss_terms(model, case.select(batch, samples))
    if alone.shape != terms[samples].shape:
        return None
    tolerance = max(_SEPARABLE, 64 * unit_roundoff(str(terms.dtype).removeprefix("torch.")))
    among_all = torch.where(counted[samples], terms[samples], 0)
    return _are_close(among_all, torch.where(counted[samples], alone, 0), tolerance)


def _find_aliases(model: Any) -> dict[str, str]:
    """Return the name of the first of all tied parameters by each of their names."""
    name_of_parameter = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[name] = name_of_parameter[id(parameter)]
    return aliases
