"""Mutations of one of two equal models, each with what the oracle knows about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fuzz.toy_models import BUFFERS, cast_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from fuzz.toy_models import Model, Role

# Findings that may describe any difference of values or of the set of tensors.
ANY_DIFFERENCE = frozenset("SYN101 SYN102 SYN220 SYN221 SYN240 SYN299 SYN301 SYN302 SYN308 SYN311 SYN399".split())


@dataclass(frozen=True)
class Effect:
    """What a mutation did.

    codes: the findings that may describe it, besides ANY_DIFFERENCE; `--allow` of these may accept it.
    is_consistent: whether one rule for all layers may describe it, so that an inferred map may contain it.
    cast: the dtype of the copy, if the mutation is exactly one conversion.
    is_on_both: whether both models get the same mutation, so that they are equal.
    """

    codes: frozenset[str] = frozenset()
    is_consistent: bool = False
    cast: str | None = None
    is_on_both: bool = False


_EXCHANGED = frozenset({"SYN305", "SYN306", "SYN313"})
_TRANSPOSED = frozenset({"SYN304"})
_RESIZED = frozenset({"SYN309", "SYN318"})


def _choose_matrix(random: Random, model: Model) -> Role:
    """Return the role of a matrix."""
    return random.choice([role for role, tensor in model.tensors.items() if tensor.ndim == 2])


def _choose_floats(random: Random, model: Model) -> Role:
    """Return the role of a floating-point tensor."""
    return random.choice([role for role, tensor in model.tensors.items() if tensor.is_floating_point()])


def _choose_layers(random: Random, model: Model) -> tuple[int, int]:
    first, second = random.sample(range(model.layers), 2)
    return first, second


def keep(_: Random, __: Model) -> Effect:
    """Change nothing."""
    return Effect(is_on_both=True)


def cut_rows(random: Random, model: Model) -> Effect:
    """Remove rows at the end of a matrix, or at its start."""
    role = _choose_matrix(random, model)
    tensor = model.tensors[role]
    count = random.randrange(1, tensor.shape[0])
    # More often at the end, where padding would be.
    rows = random.choice((tensor[:-count], tensor[:-count], tensor[count:]))
    model.tensors[role] = rows.clone()
    return Effect(_RESIZED)


def add_rows(random: Random, model: Model) -> Effect:
    """Add rows at the end of a matrix: random, zero, or copies of its rows."""
    role = _choose_matrix(random, model)
    tensor = model.tensors[role]
    count = random.randrange(1, tensor.shape[0] + 1)
    rows = random.choice((torch.randn_like(tensor), torch.zeros_like(tensor), tensor))[:count]
    model.tensors[role] = torch.cat([tensor, rows])
    return Effect(_RESIZED)


def _choose_equal_shapes(random: Random, model: Model) -> tuple[str, str]:
    """Return two parts of a layer with equal shapes."""
    pairs = [("gate.weight", "up.weight"), ("k.weight", "v.weight"), ("q.weight", "o.weight")]
    if model.tensors["q.weight", 0].shape == model.tensors["k.weight", 0].shape:
        pairs.append(("q.weight", "k.weight"))
    return random.choice(pairs)


def _exchange(model: Model, first: Role, second: Role) -> None:
    # By role, so that tied tensors stay unchanged.
    tensors = model.tensors
    tensors[first], tensors[second] = tensors[second], tensors[first]


def exchange_parts_once(random: Random, model: Model) -> Effect:
    """Exchange two parts of one layer, such as gate and up."""
    first, second = _choose_equal_shapes(random, model)
    layer = random.randrange(model.layers)
    _exchange(model, (first, layer), (second, layer))
    return Effect(_EXCHANGED)


def exchange_parts(random: Random, model: Model) -> Effect:
    """Exchange two parts of every layer."""
    first, second = _choose_equal_shapes(random, model)
    for layer in range(model.layers):
        _exchange(model, (first, layer), (second, layer))
    return Effect(_EXCHANGED, is_consistent=True)


def exchange_layers(random: Random, model: Model) -> Effect:
    """Exchange two layers."""
    first, second = _choose_layers(random, model)
    # All parts, so that each layer is complete and only its number is wrong.
    for part, layer in list(model.tensors):
        if layer == first:
            _exchange(model, (part, first), (part, second))
    # The reverse order of all layers is one rule.
    is_reversed = first + second == model.layers - 1 and model.layers <= 3
    return Effect(_EXCHANGED, is_consistent=is_reversed)


def exchange_part_of_layers(random: Random, model: Model) -> Effect:
    """Exchange one part of two layers."""
    first, second = _choose_layers(random, model)
    part = random.choice(("q.weight", "v.weight", "down.weight", "up.weight"))
    _exchange(model, (part, first), (part, second))
    return Effect(_EXCHANGED)


def repeat_layer(random: Random, model: Model) -> Effect:
    """Give one layer the content of another layer."""
    first, second = _choose_layers(random, model)
    for part, layer in list(model.tensors):
        if layer == first:
            model.tensors[part, first] = model.tensors[part, second].clone()
    return Effect(_EXCHANGED)


def transpose_once(random: Random, model: Model) -> Effect:
    """Transpose one matrix."""
    role = _choose_matrix(random, model)
    model.tensors[role] = model.tensors[role].t().contiguous()
    return Effect(_TRANSPOSED, is_consistent=role[1] is None)


def transpose_all(_: Random, model: Model) -> Effect:
    """Transpose every matrix in the layers."""
    for role, tensor in list(model.tensors.items()):
        if tensor.ndim == 2 and role[1] is not None:
            model.tensors[role] = tensor.t().contiguous()
    return Effect(_TRANSPOSED, is_consistent=True)


def scale_once(random: Random, model: Model) -> Effect:
    """Multiply one tensor."""
    role = _choose_floats(random, model)
    # Most factors are exact in binary, so that the product is not rounded.
    model.tensors[role] = model.tensors[role] * random.choice((2, 0.5, -1, 1.25))
    return Effect(frozenset({"SYN312"}))


def scale_all(random: Random, model: Model) -> Effect:
    """Multiply all floating-point tensors."""
    factor = random.choice((2, 0.5, 1.25))
    for role, tensor in list(model.tensors.items()):
        if tensor.is_floating_point():
            model.tensors[role] = tensor * factor
    return Effect(frozenset({"SYN312"}))


def cast_all(random: Random, model: Model) -> Effect:
    """Convert all floating-point tensors to another dtype."""
    before = model.tensors["q.weight", 0].dtype
    dtypes = {torch.float32, torch.bfloat16, torch.float16, torch.float64} - {before}
    dtype = random.choice(sorted(dtypes, key=str))
    cast_model(model, dtype)
    return Effect(frozenset({"SYN307"}), cast=str(dtype).removeprefix("torch."))


def put_nonfinite(random: Random, model: Model) -> Effect:
    """Put NaN or infinity into one element."""
    role = _choose_floats(random, model)
    tensor = model.tensors[role].clone()
    tensor.view(-1)[random.randrange(tensor.numel())] = random.choice((float("nan"), float("inf"), float("-inf")))
    model.tensors[role] = tensor
    return Effect()


def put_nonfinite_on_both(random: Random, model: Model) -> Effect:
    """Put the same NaN into both models."""
    # The caller copies the model.
    put_nonfinite(random, model)
    return Effect(is_on_both=True)


def flip_bit(random: Random, model: Model) -> Effect:
    """Flip one bit of an element that is not 0, so that the value changes."""
    role = _choose_floats(random, model)
    tensor = model.tensors[role].clone()
    if not tensor.count_nonzero():
        # The sign of 0 is no difference of values. The tensor differs already.
        tensor += 1
    flat = tensor.view(-1)
    element = random.choice(flat.nonzero().view(-1).tolist())
    data = flat[element : element + 1].view(torch.uint8)
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    model.tensors[role] = tensor
    return Effect()


def exchange_rows(random: Random, model: Model) -> Effect:
    """Exchange two rows of a matrix."""
    role = _choose_matrix(random, model)
    order = list(range(model.tensors[role].shape[0]))
    first, second = random.sample(order, 2)
    order[first], order[second] = second, first
    model.tensors[role] = model.tensors[role][order]
    return Effect(_EXCHANGED)


def drop_tensor(random: Random, model: Model) -> Effect:
    """Remove a tensor that is not tied."""
    # A library may drop one copy of a tied tensor, so this is no difference in some formats.
    tied = [("embed.weight", None), ("head.weight", None)]
    roles = [role for role in model.tensors if role not in tied]
    del model.tensors[random.choice(roles)]
    return Effect()


def untie(random: Random, model: Model) -> Effect:
    """Change one copy of a tied tensor."""
    role = random.choice((("embed.weight", None), ("head.weight", None)))
    tensor = model.tensors[role].clone()
    tensor[random.randrange(tensor.shape[0])] += 1
    model.tensors[role] = tensor
    # One copy still has the data of the other name.
    return Effect(_EXCHANGED)


MUTATIONS: dict[str, Callable[[Random, Model], Effect]] = {
    "none": keep,
    "rows cut": cut_rows,
    "rows added": add_rows,
    "parts exchanged in a layer": exchange_parts_once,
    "parts exchanged": exchange_parts,
    "layers exchanged": exchange_layers,
    "part exchanged between layers": exchange_part_of_layers,
    "layer repeated": repeat_layer,
    "one transposed": transpose_once,
    "all transposed": transpose_all,
    "one scaled": scale_once,
    "all scaled": scale_all,
    "cast": cast_all,
    "NaN": put_nonfinite,
    "NaN on both sides": put_nonfinite_on_both,
    "bit flipped": flip_bit,
    "rows exchanged": exchange_rows,
    "tensor dropped": drop_tensor,
    "tied copies differ": untie,
}
# Mutations of the stored files instead of the model; fuzz/pairs.py applies them.
STORED = ("tensor duplicated", "optimizer state added", "copy of a rank differs", "shard missing")


def list_changed(first: Model, second: Model) -> list[Role]:
    """Return the roles with different bytes, shapes or dtypes, or on one side only."""
    roles = dict.fromkeys((*first.tensors, *second.tensors))
    changed = []
    for role in roles:
        a, b = first.tensors.get(role), second.tensors.get(role)
        if a is None or b is None or not _is_equal(a, b):
            changed.append(role)
    return changed


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal dtypes, shapes and bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    # Bytes, because NaN differs from itself, and -0.0 equals 0.0.
    first_bytes = a.contiguous().view(-1).view(torch.uint8)
    second_bytes = b.contiguous().view(-1).view(torch.uint8)
    return torch.equal(first_bytes, second_bytes)


def are_buffers(roles: list[Role]) -> bool:
    """Whether there are roles, and all are buffers, which --only-params omits."""
    parts = {part for part, _ in roles}
    return bool(parts) and parts <= set(BUFFERS)
