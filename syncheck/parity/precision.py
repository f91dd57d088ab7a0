"""The precision of a check: casts, the error that rounding may cause, and mixed precision of the program."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from syncheck.errors import OptionError, UsageError
from syncheck.messages import Usage
from syncheck.parity.case import map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = ("float64", "float32", "bfloat16")
# Bits of the significand, with the leading one.
_PRECISIONS = {"float64": 53, "float32": 24, "bfloat16": 8}
_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2}
# A tensor is wrong if it differs by more than this many times the measured floor. Chosen by benchmarks/parity.py: right
# programs have errors below 0.4 floors.
FLOORS = 8


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of rounding a number to a dtype: 2**-53 for float64."""
    return float(2.0 ** -_PRECISIONS[dtype])


def size_of_element(dtype: str) -> int:
    """Return the bytes of a number of a dtype."""
    return _SIZES[dtype]


def check_dtype(dtype: str) -> None:
    """Raise OptionError for a dtype that is not supported."""
    if dtype not in DTYPES:
        raise OptionError(f"must be one of {', '.join(DTYPES)}", dtype=dtype)


def find_threshold(floor: float, parts: int, dtype: str) -> float:
    """Return the largest error of a right gradient, relative to the sum of the norms of all owners' gradients.

    floor: the error of a reordered computation by one process, as measured. parts: number of gradients that the program
    adds, one for each rank and micro-batch. dtype: of the gradients.

    The floor covers forward and backward. The reduction adds `parts` numbers in an unknown order, after one scaling of
    each. If u is the unit roundoff, floating-point addition returns (x + y)(1 + d) with |d| <= u, so that each of the k
    numbers is multiplied by at most k - 1 factors (1 + d) from additions and 2 from scaling and storing. The computed
    sum differs from the exact sum by at most gamma(k + 1) * sum |x_i| with gamma(n) = n * u / (1 - n * u) (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2). By the triangle inequality the same bound holds for
    norms of tensors. The sum of the norms is the unit of the error, so the reduction adds gamma(k + 1).
    """
    roundings = (parts + 1) * unit_roundoff(dtype)
    # A bound beyond 1 is no bound.
    reduction = roundings / (1 - roundings) if roundings < 0.5 else 1.0
    return FLOORS * max(floor, unit_roundoff(dtype)) + reduction


def cast_model(model: Any, dtype: str) -> Any:
    """Return a module with its floating-point parameters and buffers in a dtype."""
    import torch

    return model.to(getattr(torch, dtype))


def cast_batch(batch: Any, dtype: str) -> Any:
    """Return a batch with its floating-point tensors in a dtype."""
    import torch

    target = getattr(torch, dtype)

    def cast(tensor: Any) -> Any:
        return tensor.to(target) if tensor.is_floating_point() else tensor

    return map_tensors(batch, cast)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast within the block, also the autocast of the program itself."""
    import torch

    enter = torch.autocast.__enter__

    def enter_disabled(context: Any) -> Any:
        # The program would compute in another precision than the definition.
        context._enabled = False  # noqa: SLF001
        return enter(context)  # type: ignore[no-untyped-call]

    torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


def refuse_mixed_precision(modules: list[Any]) -> None:
    """Raise UsageError if FSDP or DDP would compute or reduce in another precision than the parameters."""
    for root in modules:
        for module in root.modules():
            policy = _find_policy(module)
            # The module is named by its class, because paths of wrappers help nobody.
            if policy:
                raise UsageError(Usage.MIXED_PRECISION(module=type(module).__name__, policy=policy))


def _find_policy(module: Any) -> str:
    """Return the dtypes of the mixed precision of a module; empty without mixed precision."""
    policy = getattr(module, "mixed_precision", None)
    if type(module).__name__ != "DistributedDataParallel":
        # Only modules of fully_shard have this method.
        get_state = getattr(module, "_get_fsdp_state", object)
        policy = getattr(get_state(), "_mp_policy", None)
    dtypes = {getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)}
    # A policy without dtypes changes nothing.
    if policy is None or dtypes == {None}:
        return ""
    return f"param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype}"
