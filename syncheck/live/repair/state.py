"""Read and write this rank's tensors and values by the names of a report, and broadcast tensors in place."""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.digest.parts import as_bytes, as_plain_tensors, is_c_order, is_torch
from syncheck.live.memory import snapshot
from syncheck.live.memory.objects import EXTRA_STATE, add_dot, has_extra_state, is_module, is_optimizer
from syncheck.live.memory.replica_parts import get_prefix, name_parts
from syncheck.live.memory.tensor_bytes import TensorBytes
from syncheck.live.memory.tree import Tree, get_local_optimizer
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from syncheck.live.channel import Channel

    Entries = dict[Any, Any]
    # An object with values: functions to read and to set all entries.
    Holder = tuple[Callable[[], Entries], Callable[[Entries], object]]
    # Bytes of a tensor, and the device type to send them from.
    Size = tuple[int, str]

# Bytes per batch; ranks report failures between batches.
BATCH = 256 << 20


class ReplicaState:
    """The tensors and objects with values of this rank. parts: as in `memory.snapshot`."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        replica = snapshot(*parts)
        normalized = normalize(replica.tensors)
        self._tensors = {normalized[name]: tensor for name, tensor in replica.tensors.items()}
        self._holders = _add_plain_names(dict(_iterate_holders(parts)), list(replica.tensors))

    def find_tensor(self, name: str, *, writable: bool = False) -> Any:
        """Return a live tensor by name. Raises UsageError if its bytes cannot be read, or written."""
        tensor = self._tensors.get(name)
        data = getattr(tensor, "data", None)
        if not isinstance(data, TensorBytes):
            reason = getattr(tensor, "refused", None) or "not in memory"
            raise UsageError(f"{name} has no bytes to copy ({reason})")

        source = data.source
        if not is_torch(source):
            return _share_array(name, source, writable=writable)

        if writable and _has_shared_elements(source):
            raise UsageError(
                f"{name} has elements that share memory, like the result of expand(); call clone() on all ranks"
            )

        return source

    def find_entry(self, name: str) -> str:
        """Return the name of the whole entry; for an element of a list, the name of the list."""
        entry, _ = self._split_entries(name)
        if not entry:
            return name

        return f"{self.find_holder(name)}.{next(iter(entry))}"

    def dump_entry(self, name: str) -> bytes:
        """Serialize the entry with this name, or an empty dict if there is none."""
        entry, _ = self._split_entries(name)
        for key, value in entry.items():
            # Cloned, because torch.save writes the whole storage of a view, for example a flat buffer.
            if is_torch(value):
                entry[key] = value.detach().clone()

        file = io.BytesIO()
        sys.modules["torch"].save(entry, file)
        return file.getvalue()

    def load_entry(self, name: str, data: bytes) -> None:
        """Replace an entry by the source's. Tensors go to this process's device of the same type."""
        torch: Any = sys.modules["torch"]

        def move_to_device(storage: Any, device: str) -> Any:
            kind, _, _ = device.partition(":")
            return torch.serialization.default_restore_location(storage, str(get_device(kind)))

        with torch.inference_mode(mode=False):  # inference tensors cannot be trained
            # Unpickling is safe like all messages: the ranks of a group run one program and trust each other.
            entries = torch.load(io.BytesIO(data), map_location=move_to_device, weights_only=False)

        # The object is set as a whole, because `load_state_dict` has no other way.
        _, write = self._holders[self.find_holder(name)]
        _, other_entries = self._split_entries(name)
        write(other_entries | entries)

    def _split_entries(self, name: str) -> tuple[Entries, Entries]:
        """Return the entry with this name, if any, and all other entries of the same object."""
        holder = self.find_holder(name)
        read, _ = self._holders[holder]
        is_extra_state = holder.endswith(EXTRA_STATE)
        entry: Entries = {}
        other_entries: Entries = {}
        for key, value in read().items():
            is_named = is_extra_state or f"{name}.".startswith(f"{holder}.{key}.")
            if is_named:
                entry[key] = value
            else:
                other_entries[key] = value

        return entry, other_entries

    def find_holder(self, name: str) -> str:
        """Return the name of the object that holds a value. Raises UsageError if there is none."""
        # The name of a value starts with the name of the object that holds it.
        holder = name
        while holder and holder not in self._holders:
            holder, _, _ = holder.rpartition(".")

        if not holder:
            raise UsageError(
                f"{name} differs, but resync cannot set it, because no optimizer, scaler or other object with "
                "load_state_dict() on this rank holds it; set it to the same value on all ranks, or load a checkpoint, "
                "and call resync again"
            )

        return holder


def _share_array(name: str, array: Any, *, writable: bool) -> Any:
    """Return an array as a tensor with the same memory, or with a copy if it is only read."""
    if array.flags.writeable:
        return sys.modules["torch"].from_numpy(array)

    if writable:
        raise UsageError(f"{name} is a read-only array; call copy() on all ranks")

    return sys.modules["torch"].from_numpy(array.copy())


def _has_shared_elements(tensor: Any) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _add_plain_names(holders: dict[str, Holder], tensor_names: list[str]) -> dict[str, Holder]:
    """Return objects with values by their names, and by their names without wrapper prefixes.

    Reports list tensors without wrapper prefixes, and values with prefixes. `normalize` takes tensor names only, so
    each object gets a tensor named x.
    """
    tensors_of_holders: dict[str, Holder] = {}
    for name, holder in holders.items():
        if name.startswith("optimizer.") or name.endswith(EXTRA_STATE):
            tensors_of_holders[f"{name}.x"] = holder

    plain_names = normalize([*tensor_names, *tensors_of_holders])
    by_plain_name = {plain_names[name].removesuffix(".x"): holder for name, holder in tensors_of_holders.items()}
    return by_plain_name | holders


def _iterate_holders(parts: tuple[Any, ...]) -> Iterator[tuple[str, Holder]]:
    """Yield the objects with values of a replica, with the prefix of their values' names."""
    named_parts = name_parts(parts)
    parameter_names = Tree(parts).names
    optimizers = [part for _, part in named_parts if is_optimizer(part)]
    for name, part in named_parts:
        if is_module(part):
            yield from _iterate_extra_states(get_prefix(name), part)
        elif is_optimizer(part):
            # Several optimizers are numbered.
            position = optimizers.index(part)
            optimizer_name = "optimizer" if len(optimizers) == 1 else f"optimizer.{position}"
            yield from _iterate_optimizer(optimizer_name, part, parameter_names)
        elif hasattr(part, "load_state_dict"):
            yield name, (part.state_dict, part.load_state_dict)


