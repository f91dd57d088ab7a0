"""Megatron-Core checkpoints with whole tensors: folders per model-parallel rank, and distributed checkpoints.

A file of a rank does not show how its tensors are divided. Their names do (megatron/core/tensor_parallel/layers.py):
column-parallel layers and vocabularies divide dimension 0, row-parallel layers dimension 1. A gated first layer of an
MLP stores the rank's parts of gate and up, one after the other. Each pipeline stage numbers its layers, and each
expert-parallel rank its experts, from 0. Distributed checkpoints stack equal tensors of all layers and experts.

With virtual pipeline stages, a file has the state dicts `model0`, `model1`, ... Layers continue from stage to stage
within `model0`, and then within `model1` (get_transformer_layer_offset in megatron/core/transformer).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.layout import views
from syncheck.layout.replica_groups import find_replicated
from syncheck.messages import Refusal
from syncheck.snapshots import MOST_ELEMENTS, Sharding, are_naturals
from syncheck.text import brief, make_unique_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from syncheck.snapshots import Snapshot, Tensor

_LABEL = re.compile(r"mp_rank_(\d+(?:_\d+){0,2})")
_COLUMN = re.compile(
    r"(?:.*\.)?(?:word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_q_up_proj|linear_kv_up_proj"
    r"|linear_fc1)\.(?:weight|bias)"
)
_GATED = re.compile(r".*\.linear_fc1\.(?:weight|bias)")
_ROW = re.compile(r".*\.(?:linear_proj|linear_fc2)\.weight")
_COPIED = re.compile(r"(?:.*\.)?(?:position_embeddings\.weight|(?:q|k)_layernorm\.(?:weight|bias)|linear_fc2\.bias)")
_CHUNK = re.compile(r"model(\d+)\.(.+)")
_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)(\..*)")
_STACKED = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers\.)(?!\d)(.*)")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)\.(.*)|(.*\.mlp\.experts\.)(linear_fc[12]\.\w+?)(\d+)")
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)experts\.(.*)")
# Names in files that contain the norm in the linear layer after it, and in files that do not.
_FUSED = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# Values that describe the run and its layout, and not the model.
_LAYOUT = re.compile(
    r"(?:args|rng_state|content_metadata|rerun_state_machine)(?:\.|$)|(?:.*\.)?_extra_state(?:[./].*)?$"
)
# Limits of layers, of experts in a layer, and of both together.
_MOST_LAYERS, _MOST_SHARDS = 1 << 12, 1 << 20


@dataclass(frozen=True, slots=True)
class _Grid:
    """The ranks of a folder. sizes and at: number and coordinate in pipeline, expert and tensor parallelism."""

    sizes: tuple[int, int, int]
    at: Mapping[str, tuple[int, int, int]]

    def list_ranks(self, stage: int, expert: int | None = None) -> tuple[int, ...]:
        """Return the ranks of a stage, or those with one coordinate in expert parallelism."""
        _, experts, tensors = self.sizes
        chosen = range(experts) if expert is None else [expert]
        return tuple((stage * experts + e) * tensors + t for e in chosen for t in range(tensors))


def split(snapshot: Snapshot) -> dict[int, Snapshot]:
    """Return the files of all ranks of a folder, with layers and experts numbered as in the whole model.

    Tensors get the layout that their names show; a tensor with another name is refused if tensor parallelism can divide
    it. The optimizer numbers its parameters, so its tensors are refused. A folder with another layout (experts with
    their own degree of tensor parallelism) is returned alone. Raises MalformedFile if ranks or layers are missing.
    """
    labels: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in snapshot.tensors.items():
        label, inner = _split_label(name)
        labels[label][inner] = tensor
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in snapshot.values.items():
        label, inner = _split_label(name)
        values[label][inner] = value
    if labels.keys() == {""}:  # a folder with one rank has names without label
        path = next(iter(labels[""].values())).path
        only = os.path.basename(os.path.dirname(path))
        labels, values = {only: labels[""]}, defaultdict(dict, {only: values[""]})
    grid = _find_grid(snapshot, labels, values)
    if grid is None:
        return {0: snapshot}
    first_layers = _number_layers(snapshot, labels, grid)
    experts = _count_experts(labels, grid)
    ranks: dict[int, Snapshot] = {}
    for label, at in sorted(grid.at.items(), key=lambda item: item[1]):
        tensors: dict[str, Tensor] = {}
        replicated = find_replicated(_split_chunk(name)[1] for name in labels[label])
        for name, tensor in labels[label].items():
            full, sharding = _place(name, tensor, at, grid, first_layers, experts, values[label], replicated)
            refused = tensor.refused or (None if sharding else Refusal.UNPLACED_PARTS(layout="tensor parallelism"))
            if full in tensors:  # multi-token prediction stores the embedding of the last stage twice
                full, refused = make_unique_name(full, tensors), Refusal.UNPLACED_PARTS(layout="tensor parallelism")
            tensors[full] = replace(tensor, name=full, sharding=sharding, refused=refused)
        path = next((tensor.path for tensor in tensors.values()), f"{snapshot.path}/{label}")
        kept = {name: value for name, value in values[label].items() if not _LAYOUT.match(name)}
        mesh = dict(zip(("pp", "ep", "tp"), at, strict=True))
        size = sum({t.path: t.opened.st_size for t in tensors.values() if t.opened is not None}.values())
        ranks[len(ranks)] = replace(
            snapshot, path=path, bytes=size, tensors=tensors, values=kept, mesh=mesh, shard_labels=frozenset(), ties=()
        )
    return ranks


def _split_label(name: str) -> tuple[str, str]:
    """Return the label of the rank, and the name in its file."""
    container = "optimizer." if name.startswith("optimizer.") else ""
    label, _, inner = name.removeprefix(container).partition(".")
    return (label, container + inner) if _LABEL.fullmatch(label) else ("", name)


def _find_grid(
    snapshot: Snapshot, labels: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Mapping[str, Any]]
) -> _Grid | None:
    """Return the ranks of a folder, from the arguments of Megatron-LM in each file; None for other layouts."""
    if not labels or not all(map(_LABEL.fullmatch, labels)):
        return None
    found: set[tuple[int, int, int]] = set()
    for name in labels:
        pipeline, expert, tensor = (_read_degree(values[name], kind) for kind in ("pipeline", "expert", "tensor"))
        if _read_degree(values[name], "expert_tensor", tensor) != tensor and expert > 1:
            return None
        found.add((pipeline, expert, tensor))
    if len(found) > 1:
        raise _malformed(snapshot, "args", f"degrees {brief(sorted(found))}", "the files of one run")
    pipeline, expert, tensor = sizes = next(iter(found))
    at = {}
    for name in labels:
        numbers = [int(number) for number in name.removeprefix("mp_rank_").split("_")]
        stage = numbers.pop(1) if pipeline > 1 and len(numbers) > 1 else 0
        at[name] = (stage, numbers[1] if len(numbers) > 1 else 0, numbers[0])
    needed = pipeline * expert * tensor
    fits = all(own < size for place in at.values() for own, size in zip(place, sizes, strict=True))
    if not fits or len({*at.values()}) != needed or len(at) != needed:
        raise _malformed(snapshot, "model-parallel ranks", brief(sorted(at)), f"{needed} ranks")
    return _Grid(sizes, at)


def _read_degree(values: Mapping[str, Any], kind: str, default: int = 1) -> int:
    name = f"args.{kind}_parallel_size" if kind.startswith("expert_") else f"args.{kind}_model_parallel_size"
    degree = values.get(name)
    return degree if degree and are_naturals([degree]) else default


def _malformed(snapshot: Snapshot, place: str, found: str, needed: str) -> MalformedFile:
    again = "copy the folders of all ranks, or save again"
    return MalformedFile(snapshot.path, place=place, found=found, needed=needed, next_step=again)


def _split_chunk(name: str) -> tuple[int, str]:
    """Return the number of the virtual pipeline stage within the rank, and the name without it."""
    match = _CHUNK.fullmatch(name)
    return (int(match[1]), match[2]) if match else (0, name)


def _number_layers(
    snapshot: Snapshot, labels: Mapping[str, Mapping[str, Tensor]], grid: _Grid
) -> dict[tuple[str, int, int], int]:
    """Return the number of the first layer in the whole model, by the name before it, virtual stage and stage."""
    numbers: dict[str, dict[tuple[int, int], set[int]]] = defaultdict(lambda: defaultdict(set))
    chunks: dict[str, set[int]] = defaultdict(set)
    for label, (stage, _, _) in grid.at.items():
        for name in labels[label]:
            chunk, plain = _split_chunk(name)
            chunks[label].add(chunk)
            if match := _LAYER.fullmatch(plain):
                numbers[match[1]][chunk, stage].add(int(match[2]))
    for label, present in chunks.items():
        count = len(set().union(*chunks.values()))
        if present != {*range(count)}:
            raise _malformed(snapshot, f"virtual stages of {label}", brief(sorted(present)), f"{count} from 0 on")
    first = {}
    for start, stages in numbers.items():
        total = 0
        all_numbers = sorted(number for layers in stages.values() for number in layers)
        # Some libraries number the layers of all stages, or the model has one stage.
        are_global = all_numbers == [*range(len(all_numbers))]
        for (chunk, stage), layers in sorted(stages.items()):
            if not are_global and layers != {*range(len(layers))}:
                raise _malformed(snapshot, f"{start}* of stage {stage}", brief(sorted(layers)), "layers from 0 on")
            first[start, chunk, stage] = 0 if are_global else total
            total += len(layers)
    return first


def _count_experts(labels: Mapping[str, Mapping[str, Tensor]], grid: _Grid) -> int:
    """Return the number of experts of one rank in a layer."""
    found = (match for label in grid.at for name in labels[label] if (match := _EXPERT.fullmatch(name)))
    return 1 + max((int(match[2] or match[6]) for match in found), default=0)


def _place(
    name: str, tensor: Tensor, at: tuple[int, int, int], grid: _Grid, first_layers: Mapping[tuple[str, int, int], int],
    experts: int, values: Mapping[str, Any], replicated_names: Collection[str],
) -> tuple[str, Sharding | None]:  # fmt: skip
    """Return the name and the layout in the whole model; no layout for a tensor whose name does not show it."""
    stage, expert, rank = at
    pipeline, degree, tensors = grid.sizes
    if name.startswith("optimizer."):
        return name, None
    chunk, name = _split_chunk(name)
    is_replicated = name in replicated_names
    if match := _LAYER.fullmatch(name):
        name = f"{match[1]}{first_layers[match[1], chunk, stage] + int(match[2])}{match[3]}"
    copied: dict[str, tuple[int, int]] = {"ep": (degree, expert)}  # size and coordinate of dimensions with copies
    ranks = grid.list_ranks(stage)
    tied = pipeline > 1 and values.get("args.untie_embeddings_and_output_weights") is False
    if match := _EXPERT.fullmatch(name):
        start, number, rest = (match[1] or match[4], match[2] or match[6], match[3] or match[5])
        name = f"{start}local_experts.{expert * experts + int(number)}.{rest}"
        copied, ranks = {}, grid.list_ranks(stage, expert)
    elif tied and name in (_EMBEDDING, _OUTPUT):  # the last stage has a copy of the embedding
        name, copied = _EMBEDDING, {"pp": (2, int(stage > 0)), **copied}
        ranks = grid.list_ranks(0) + grid.list_ranks(pipeline - 1)
    shape = list(tensor.shape)
    placement = _find_placement(name, gated=values.get("args.swiglu") is True, replicated=is_replicated)
    if placement is None and tensors > 1:
        return _unfuse(name), None
    if placement not in (None, "R"):
        dim = 1 if placement == "S(1)" else 0
        if dim >= len(shape) or shape[dim] * tensors > MOST_ELEMENTS:
            return _unfuse(name), None
        shape[dim] *= tensors
    mesh, coordinate = zip(*copied.values(), (tensors, rank), strict=True)
    placements = (*["R"] * len(copied), placement or "R")
    return _unfuse(name), Sharding(mesh, ranks, placements, tuple(shape), (*copied, "tp"), coordinate)


def _find_placement(name: str, *, gated: bool, replicated: bool) -> str | None:
    """Return the placement along tensor parallelism, in torch's notation; None if the name does not show it."""
    if _COLUMN.fullmatch(name):
        return "_S(0, 2)" if gated and _GATED.fullmatch(name) else "S(0)"
    if _ROW.fullmatch(name):
        return "S(1)"
    return "R" if replicated or _COPIED.fullmatch(name) else None


