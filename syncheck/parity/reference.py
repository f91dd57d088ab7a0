"""The definition of the gradient, computed by one process: the gradient of each owner's terms, and its rounding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.parity.case import count_samples
from syncheck.parity.measurements import Owner
from syncheck.parity.precision import cast_batch, cast_model, unit_roundoff, without_autocast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.parity.case import ParityCase

# Terms of samples that are computed alone differ by rounding only. Models that compute parts in float32 round to 1e-7.
_SEPARABLE = 1e-6


@dataclass(slots=True)
class Reference:
    """The model, the batch and the terms of one process. Every rank has the same one.

    names: of the parameters with gradients.
    aliases: the name in `names` of each parameter, tied parameters included.
    owners: of the terms, in order.
    masks: of the terms of each owner, [owners, *shape of the terms].
    divisor: of the sum of all terms.
    positions: number of terms, ignored terms included.
    samples: size of the first dimension of the terms.
    separable: whether no term depends on other samples; None if this could not be checked.
    order: names in the order in which modules run.
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
    """Return the gradient by name, zeros for parameters that do not affect the total."""
    import torch

    if not total.requires_grad:
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    result = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        result[name] = torch.zeros_like(parameter) if gradient is None else gradient.detach()
    return result


def make_reference(case: ParityCase, dtype: str) -> Reference:
    """Build the model and the batch, and check that the loss is a sum of terms. Raises UsageError with the reason."""
    import torch

    model = cast_model(case.build(), dtype)
    batch = cast_batch(case.batch(), dtype)
    order: list[str] = []
    with torch.no_grad(), without_autocast():
        hooks = _record_order(model, order)
        terms = case.loss_terms(model, batch)
        for hook in hooks:
            hook.remove()
        again = case.loss_terms(model, batch)
    if not isinstance(terms, torch.Tensor) or terms.ndim == 0:
        raise UsageError(f"{case.title}.loss_terms: must return one loss per sample or token, not a mean of them")
    if not _are_close(terms, again, 1e-4):
        raise UsageError(
            f"{case.title}.loss_terms: two calls with the same batch return different losses, for example because of "
            "dropout; disable it in `build`, with p=0 or model.eval()"
        )
    counted = _find_counted(case, batch, terms)
    samples = int(terms.shape[0])
    owners, masks = _list_owners(case, batch, counted)
    divisor = case.count(batch)
    named = dict(model.named_parameters())
    names = tuple(name for name, parameter in named.items() if parameter.requires_grad)
    return Reference(
        case=case,
        dtype=dtype,
        model=model,
        batch=batch,
        names=names,
        aliases=_find_aliases(model, names),
        owners=owners,
        masks=masks,
        divisor=float(counted.sum()) if divisor is None else float(divisor),
        positions=counted.numel(),
        samples=samples,
        separable=_is_separable(case, model, batch, terms, counted),
        order=tuple(name for name in dict.fromkeys(order) if name in names),
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
        counted &= ~ignored.view(ignored.shape + (1,) * (terms.ndim - ignored.ndim))
    if not counted.any():
        raise UsageError(f"{case.title}: the batch has no terms that count")
    if not torch.isfinite(terms[counted]).all():
        raise UsageError(f"{case.title}.loss_terms: some terms are NaN or infinite")
    return counted


def _list_owners(case: ParityCase, batch: Any, counted: Any) -> tuple[tuple[Owner, ...], Any]:
    """Return the owners with terms, in order, and the mask of each. Owners without terms are dropped."""
    import torch

    ranks, micro_batches = case.owner(batch)
    dimensions = counted.ndim
    try:
        ranks = ranks.view(ranks.shape + (1,) * (dimensions - ranks.ndim)).expand(counted.shape)
        micro_batches = micro_batches.view(micro_batches.shape + (1,) * (dimensions - micro_batches.ndim))
        micro_batches = micro_batches.expand(counted.shape)
    except RuntimeError:
        raise UsageError(
            f"{case.title}.owner: returned {list(ranks.shape)} and {list(micro_batches.shape)}, which do not fit terms "
            f"of shape {list(counted.shape)}"
        ) from None
    owners = []
    masks = []
    pairs = torch.unique(torch.stack((ranks[counted], micro_batches[counted])), dim=1).T.tolist()
    for rank, micro_batch in pairs:
        mask = counted & (ranks == rank) & (micro_batches == micro_batch)
        samples = mask.view(len(mask), -1).any(1).nonzero().flatten().tolist()
        owners.append(Owner(rank, micro_batch, int(mask.sum()), tuple(samples)))
        masks.append(mask)
    return tuple(owners), torch.stack(masks)


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


def _find_aliases(model: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Return the name of the first of all tied parameters by each of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    name_of_parameter = {id(parameters[name]): name for name in names}
    aliases = {}
    for name, parameter in parameters.items():
        if id(parameter) in name_of_parameter:
            aliases[name] = name_of_parameter[id(parameter)]
    return aliases