def _iterate_extra_states(prefix: str, module: Any) -> Iterator[tuple[str, Holder]]:
    """Yield the submodules with an extra state. prefix: of the names in the module."""
    for path, owner in module.named_modules(remove_duplicate=False):
        if has_extra_state(owner):
            yield f"{prefix}{add_dot(path)}{EXTRA_STATE}", _hold_extra_state(owner)


def _iterate_optimizer(name: str, optimizer: Any, parameter_names: Mapping[int, str]) -> Iterator[tuple[str, Holder]]:
    """Yield the parameter groups and the states of an optimizer.

    name: of the optimizer.
    parameter_names: by the id of a parameter.
    """
    local, _ = get_local_optimizer(optimizer)
    for number, group in enumerate(local.param_groups):
        # At each step, ZeroRedundancyOptimizer copies values from its own groups to the inner groups.
        yield f"{name}.param_groups.{number}", _hold_groups(group, optimizer.param_groups[number])

        names = group.get("param_names") or [parameter_names.get(id(parameter), "") for parameter in group["params"]]
        for parameter, parameter_name in zip(group["params"], names, strict=False):
            # The state of a DTensor cannot be sent alone.
            if not hasattr(parameter, "placements"):
                yield f"{name}.{parameter_name}", _hold_state(local.state, parameter)


