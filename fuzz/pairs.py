"""Random pairs of models on disk: a mutation of one side, a relation of the names, two layouts, and options."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random
from typing import TYPE_CHECKING

import torch

from fuzz import adapter_pairs, layouts
from fuzz.model_mutations import MUTATIONS, STORED, Effect, are_buffers, list_changed
from fuzz.toy_maps import MAPS, render_map
from fuzz.toy_models import Model, Naming, make_model, make_naming

if TYPE_CHECKING:
    from pathlib import Path

KINDS = (*MUTATIONS, *STORED, *adapter_pairs.KINDS)
# Equal pairs are more frequent, because their answer depends on names, layouts and options only.
_DRAWN_KINDS = ("none", "none", *KINDS)
# How the names of B follow from the names of A.
RELATIONS = {"equal": 50, "renamed": 28, "one name": 5, "prefix": 5, "second prefix": 5, "wrapper": 7}
_STYLES = {"plain": 60, "hostile": 25, "llama": 15}
_LAYOUTS = {
    "torch": 25,
    "container": 10,
    "safetensors": 25,
    "huggingface": 12,
    "ranks": 8,
    "stages": 8,
    "shards": 8,
    "dcp": 4,
}
# The layouts that a mutation of files needs.
_NEEDED_LAYOUTS = {
    "optimizer state added": "with optimizer",
    "copy of a rank differs": "ranks",
    "shard missing": "shards",
}
_OPTIONS = ("", "", "", "--only-params", "--subset", "--accept-inferred", "--cast", "--allow", "--map")
_FITTING_MAPS = {"parts exchanged": ("right",), "parts exchanged in a layer": ("right",)}
_STORED_CHANGES = {"optimizer state added": "optimizer"}
# No rows, and another shape than any part.
_MISSING = torch.empty(0)
_WRAPPERS = ("module.", "_orig_mod.", "module._orig_mod.")
_CASTS = ("bfloat16", "float16", "float32", "float64")
_CODES = ("SYN101", "SYN220", "SYN304", "SYN305", "SYN306", "SYN307", "SYN309", "SYN311", "SYN312", "SYN313", "SYN318")


@dataclass(frozen=True)
class Options:
    """The options of the command.

    flags: such as --only-params.
    cast: a dtype, or None.
    allow: a code, or None.
    map: one of MAPS, or None.
    """

    flags: frozenset[str] = frozenset()
    cast: str | None = None
    allow: str | None = None
    map: str | None = None

    def list_arguments(self, map_path: str) -> list[str]:
        """Return the arguments of the command line."""
        path = map_path if self.map else None
        values = {"--cast": self.cast, "--allow": self.allow, "--map": path}
        arguments = sorted(self.flags)
        # A fixed order, so that equal options are one group in the summary.
        for name, value in values.items():
            if value is not None:
                arguments += [name, value]
        return arguments


@dataclass
class Pair:
    """A pair of models, and everything that the oracle knows about it.

    kind: the mutation.
    relation: how the names of B follow from those of A.
    style: of the names.
    layouts: of A and B.
    effect: what the mutation did.
    change: what differs: nothing, buffers, optimizer, cast or values.
    mutated_side: A or B.
    options: of the command.
    arguments: all arguments of the command line.
    is_ambiguous: whether several roles have equal data, so that names of a renamed model may be undetermined.
    is_fused: whether a library stores several parts in one tensor.
    """

    kind: str
    relation: str = "equal"
    style: str = "plain"
    layouts: list[str] = field(default_factory=list)
    effect: Effect = field(default_factory=Effect)
    change: str = "values"
    mutated_side: str = "B"
    options: Options = field(default_factory=Options)
    arguments: list[str] = field(default_factory=list)
    is_ambiguous: bool = False
    is_fused: bool = False


def make_pair(seed: int, number: int, folder: Path, *, flags: frozenset[str]) -> Pair:
    """Write the pair with this number to an empty folder. Each number has its own random stream.

    flags: the flags of this version of syncheck.
    """
    random = Random(f"diff {seed} {number}")
    # The makers of tensors use torch's global generator.
    torch.manual_seed(random.randrange(1 << 31))
    kind = random.choice(_DRAWN_KINDS)
    if kind in adapter_pairs.KINDS:
        # Adapters have names and layouts of their own.
        sides = adapter_pairs.write(random, kind, folder)
        change = "nothing" if kind == "merged adapter" else "values"
        return Pair(kind, layouts=["adapter", "safetensors"], change=change, arguments=["diff", "--no-config", *sides])
    pair = _draw_pair(random, kind)
    models = _make_models(random, pair)
    namings = _make_namings(random, pair, models)
    pair.options = _draw_options(random, pair, flags)
    map_path = folder / "map.toml"
    if pair.options.map is not None:
        map_path.write_text(render_map(models[0], namings, pair.options.map), encoding="utf-8")
    sides = _write_sides(random, pair, models, namings, folder)
    pair.arguments = ["diff", "--no-config", *pair.options.list_arguments(str(map_path)), *sides]
    return pair


def _draw_pair(random: Random, kind: str) -> Pair:
    """Draw the names and layouts. The layouts are of the intact and the mutated side."""
    drawn = random.choices(list(_LAYOUTS), list(_LAYOUTS.values()), k=2)
    drawn[1] = _NEEDED_LAYOUTS.get(kind, drawn[1])
    relation = random.choices(list(RELATIONS), list(RELATIONS.values()))[0]
    style = random.choices(list(_STYLES), list(_STYLES.values()))[0]
    return Pair(kind, relation, style, drawn, mutated_side=random.choice("AB"))


def _make_models(random: Random, pair: Pair) -> tuple[Model, Model]:
    """Return the intact and the mutated model."""
    intact = make_model(random)
    if pair.kind == "tied copies differ":
        intact.is_tied = True
        intact.tensors["head.weight", None] = intact.tensors["embed.weight", None]
    mutated = intact.copy()
    # A mutation of the files may leave the models equal.
    pair.change = _STORED_CHANGES.get(pair.kind, "values")
    mutate = MUTATIONS.get(pair.kind)
    if mutate is not None:
        pair.effect = mutate(random, mutated)
        if pair.effect.is_on_both:
            intact = mutated.copy()
        pair.change = _describe_change(pair, intact, mutated)
    pair.is_ambiguous = intact.is_fresh or intact.is_tied
    return intact, mutated


def _describe_change(pair: Pair, intact: Model, mutated: Model) -> str:
    """Return what differs. A mutation may have no effect, such as an exchange of equal tensors."""
    roles = list_changed(intact, mutated)
    # By the bytes of the models, whatever the mutation intended.
    if not roles:
        return "nothing"
    if are_buffers(roles):
        return "buffers"
    if pair.effect.cast is not None:
        return "cast"
    return "values"


def _make_namings(random: Random, pair: Pair, models: tuple[Model, Model]) -> tuple[Naming, Naming]:
    """Return the names of the intact and the mutated side."""
    first = make_naming(random, models[0], pair.style)
    second = first
    second_style = pair.style.replace("llama", "plain")
    names = set(first.templates.values())
    # A name that both libraries use for different parts would need a map for each side.
    while pair.relation == "renamed" and names & set(second.templates.values()):
        second = make_naming(random, models[0], second_style)
    if pair.relation == "second prefix":
        first = replace(first, prefix="model.")
    prefixes = {"prefix": "model.", "second prefix": "model.model.", "wrapper": random.choice(_WRAPPERS)}
    second = replace(second, prefix=prefixes.get(pair.relation, ""))
    fused = {**first.fused, **second.fused}
    pair.is_fused = bool(fused)
    for model in models:
        if not _can_fuse(model, fused):
            pair.is_fused = False
            first, second = replace(first, fused={}), replace(second, fused={})
    return first, second


def _can_fuse(model: Model, fused: dict[str, tuple[str, ...]]) -> bool:
    """Whether the parts of each fused tensor are complete and fit into one tensor."""
    for parts, layer in product(fused.values(), range(model.layers)):
        tensors = [model.tensors.get((part, layer), _MISSING) for part in parts]
        shapes = {tensor.shape[1:] for tensor in tensors}
        if len(shapes) > 1:
            return False
    return True


def _draw_options(random: Random, pair: Pair, flags: frozenset[str]) -> Options:
    """Return random options; the conversion and the map fit the pair more often than not."""
    cast = random.choice((pair.effect.cast, random.choice(_CASTS)))
    code = random.choice(_CODES)
    # An exchange of parts may cancel the mistake in a wrong map.
    map_kind = random.choice(_FITTING_MAPS.get(pair.kind, ("right", *MAPS)))
    name = random.choice(_OPTIONS)
    choices = {"--cast": Options(cast=cast), "--allow": Options(allow=code)}
    for flag in flags:
        choices[flag] = Options(frozenset({flag}))
    if "--accept-inferred" in flags:
        # The map of a converted model needs the conversion too.
        choices["--accept-inferred"] = Options(frozenset({"--accept-inferred"}), cast=pair.effect.cast)
    # Templates have braces, so a map of hostile names needs escapes that this program does not know.
    can_map = pair.style != "hostile"
    if pair.relation == "renamed" and can_map:
        choices["--map"] = Options(cast=pair.effect.cast, map=map_kind)
    return choices.get(name, Options())


def _write_sides(
    random: Random, pair: Pair, models: tuple[Model, Model], namings: tuple[Naming, Naming], folder: Path
) -> list[str]:
    """Write both sides, and return the paths of A and B."""
    by_name = [naming.name_tensors(model) for naming, model in zip(namings, models, strict=True)]
    _change_names(random, pair, by_name[1])
    order = [0, 1]
    if pair.mutated_side == "A":
        # The mutated model comes first.
        order.reverse()
        pair.layouts.reverse()
    sides = []
    for side, layout, index in zip("ab", pair.layouts, order, strict=True):
        write = layouts.LAYOUTS[layout]
        sides.append(write(folder, side, by_name[index], models[index]))
    _change_file(random, pair, folder)
    return sides


def _change_names(random: Random, pair: Pair, tensors: dict[str, torch.Tensor]) -> None:
    """Add or rename a tensor of the mutated side."""
    # Two names of a tied tensor may stand for each other.
    names = _list_untied(tensors)
    name = random.choice(names)
    if pair.kind == "tensor duplicated":
        tensors[f"{name}_copy"] = tensors[name].clone()
    if pair.relation == "one name":
        tensors[f"{name}.moved"] = tensors.pop(name)


def _list_untied(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors with a memory of their own."""
    uses = Counter(tensor.data_ptr() for tensor in tensors.values())
    return [name for name, tensor in tensors.items() if uses[tensor.data_ptr()] == 1]


def _change_file(random: Random, pair: Pair, folder: Path) -> None:
    """Change or remove the file of the last rank of the mutated side."""
    side = pair.mutated_side.lower()
    path = folder / f"{side}_rank{layouts.RANKS - 1}.pth"
    if pair.kind == "shard missing":
        path.unlink()
    if pair.kind == "copy of a rank differs":
        tensors = torch.load(path, weights_only=True)
        floats = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        name = random.choice(floats)
        # Not in place, because a tied tensor would change with both names.
        tensors[name] = tensors[name] + 1
        torch.save(tensors, path)
