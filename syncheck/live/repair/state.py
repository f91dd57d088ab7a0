"""Read and write this rank's tensors and values by the names of a report, and broadcast tensors in place."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.digest.parts import as_bytes, as_plain_tensors, is_c_order, is_torch
from syncheck.live.memory import snapshot
from syncheck.live.memory.objects import EXTRA_STATE, has_extra_state, is_module, is_optimizer
from syncheck.live.memory.tensor_bytes import TensorBytes
from syncheck.live.memory.tree import Tree, get_local_optimizer, get_prefix, name_parts
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        holders = dict(_find_holders(parts))
        # Reports list tensors without wrapper prefixes, and values with prefixes. `normalize` takes tensor names only,
        # so each object gets a tensor named x.
        within = [f"{name}.x" for name in holders if name.startswith("optimizer.") or name.endswith(EXTRA_STATE)]
        plain = normalize([*replica.tensors, *within])
        self._holders = {plain[name].removesuffix(".x"): holders[name.removesuffix(".x")] for name in within} | holders

    def find_tensor(self, name: str, *, writable: bool = False) -> Any:
        """Return a live tensor by name. Raises UsageError if its bytes cannot be read, or written."""
        tensor = self._tensors.get(name)
        if tensor is None or not isinstance(tensor.data, TensorBytes):
            raise UsageError(f"{name} has no bytes to copy ({getattr(tensor, 'refused', None) or 'not in memory'})")
        source = tensor.data.source
        if not is_torch(source):
            if writable and not source.flags.writeable:
                raise UsageError(f"{name} is a read-only array; call copy() on all ranks")
            return sys.modules["torch"].from_numpy(source if source.flags.writeable else source.copy())
        if writable and any(step == 0 and size > 1 for size, step in zip(source.shape, source.stride(), strict=True)):
            raise UsageError(
                f"{name} has elements that share memory, like the result of expand(); call clone() on all ranks"
            )
        return source

    def find_entry(self, name: str) -> str:
        """Return the name of the whole entry; for an element of a list, the name of the list."""
        keys = list(self._split(name)[0])
        return f"{self.find_holder(name)}.{keys[0]}" if keys else name

    def dump_entry(self, name: str) -> bytes:
        """Serialize the entry with this name, or an empty dict if there is none."""
        file = io.BytesIO()
        # Cloned, because torch.save writes the whole storage of a view, for example a flat buffer.
        entry = {k: v.detach().clone() if is_torch(v) else v for k, v in self._split(name)[0].items()}
        sys.modules["torch"].save(entry, file)
        return file.getvalue()

    def load_entry(self, name: str, data: bytes) -> None:
        """Replace an entry by the source's. Tensors go to this process's device of the same type."""
        torch: Any = sys.modules["torch"]

        def located(storage: Any, device: str) -> Any:
            return torch.serialization.default_restore_location(storage, str(get_device(device.partition(":")[0])))

        with torch.inference_mode(mode=False):  # inference tensors cannot be trained
            # Unpickling is safe like all messages: the ranks of a group run one program and trust each other.
            entries = torch.load(io.BytesIO(data), map_location=located, weights_only=False)
        _, write = self._holders[self.find_holder(name)]
        write(self._split(name)[1] | entries)

    def _split(self, name: str) -> tuple[Entries, Entries]:
        """Return the entry with this name, if any, and all other entries of the same object."""
        at = self.find_holder(name)
        entries = self._holders[at][0]()
        own = {key for key in entries if at.endswith(EXTRA_STATE) or f"{name}.".startswith(f"{at}.{key}.")}
        return {k: v for k, v in entries.items() if k in own}, {k: v for k, v in entries.items() if k not in own}

    def find_holder(self, name: str) -> str:
        """Return the name of the object that holds a value. Raises UsageError if there is none."""
        at = name
        while at and at not in self._holders:
            at = at.rpartition(".")[0]
        if not at:
            raise UsageError(
                f"{name} differs, but resync cannot set it, because no optimizer, scaler or other object with "
                "load_state_dict() on this rank holds it; set it to the same value on all ranks, or load a checkpoint, "
                "and call resync again"
            )
        return at


def _find_holders(parts: tuple[Any, ...]) -> Iterator[tuple[str, Holder]]:
    """Yield the objects with values of a replica, with the prefix of their values' names."""
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
                # At each step, ZeroRedundancyOptimizer copies values from its own groups to the inner groups.
                yield f"{at}.param_groups.{i}", _hold_groups(group, part.param_groups[i])
                called = group.get("param_names") or [names.get(id(p), "") for p in group["params"]]
                for parameter, of in zip(group["params"], called, strict=False):
                    if not hasattr(parameter, "placements"):  # the state of a DTensor cannot be sent alone
                        yield f"{at}.{of}", _hold_state(own.state, parameter)
        elif hasattr(part, "load_state_dict"):
            yield name, (part.state_dict, part.load_state_dict)


def _hold_extra_state(module: Any) -> Holder:
    return lambda: {"": module.get_extra_state()}, lambda entries: module.set_extra_state(entries[""])


def _hold_groups(*groups: Entries) -> Holder:
    """Return a parameter group as a holder. Reads the first of the groups, and sets all."""
    members = {"params", "param_names"}

    def write(entries: Entries) -> None:
        for group in groups:  # in place, because schedulers refer to the dicts
            for key in group.keys() - entries.keys() - members:
                del group[key]
            group.update(entries)

    return lambda: {key: value for key, value in groups[0].items() if key not in members}, write


def _hold_state(states: Any, parameter: Any) -> Holder:
    def write(entries: Entries) -> None:
        states.pop(parameter, None)  # without state, the optimizer initializes it
        states.update({parameter: entries} if entries else {})

    return lambda: states.get(parameter, {}), write


def get_size(tensor: Any, group: Any) -> Size:
    """Return the bytes of a tensor, and the device type to send them from."""
    pairs = sys.modules["torch.distributed"].get_backend_config(group).split(",")
    known = [pair.partition(":")[0] for pair in pairs]
    return tensor.nbytes, tensor.device.type if tensor.device.type in known else known[0]  # NCCL sends no CPU tensors


def broadcast_tensors(channel: Channel, tensors: Sequence[tuple[Any, int, Size]]) -> None:
    """Overwrite tensors with the bytes of other ranks.

    A collective call. tensors: equally many on all ranks, each with its source and the size there; None on ranks that
    discard the bytes. All ranks receive every tensor, so no order of sends and receives can deadlock. A rank reports
    its failure before the next batch, and all ranks raise.
    """
    batches: dict[int, list[Any]] = {}
    total = 0
    for sent in tensors:
        batches.setdefault(total // BATCH, []).append(sent)
        total += sent[2][0]
    with sys.modules["torch"].inference_mode():  # inference mode also permits writes to inference tensors
        for batch in batches.values():
            channel.broadcast_rows([_make_row(channel.rank, *sent) for sent in batch if sent[2][0]])


def _make_row(rank: int, tensor: Any, source: int, size: Size) -> tuple[Any, int, Callable[[], None]]:
    """Return the byte row to broadcast or receive, its source, and the function to call on arrival."""
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