def _hold_extra_state(module: Any) -> Holder:
    """Return a module's extra state as a holder with one entry, which has no name."""

    def read() -> Entries:
        return {"": module.get_extra_state()}

    def write(entries: Entries) -> None:
        module.set_extra_state(entries[""])

    return read, write


def _hold_groups(*groups: Entries) -> Holder:
    """Return a parameter group as a holder. Reads the first of the groups, and sets all."""
    members = {"params", "param_names"}

    def read() -> Entries:
        return {key: value for key, value in groups[0].items() if key not in members}

    def write(entries: Entries) -> None:
        for group in groups:  # in place, because schedulers refer to the dicts
            for key in group.keys() - entries.keys() - members:
                del group[key]
            group.update(entries)

    return read, write


def _hold_state(states: Any, parameter: Any) -> Holder:
    """Return an optimizer's state of a parameter as a holder."""

    def read() -> Entries:
        state: Entries = states.get(parameter, {})
        return state

    def write(entries: Entries) -> None:
        states.pop(parameter, None)
        if entries:  # without state, the optimizer initializes it
            states[parameter] = entries

    return read, write


def get_size(tensor: Any, group: Any) -> Size:
    """Return the bytes of a tensor, and the device type to send them from."""
    pairs = sys.modules["torch.distributed"].get_backend_config(group).split(",")
    device_types = [pair.partition(":")[0] for pair in pairs]
    device_type = tensor.device.type
    if device_type not in device_types:  # NCCL sends no CPU tensors
        device_type = device_types[0]

    return tensor.nbytes, device_type


def broadcast_tensors(channel: Channel, tensors: Sequence[tuple[Any, int, Size]]) -> None:
    """Overwrite tensors with the bytes of other ranks.

    A collective call. All ranks receive every tensor, so no order of sends and receives can deadlock. A rank reports
    its failure before the next batch, and all ranks raise.

    tensors: equally many on all ranks, each with its source and the size there; None on ranks that discard the bytes.
    """
    batches: dict[int, list[tuple[Any, int, Size]]] = defaultdict(list)
    total = 0
    for tensor, source, size in tensors:
        length, _ = size
        # Batches are numbered by the bytes before a tensor, and tensors without bytes are equal.
        if length:
            batches[total // BATCH].append((tensor, source, size))
        total += length

    with sys.modules["torch"].inference_mode():  # inference mode also permits writes to inference tensors
        for batch in batches.values():
            channel.broadcast_rows([_make_row(channel.rank, *message) for message in batch])


def _make_row(rank: int, tensor: Any, source: int, size: Size) -> tuple[Any, int, Callable[[], None]]:
    """Return the byte row to broadcast or receive, its source, and the function to call on arrival."""
    torch: Any = sys.modules["torch"]
    length, device_type = size
    device = get_device(device_type)

    def do_nothing() -> None:
        """The row is the tensor's memory, or is discarded."""

    if tensor is None:
        return torch.empty(length, dtype=torch.uint8, device=device), source, do_nothing

    with as_plain_tensors():
        plain = tensor.detach().as_subclass(torch.Tensor)

    # A pending conjugation is only a flag of the tensor, and the row has no flags.
    if rank == source:
        resolved = plain.resolve_conj().resolve_neg().contiguous()
        return as_bytes(resolved).to(device), source, do_nothing

    if plain.device == device and is_c_order(plain):
        return as_bytes(plain), source, do_nothing

    # Tensors on another device or with gaps are set with a copy of the row.
    row = torch.empty(length, dtype=torch.uint8, device=device)

    def copy_to_tensor() -> None:
        plain.copy_(row.view(plain.dtype).view(plain.shape))

    return row, source, copy_to_tensor


def get_device(kind: str) -> Any:
    """Return this process's device of a type."""
    torch: Any = sys.modules["torch"]
    if kind == "cpu":
        return torch.device(kind)

    # Ranks of one machine use different devices, so the number of the sender's device is of no use.
    return torch.device(kind, torch.get_device_module(kind).current_device())
