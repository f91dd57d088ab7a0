"""Read and write this rank's tensors and values by the names of a report, and broadcast tensors in place."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.digest.parts import as_bytes, as_plain_tensors, is_c_order, is_torch
from syncheck.live.memory import snapshot
from syncheck.live.memory.modules import EXTRA_STATE, has_extra_state
from syncheck.live.memory.tensor_bytes import TensorBytes
from syncheck.live.memory.tree import Tree, get_local_optimizer, get_prefix, name_parts
from syncheck.live.memory.type_checks import is_module, is_optimizer
from syncheck.names import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.live.channel import Channel

    Entries = dict[Any, Any]
    # An object with values: a function to read all its entries, and one to set them.
    Holder = tuple[Callable[[], Entries], Callable[[Entries], object]]
    # Bytes of a tensor, and the device type for sending them.
    Size = tuple[int, str]

# Bytes, and one more tensor, between two chances to report a failure to the other ranks.
BATCH = 256 << 20


class ReplicaState:
    """The live tensors of this rank, and its objects with values. parts: as in `memory.snapshot`."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        taken = snapshot(*parts)
        short = normalize(taken.tensors)
        self._tensors = {short[name]: tensor for name, tensor in taken.tensors.items()}
        found = dict(_find_holders(parts))
        # A report has tensors without the prefixes of wrappers, and values with them. Only names of tensors can be
        # normalized, so each object gets a tensor x.
        within = [f"{name}.x" for name in found if name.startswith("optimizer.") or name.endswith(EXTRA_STATE)]
        plain = normalize([*taken.tensors, *within])
        self._holders = {plain[name].removesuffix(".x"): found[name.removesuffix(".x")] for name in within} | found

    def find_tensor(self, name: str, *, writable: bool = False) -> Any:
        """Return a live tensor by name. Raises UsageError if its bytes cannot be copied, or written."""
        tensor = self._tensors.get(name)
        if tensor is None or not isinstance(tensor.data, TensorBytes):
            raise UsageError(f"{name} has no bytes to copy: {getattr(tensor, 'refused', None) or 'not in memory'}")
        source = tensor.data.source
        if not is_torch(source):
            if writable and not source.flags.writeable:
                raise UsageError(f"{name} is a read-only array; copy() it on all ranks")
            return sys.modules["torch"].from_numpy(source if source.flags.writeable else source.copy())
        if writable and any(step == 0 and size > 1 for size, step in zip(source.shape, source.stride(), strict=True)):
            raise UsageError(f"{name} has elements that share memory, as after expand(); clone() it on all ranks")
        return source

    def find_entry(self, name: str) -> str:
        """Return the name of the whole entry: for an element of a list, the name of the list."""
        found = list(self._split(name)[0])
        return f"{self.find_holder(name)}.{found[0]}" if found else name

    def dump_entry(self, name: str) -> bytes:
        """Return an entry of an object by name, or nothing if there is none, as bytes."""
        written = io.BytesIO()
        # A clone: torch.save writes the whole storage of a view, such as all of a flat buffer.
        found = {k: v.detach().clone() if is_torch(v) else v for k, v in self._split(name)[0].items()}
        sys.modules["torch"].save(found, written)
        return written.getvalue()

    def load_entry(self, name: str, data: bytes) -> None:
        """Replace an entry by the source's. Tensors go to this process's device of the same type."""
        torch: Any = sys.modules["torch"]

        def located(storage: Any, device: str) -> Any:
            return torch.serialization.default_restore_location(storage, str(get_device(device.partition(":")[0])))

        with torch.inference_mode(mode=False):  # tensors of that mode cannot be trained with
            # With classes, like all messages: the ranks of a group run one program and trust each other.
            entries = torch.load(io.BytesIO(data), map_location=located, weights_only=False)
        _, write = self._holders[self.find_holder(name)]
        write(self._split(name)[1] | entries)

    def _split(self, name: str) -> tuple[Entries, Entries]:
        """Return the entry of a name, if there is one, and all other entries of the same object."""
        at = self.find_holder(name)
        entries = self._holders[at][0]()
        own = {key for key in entries if at.endswith(EXTRA_STATE) or f"{name}.".startswith(f"{at}.{key}.")}
        return {k: v for k, v in entries.items() if k in own}, {k: v for k, v in entries.items() if k not in own}

    def find_holder(self, name: str) -> str:
        """Return the name of the object with a value. Raises UsageError if there is none."""
        at = name
        while at and at not in self._holders:
            at = at.rpartition(".")[0]
        if not at:
            raise UsageError(
                f"{name} differs and resync cannot set it: no optimizer, scaler or other object with load_state_dict() "
                "of this rank holds it; set it to the same on all ranks, or load a checkpoint, and call it again"
            )
        return at


