"""LoRA adapters: the weights of a base model with an adapter, and whether another model is their merge.

The merged weight is W + scale * B @ A, with scale = alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA
(peft/tuners/lora/layer.py). Names and settings are those of PEFT. Weights are computed block by block.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

from syncheck.conversion.name_maps import read_json
from syncheck.conversion.recognition import is_readable, read_pairs
from syncheck.dtypes import DTYPES
from syncheck.messages import Refusal
from syncheck.snapshots import Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.kernel.blocks import Files

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.*)\.lora_(A|B)(?:\.(?!weight)[^.]+)?\.weight")
_SAVED = re.compile(r"(.*)\.modules_to_save\.[^.]+\.(.*)")
# Parts of other kinds of adapters, whose product is computed in another way.
_OTHER = re.compile(
    r"(.*)\.lora_(?:magnitude_vector|embedding_[AB])(?:\..*)?|(.*)\.(?:ia3_l|hada_w|lokr_w|oft_|boft_).*"
)
# B's scale may differ from the adapter's by this share, and by so many standard deviations of rounding.
_SHARE, _SIGMAS = 0.02, 6.0
# Limit of the elements of a factor, which is read as a whole: 64 MB as float64.
_MOST_FACTOR = 1 << 23


@dataclass(frozen=True, slots=True)
class Merged:
    """The bytes of a base weight plus its adapter's product, in the dtype of the weight.

    base: (rows, columns). down: lora_A, (r, columns). up: lora_B, (rows, r). With `transposed` (fan_in_fan_out), the
    product is transposed.
    """

    base: Tensor
    down: Tensor
    up: Tensor
    scale: float
    transposed: bool
    files: Files

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.base.shape

    def product(self, start: int, count: int) -> tuple[Any, Any]:
        """Return the scaled product of elements `start` to `start + count` in float64, and a bound of its terms."""
        import numpy as np

        from syncheck.differences import read_float64

        columns = self.base.shape[1]
        first, last = start // columns, -(-(start + count) // columns)
        left, right = (self.down, self.up) if self.transposed else (self.up, self.down)
        rank = self.down.shape[0]
        slot = -get_ident()
        if self.transposed:
            rows = read_float64(left, self.files, 0, left.numel, slot).reshape(rank, -1)[:, first:last].T
            other = read_float64(right, self.files, 0, right.numel, slot).reshape(-1, rank).T
        else:
            rows = read_float64(left, self.files, first * rank, (last - first) * rank, slot).reshape(-1, rank)
            other = read_float64(right, self.files, 0, right.numel, slot).reshape(rank, -1)
        cut = slice(start - first * columns, start - first * columns + count)
        delta = self.scale * (rows @ other).reshape(-1)[cut]
        terms = abs(self.scale) * (np.abs(rows) @ np.abs(other)).reshape(-1)[cut]
        return delta, terms

    def __getitem__(self, part: slice) -> bytes:
        import numpy as np

        from syncheck.differences import read_float64

        row = DTYPES[self.base.dtype]
        start, stop = part.start // row.size, part.stop // row.size
        step = max(1, (1 << 18) // self.base.shape[1]) * self.base.shape[1]
        blocks = []
        for at in range(start, stop, step):
            count = min(step, stop - at)
            weight = read_float64(self.base, self.files, at, count, -get_ident())
            total = weight + self.product(at, count)[0]
            with np.errstate(all="ignore"):
                blocks.append((total.astype(np.float32) if row.size < 4 else total).astype(row.dtype()).tobytes())
        return b"".join(blocks)


def merge_adapters(
    tensors: Mapping[str, Tensor], other: Mapping[str, Tensor], folders: Sequence[str], files: Files
) -> Mapping[str, Tensor]:
    """Return the tensors of a base model with an adapter, merged; other models are returned unchanged.

    other: the other model. Two models with adapters are compared as they are stored. folders: may contain
    adapter_config.json. A weight with an adapter of another kind, or with an unknown scale, is refused.
    """
    adapted = [any(_is_part(name) for name in model) for model in (tensors, other)]
    if adapted != [True, False]:
        return tensors
    configs = [read_json(os.path.join(folder, "adapter_config.json")) for folder in folders]
    config = next(filter(None, configs), {})
    merged: dict[str, Tensor] = {}
    factors: dict[str, dict[str, Tensor]] = {}
    unknown: set[str] = set()
    for stored, tensor in tensors.items():
        name = stored.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if match := _FACTOR.fullmatch(name):
            factors.setdefault(match[1], {})[match[2]] = tensor
        elif match := _OTHER.fullmatch(name):
            unknown.add(match[1] or match[2])
        elif match := _SAVED.fullmatch(name):
            merged[f"{match[1]}.{match[2]}"] = tensor
        elif ".original_module." in name:
            merged.setdefault(name.replace(".original_module.", "."), tensor)
        elif stored.startswith(_PREFIX) or name not in merged:  # the adapter replaces modules_to_save
            merged[name] = tensor
    for module, pair in factors.items():
        name = f"{module}.weight"
        base = merged.get(name)
        if base is None:  # an adapter without its base model keeps its names
            merged |= {f"{module}.lora_{letter}.weight": tensor for letter, tensor in pair.items()}
            continue
        scale = None if module in unknown or config.get("use_dora") else _find_scale(module, pair, config)
        transposed = config.get("fan_in_fan_out") is True
        if scale is None or not _fits(base, pair, transposed=transposed):
            merged[name] = replace(base, refused=Refusal.ADAPTER())
            continue
        data = Merged(base, pair["A"], pair["B"], scale, transposed, files)
        merged[name] = Tensor(name, base.dtype, base.shape, contiguous_strides(base.shape), base.path, 0, data=data)
    for name in {f"{module}.weight" for module in unknown} & merged.keys():
        merged[name] = replace(merged[name], refused=Refusal.ADAPTER())
    return {name: replace(tensor, name=name) for name, tensor in merged.items()}


def _is_part(name: str) -> bool:
    """Whether a tensor is a part of an adapter."""
    return bool(_FACTOR.fullmatch(name) or _OTHER.fullmatch(name))


def _find_scale(module: str, pair: Mapping[str, Tensor], config: Mapping[str, Any]) -> float | None:
    """Return the scale of an adapter's product, None if it is unknown."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern")
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        # As in PEFT, a pattern is the end of a module's name.
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
    rank = pair["A"].shape[0] if "A" in pair and pair["A"].shape else 0
    if not isinstance(alpha, (int, float)) or not rank:
        return None
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _fits(base: Tensor, pair: Mapping[str, Tensor], *, transposed: bool) -> bool:
    """Whether the tensors are matrices of numbers with matching shapes."""
    if not {"A", "B"} <= pair.keys() or not all(is_readable(tensor) for tensor in (base, *pair.values())):
        return False
    if max(tensor.numel for tensor in pair.values()) > _MOST_FACTOR:
        return False
    shapes = [pair["B"].shape, pair["A"].shape, base.shape[::-1] if transposed else base.shape]
    return all(len(shape) == 2 for shape in shapes) and shapes[2] == (shapes[0][0], shapes[1][1])


