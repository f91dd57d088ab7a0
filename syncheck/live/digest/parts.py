"""The bytes of a tensor in C order: in place, or copied part by part if the memory order differs.

Imports neither torch nor numpy: if a caller has a tensor or an array, its library is loaded.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.loaded import find_loaded

if TYPE_CHECKING:
    from collections.abc import Iterator

WORD = 8  # bytes

# Bytes per copy of a tensor that is not in C order: the memory overhead of a check.
MOST_COPIED = 16 << 20


@contextlib.contextmanager
def as_plain_tensors() -> Iterator[None]:
    """Disable autograd and the overrides of tensor subclasses in this thread, to read only the stored bytes.

    Does nothing if torch is not loaded.
    """
    torch = find_loaded("torch")
    if torch is None:
        yield
        return
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public equivalent
        yield


def is_torch(source: Any) -> bool:
    """Whether a source is a torch tensor and not an array."""
    # Without `is_instance`: a check of a small model makes thousands of these calls.
    # While another thread imports torch, its module has no class yet.
    kind: Any = getattr(sys.modules.get("torch"), "Tensor", ())
    return isinstance(source, kind)


def is_instance(value: Any, package: str, class_name: str) -> bool:
    """Whether a value is an instance of a class of a package, without importing the package."""
    # Nothing is an instance of one of no classes.
    kind: Any = getattr(sys.modules.get(package), class_name, ())
    return isinstance(value, kind)


def is_c_order(tensor: Any) -> bool:
    """Whether the memory of a strided tensor holds its bytes in C order, with conjugation and negation resolved."""
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def is_aligned(tensor: Any) -> bool:
    """Whether the bytes of a C-order tensor can be read in 8-byte words."""
    return not (tensor.data_ptr() % WORD or tensor.storage_offset() * tensor.element_size() % WORD)


def has_storage(tensor: Any) -> bool:
    """Whether the storage of a strided tensor holds all its bytes; otherwise reading would crash the process.

    FSDP1 frees the storage of parameters between uses, but the tensors keep their shape.
    """
    # Other devices give no address to read.
    has_address = tensor.is_cpu or tensor.is_cuda
    if not tensor.numel() or not has_address:
        return True

    return bool(tensor.untyped_storage().nbytes() >= _required_bytes(tensor))


def _required_bytes(tensor: Any) -> int:
    """Return the number of storage bytes up to the end of the tensor."""
    reach = tensor.numel() - 1
    if not tensor.is_contiguous():
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach + 1) * int(tensor.element_size())


def require_storage(tensor: Any, number: int) -> None:
    """Raise UsageError for a tensor whose storage was freed. number: of the tensor in its list."""
    if not has_storage(tensor):
        available, required = tensor.untyped_storage().nbytes(), _required_bytes(tensor)
        raise UsageError(
            f"tensor {number}, {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}: its storage has "
            f"{available} of {required} bytes. FSDP frees parameters between uses; check inside "
            "FullyShardedDataParallel.summon_full_params"
        )


def iterate_parts(tensor: Any, most: int = MOST_COPIED) -> Iterator[tuple[int, Any]]:
    """Yield the bytes of a strided tensor as aligned C-order tensors, each with the index of its first word.

    A tensor in this form is yielded as it is. Other tensors are copied on their device, at most `most` bytes or eight
    rows at a time; every part except the last has whole 8-byte words.
    """
    if not tensor.numel():
        return
    if not is_c_order(tensor):
        rows = len(tensor) if tensor.dim() else 1
        size = tensor.numel() * tensor.element_size() // rows
        # Eight rows of any size are whole words.
        step = max(most // (size * WORD), 1) * WORD
        for start in range(0, rows, step):
            part = tensor[start : start + step] if tensor.dim() else tensor
            yield start * size // WORD, copy_in_c_order(part)
    elif is_aligned(tensor):
        yield 0, tensor
    else:
        row = as_bytes(tensor)
        for start in range(0, len(row), most):
            yield start // WORD, row[start : start + most].clone()


def array_bytes(array: Any) -> Any:
    """Return the bytes of a numpy array as a little-endian uint8 row, copied only if necessary."""
    numpy = sys.modules["numpy"]
    return numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(numpy.uint8)


def as_bytes(tensor: Any) -> Any:
    """Return a C-order tensor as a uint8 row on its own device, without a copy."""
    torch = sys.modules["torch"]
    # Not reshape: a tensor with one element keeps its stride, and cannot be viewed as bytes if it is not 1.
    row = tensor.detach().as_subclass(torch.Tensor).as_strided((tensor.numel(),), (1,))
    return row.view(torch.uint8)


def copy_in_c_order(tensor: Any) -> Any:
    """Return a bitwise copy of a tensor in C order."""
    torch = sys.modules["torch"]
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    elif plain.element_size() <= WORD:
        # Copying as bool would normalize damaged bytes to 1.
        plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
    copy = plain.contiguous()
    # A C-order tensor, like a slice of one element, may be unaligned.
    return copy if is_aligned(copy) else copy.clone()