def _find_holders(parts: tuple[Any, ...]) -> Iterator[tuple[str, Holder]]:
    """Yield the objects with values of a replica, by the beginning of the values' names."""
    listed = name_parts(parts)
    names = Tree(parts).names
    optimizers = [part for _, part in listed if is_optimizer(part)]
    for name, part in listed:
        if is_module(part):
            for path, owner in part.named_modules(remove_duplicate=False):
                if has_extra_state(owner):
                    yield f"{get_prefix(name)}{path}{'.' if path else ''}{EXTRA_STATE}", _hold_extra_state(owner)
        elif is_optimizer(part):
            at = "optimizer" if len(optimizers) == 1 else f"optimizer.{optimizers.index(part)}"
            own, _ = get_local_optimizer(part)
            for i, group in enumerate(own.param_groups):
                # At each step ZeRO's optimizer copies values from its own groups to those of the inner one.
                yield f"{at}.param_groups.{i}", _hold_groups(group, part.param_groups[i])
                called = group.get("param_names") or [names.get(id(p), "") for p in group["params"]]
                for parameter, of in zip(group["params"], called, strict=False):
                    if not hasattr(parameter, "placements"):  # the state of a DTensor cannot be sent by itself
                        yield f"{at}.{of}", _hold_state(own.state, parameter)
        elif hasattr(part, "load_state_dict"):
            yield name, (part.state_dict, part.load_state_dict)


def _hold_extra_state(module: Any) -> Holder:
    return lambda: {"": module.get_extra_state()}, lambda entries: module.set_extra_state(entries[""])


def _hold_groups(*groups: Entries) -> Holder:
    """Return a parameter group as a holder. groups: the first is read, all are set."""
    members = {"params", "param_names"}

    def write(entries: Entries) -> None:
        for group in groups:  # the same objects stay: schedulers refer to them
            for key in group.keys() - entries.keys() - members:
                del group[key]
            group.update(entries)

    return lambda: {key: value for key, value in groups[0].items() if key not in members}, write


def _hold_state(states: Any, parameter: Any) -> Holder:
    def write(entries: Entries) -> None:
        states.pop(parameter, None)  # without any state, the optimizer initializes it
        states.update({parameter: entries} if entries else {})

    return lambda: states.get(parameter, {}), write


def get_size(tensor: Any, group: Any) -> Size:
    """Return what the other ranks of a process group need to receive a tensor."""
    pairs = sys.modules["torch.distributed"].get_backend_config(group).split(",")
    known = [pair.partition(":")[0] for pair in pairs]
    return tensor.nbytes, tensor.device.type if tensor.device.type in known else known[0]  # NCCL: nothing from a CPU


def broadcast_tensors(channel: Channel, tensors: Sequence[tuple[Any, int, Size]]) -> None:
    """Overwrite tensors by those of other ranks.

    A collective call. tensors: as many on all ranks, each with its source and its size there; None on ranks which only
    discard the bytes. Every tensor is broadcast to all ranks, so no order of sends and receives can deadlock. A rank
    reports its failure before the next batch, and all ranks raise.
    """
    batches: dict[int, list[Any]] = {}
    total = 0
    for sent in tensors:
        batches.setdefault(total // BATCH, []).append(sent)
        total += sent[2][0]
    with sys.modules["torch"].inference_mode():  # in this mode all tensors can be written
        for batch in batches.values():
            channel.broadcast_rows([_make_row(channel.rank, *sent) for sent in batch if sent[2][0]])


def _make_row(rank: int, tensor: Any, source: int, size: Size) -> tuple[Any, int, Callable[[], None]]:
    """Return the row of bytes to broadcast or receive, its source, and what to call when it has arrived."""
    torch: Any = sys.modules["torch"]
    device = get_device(size[1])
    if tensor is None:
        return torch.empty(size[0], dtype=torch.uint8, device=device), source, lambda: None
    with as_plain_tensors():
        plain = tensor.detach().as_subclass(torch.Tensor)
    if rank == source:
        return as_bytes(plain.resolve_conj().resolve_neg().contiguous()).to(device), source, lambda: None
    if plain.device == device and is_c_order(plain):
        return as_bytes(plain), source, lambda: None
    row = torch.empty(size[0], dtype=torch.uint8, device=device)

    def arrived() -> None:
        plain.copy_(row.view(plain.dtype).view(plain.shape))

    return row, source, arrived


def get_device(kind: str) -> Any:
    """Return this process's device of a type."""
    torch: Any = sys.modules["torch"]
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
