"""Checks of the results of a case. Each error has class and method, the expectation, and the next step in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.channel import world_size
from syncheck.parity.case import ParityCase, count_samples, list_modules
from syncheck.parity.phases import START

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_REQUIRED = ("build", "batch", "loss_terms", "parallelize", "backward")


def require(is_met: bool, text: str) -> None:
    """Raise UsageError with a text unless a condition is met."""
    if not is_met:
        raise UsageError(text)


def check_case(case: ParityCase) -> None:
    """Raise UsageError for missing methods and unsuitable attributes."""
    missing = [name for name in _REQUIRED if getattr(type(case), name) is getattr(ParityCase, name)]
    require(
        not missing,
        f"{case.title}: override {' and '.join(missing)} of ParityCase; docs/guide/20-parity.md has an example",
    )
    _check_size(case, "micro_batches", case.micro_batches)
    _check_mesh(case)
    _check_limit(case, "max_norm", case.max_norm)
    _check_limit(case, "clip_value", case.clip_value)
    require(
        None in (case.max_norm, case.clip_value),
        f"{case.title}: set max_norm or clip_value, not both: only one clipping is compared",
    )
    # Without a second part of the batch, a program is compared with itself.
    has_parts = max(world_size(), case.micro_batches) > 1
    require(has_parts, f"{case.title}: nothing parallel to check in one process; {START}")


def _check_size(case: ParityCase, name: str, size: Any) -> None:
    # A bool is an integer, too.
    is_size = type(size) is int and size > 0
    require(is_size, f"{case.title}.{name}: must be a positive integer; found {size!r:.80}")


def _check_limit(case: ParityCase, name: str, limit: Any) -> None:
    is_limit = limit is None or _is_positive(limit)
    require(is_limit, f"{case.title}.{name}: must be a positive number; found {limit!r:.80}")


def _is_positive(number: Any) -> bool:
    """Whether an object is a positive and finite number."""
    # NaN fails the comparison.
    return isinstance(number, (int, float)) and 0 < number < float("inf")


def _check_mesh(case: ParityCase) -> None:
    sizes: Any = case.mesh_sizes
    require(
        isinstance(sizes, Mapping),
        f"{case.title}.mesh_sizes: must be an attribute with a dictionary of sizes by name, for example "
        f'{{"dp": 2, "tp": 2}}; found {type(sizes).__name__}',
    )
    for name, size in sizes.items():
        _check_size(case, f"mesh_sizes[{name!r}]", size)
    ranks = world_size()
    product = math.prod(sizes.values())
    # An empty dictionary is one dimension of all ranks.
    fits = not (sizes and ranks) or product == ranks
    require(
        fits,
        f"{case.title}.mesh_sizes: the sizes {dict(sizes)} are of {product} ranks, and the program has {ranks}; "
        f"change the sizes, or start {product} processes",
    )


def check_built(case: ParityCase, model: Any) -> Any:
    """Return the result of `build`. Raises UsageError except for a module with trainable parameters."""
    import torch

    method = f"{case.title}.build"
    is_module = isinstance(model, torch.nn.Module)
    require(is_module, f"{method}: must return a torch.nn.Module; found {type(model).__name__}")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    require(bool(trainable), f"{method}: no parameter requires a gradient; return a model that can be trained")
    return model


def check_parallel(case: ParityCase, model: Any) -> Any:
    """Return the result of `parallelize`. Raises UsageError for None and for objects without parameters."""
    method = f"{case.title}.parallelize"
    require(model is not None, f"{method}: returned None; return the parallel model")
    # A case that overrides the names may return other objects.
    if type(case).named_parameters is ParityCase.named_parameters:
        for _, module in list_modules(model):
            require(
                hasattr(module, "named_parameters"),
                f"{method}: must return a module, or a list or dictionary of modules; found {type(module).__name__}; "
                "override `named_parameters` for other results",
            )
    return model


def check_terms(case: ParityCase, terms: Any, batch: Any) -> None:
    """Raise UsageError unless the terms are a tensor whose first dimension is the samples."""
    import torch

    method = f"{case.title}.loss_terms"
    is_tensor = isinstance(terms, torch.Tensor)
    require(is_tensor, f"{method}: must return a tensor [samples, ...]; found {type(terms).__name__}")
    require(
        terms.ndim > 0,
        f"{method}: must return one loss per sample or token, not a mean of them; use reduction='none'",
    )
    # A case that overrides the owners may have terms of other units than samples.
    if type(case).owner is ParityCase.owner:
        samples = count_samples(batch)
        require(
            len(terms) == samples,
            f"{method}: must return [samples, ...] for the {samples} samples of the batch; found {list(terms.shape)}; "
            "restore the dimension of the samples with `view`, or define `owner` for each term",
        )


def check_count(case: ParityCase, divisor: Any, counted: Any) -> float:
    """Return the divisor of the sum of all terms. Raises UsageError except for a positive number."""
    number: Any = float(counted.sum()) if divisor is None else divisor
    # A tensor with one element is a number.
    if getattr(number, "ndim", None) == 0:
        number = number.item()
    require(
        _is_positive(number),
        f"{case.title}.count: must return a positive number; found {divisor!r:.80}; return the divisor of "
        "the sum of all terms",
    )
    return float(number)


def check_ignored(case: ParityCase, ignored: Any, shape: Sequence[int]) -> None:
    """Raise UsageError unless a mask is boolean and fits the first dimensions of the terms."""
    import torch

    method = f"{case.title}.ignored"
    dtype = getattr(ignored, "dtype", type(ignored).__name__)
    require(dtype == torch.bool, f"{method}: must return a boolean tensor; found {dtype}")
    require(
        tuple(ignored.shape) == tuple(shape[: ignored.ndim]),
        f"{method}: returned {list(ignored.shape)}, which does not fit terms of shape {list(shape)}; return one value "
        "for each term",
    )


def check_owners(case: ParityCase, owners: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    """Return data ranks and micro-batches of the terms. Raises UsageError except for integers in range."""
    import torch

    method = f"{case.title}.owner"
    expected = "return two integer tensors, data rank and micro-batch of each sample, as `sampler_order` does"
    is_pair = isinstance(owners, tuple) and len(owners) == 2
    require(is_pair, f"{method}: found {type(owners).__name__}; {expected}")
    for tensor in owners:
        dtype = getattr(tensor, "dtype", type(tensor).__name__)
        require(isinstance(tensor, torch.Tensor), f"{method}: found {dtype} in the tuple; {expected}")
        require(dtype in _integers(), f"{method}: found {dtype}; {expected}")
        require(
            tuple(tensor.shape) == tuple(shape[: tensor.ndim]),
            f"{method}: results of shape {list(tensor.shape)} do not fit terms of shape {list(shape)}; {expected}",
        )
    data_ranks, micro_batches = owners
    ranks = max(world_size(), 1)
    first, last = int(data_ranks.min()), int(data_ranks.max())
    require(
        0 <= first <= last < ranks,
        f"{method}: data ranks {first} to {last}, but the program has {ranks} ranks; return numbers from 0 to "
        f"{ranks - 1}",
    )
    smallest = int(micro_batches.min())
    require(smallest >= 0, f"{method}: micro-batch {smallest}; return numbers from 0")
    return data_ranks, micro_batches


def _integers() -> tuple[Any, ...]:
    """Return the dtypes of ranks and micro-batches."""
    import torch

    return (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@contextmanager
def without_dropout(title: str) -> Iterator[None]:
    """Raise UsageError if a module of dropout drops elements within the block, which the definition may not drop."""
    from torch.nn.modules.dropout import _DropoutNd
    from torch.nn.modules.module import register_module_forward_pre_hook

    def check(module: Any, _inputs: Any) -> None:
        is_random = isinstance(module, _DropoutNd) and module.training and module.p > 0
        require(
            not is_random,
            f"{title}.backward: the program runs {type(module).__name__} with p={getattr(module, 'p', 0):g}, and the "
            "definition has other random numbers or none; disable it, with p=0 or eval()",
        )

    # Of all modules, because a program may make some, or call `train()`, in `backward`.
    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def check_norm(case: ParityCase, norm: Any) -> float | None:
    """Return the norm that `finish` returned. Raises UsageError except for a number or None."""
    if norm is None:
        return None
    # A norm of DTensors may be partial.
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    try:
        return float(norm)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"{case.title}.finish: must return the gradient norm before clipping; found {norm!r:.80}"
        ) from None