def compare_merge(merged: Merged, other: Tensor, files: Files) -> tuple[bool, float]:
    """Return whether a tensor is a merge within rounding, and its factor of the adapter's product.

    The bound of an element: the product is computed in float32 or better and rounded to the dtype of the weight, and so
    is the sum. A bfloat16 weight is rounded by more than many adapters add, so the factor, computed by least squares
    from all elements, must be 1 as well. It is NaN if rounding hides the adapter.
    """
    import numpy as np

    from syncheck.kernel.blocks import ranges

    unit = max(unit_roundoff(tensor.dtype) for tensor in (merged.base, other))
    rank = merged.down.shape[0]
    within, products, squares, weights = True, 0.0, 0.0, 0.0
    blocks = ranges([max(merged.base, other, key=lambda tensor: DTYPES[tensor.dtype].size)])
    for (start, count), (weight, y) in zip(blocks, read_pairs(merged.base, other, files), strict=True):
        delta, terms = merged.product(start, count)
        bound = unit * (2 * np.abs(delta) + 1.01 * np.abs(weight + delta)) + (rank + 4) * 2.0**-24 * terms + 1e-38
        within = within and bool((np.abs(y - weight - delta) <= bound).all())
        products += float((y - weight) @ delta)
        squares += float(delta @ delta)
        weights += float(weight @ weight)
    if not squares:
        return within, 1.0
    factor, noise = products / squares, _SIGMAS * unit * math.sqrt(weights / squares / merged.base.numel)
    if noise > 0.5:
        return False, math.nan
    return within and abs(factor - 1) <= _SHARE + noise, factor


def unit_roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype: half the distance between 1 and the next number."""
    bits = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
    return 2.0 ** -bits.get(dtype, 2)
