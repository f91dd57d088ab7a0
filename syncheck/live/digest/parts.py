"""The bytes of a tensor, in C order, as they lie in memory or copied in parts where they do not lie like that.

Neither torch nor numpy is imported here: who holds a tensor or an array has loaded it.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

WORD = 8  # bytes

# Bytes that are copied at a time of a tensor that is not in C order: what a check may take beside the model.
MOST_COPIED = 16 << 20


@contextlib.contextmanager
def as_plain_tensors() -> Iterator[None]:
    """Call torch without autograd, and without what subclasses make of its methods: the bytes are torch's business.

    Holds for the thread that enters it. Does nothing where torch is not loaded.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no other name for it
        yield


def is_torch(source: Any) -> bool:
    """Whether a source is a tensor of torch, not an array."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.Tensor)


def is_c_order(tensor: Any) -> bool:
    """Whether the bytes of a strided tensor lie in memory as they are read: in C order, conjugated and negated."""
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def is_aligned(tensor: Any) -> bool:
    """Whether the bytes of a tensor that lies in order can be read in words of eight."""
    return not (tensor.data_ptr() % WORD or tensor.storage_offset() * tensor.element_size() % WORD)


def has_storage(tensor: Any) -> bool:
    """Whether the storage of a strided tensor has all its bytes; else reading it would end the process.

    FSDP1 frees the storage of a parameter between its uses, and the tensor keeps its shape.
    """
    if not tensor.numel() or not (tensor.is_cpu or tensor.is_cuda):  # others give no address to read from
        return True
    return bool(tensor.untyped_storage().nbytes() >= _required_bytes(tensor))


def _required_bytes(tensor: Any) -> int:
    """Return where in its storage a tensor ends, in bytes."""
    reach = tensor.numel() - 1
    if not tensor.is_contiguous():
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach + 1) * int(tensor.element_size())


def require_storage(tensor: Any, number: int) -> None:
    """Raise UsageError for a tensor whose storage was freed. number: of the tensor in its list, for the error."""
    if not has_storage(tensor):
        found, needed = tensor.untyped_storage().nbytes(), _required_bytes(tensor)
        raise UsageError(
            f"tensor {number}, {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}: its storage holds "
            f"{found} bytes, {needed} needed. FSDP frees parameters between their uses: check inside "
            "FullyShardedDataParallel.summon_full_params"
        )


def iterate_parts(tensor: Any, most: int = MOST_COPIED) -> Iterator[tuple[int, Any]]:
    """Yield the bytes of a strided tensor as tensors that lie in order and are aligned, with the word each begins at.

    One that is so already comes as it is. Of another, copies of at most `most` bytes come, or of eight rows where that
    is more, on its own device; all but the last have whole words of eight bytes.
    """
    if not tensor.numel():
        return
    if not is_c_order(tensor):
        rows = len(tensor) if tensor.dim() else 1
        size = tensor.numel() * tensor.element_size() // rows
        # Eight rows are whole words, whatever a row is.
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
    """Return the bytes of a numpy array as a row of uint8, little-endian, copied where they do not lie like that."""
    numpy = sys.modules["numpy"]
    return numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(numpy.uint8)


def as_bytes(tensor: Any) -> Any:
    """Return a tensor that lies in order as a row of uint8 on its own device, without a copy."""
    torch = sys.modules["torch"]
    # Not reshape: a single element keeps a stride that is not 1, and cannot be viewed as bytes.
    row = tensor.detach().as_subclass(torch.Tensor).as_strided((tensor.numel(),), (1,))
    return row.view(torch.uint8)


def copy_in_c_order(tensor: Any) -> Any:
    """Return a copy of a tensor in C order, bit for bit."""
    torch = sys.modules["torch"]
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    elif plain.element_size() <= WORD:
        # To copy booleans as such makes ones of all that is not zero, also of damaged memory.
        plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
    found = plain.contiguous()
    # What was in order all the same, a slice of one element, say, may lie at an odd place.
    return found if is_aligned(found) else found.clone()