def _unfuse(name: str) -> str:
    for fused, plain in _FUSED:
        name = name.replace(fused, plain)
    return name


def unstack(snapshot: Snapshot) -> Snapshot:
    """Return a distributed checkpoint with one tensor for each layer and expert; other checkpoints are unchanged."""
    if not any(_STACKED.fullmatch(name) or _STACKED_EXPERTS.fullmatch(name) for name in snapshot.tensors):
        return snapshot
    tensors: dict[str, Tensor] = {}
    for name, tensor in snapshot.tensors.items():
        for full, part in _unstack_tensor(name, tensor):
            if len(tensors) >= _MOST_SHARDS:
                found = f"more than {_MOST_SHARDS} layers and experts"
                raise MalformedFile(
                    snapshot.path, place=f"tensor {brief(name)}", found=found, needed="a readable layout"
                )
            full = make_unique_name(_unfuse(full), tensors)
            tensors[full] = replace(part, name=full)
    values = {name: value for name, value in snapshot.values.items() if not _LAYOUT.match(name)}
    return replace(snapshot, tensors=tensors, values=values)


def _unstack_tensor(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for pattern, insert in ((_STACKED, ""), (_STACKED_EXPERTS, "local_experts.")):
        match = pattern.fullmatch(name)
        stacked = tensor.shape and tensor.shape[0] <= _MOST_LAYERS and not tensor.refused
        if match and stacked and not name.startswith("optimizer."):
            for i, part in enumerate(views.unstack(tensor)):
                yield from _unstack_tensor(f"{match[1]}{insert}{i}.{match[2]}", part)
            return
    yield name, tensor
