"""Megatron-Core checkpoints with whole tensors: folders per model-parallel rank, and distributed checkpoints.

A file of a rank does not show how its tensors are divided. Their names do (megatron/core/tensor_parallel/layers.py):
column-parallel layers and vocabularies divide dimension 0, row-parallel layers dimension 1. A gated first layer of an
MLP stores the rank's parts of gate and up, one after the other. Each pipeline stage numbers its layers, and each
expert-parallel rank its experts, from 0. Distributed checkpoints stack equal tensors of all layers and experts.

With virtual pipeline stages, a file has the state dicts `model0`, `model1`, ... Layers continue from stage to stage
within `model0`, and then within `model1` (get_transformer_layer_offset in megatron/core/transformer).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import MalformedFile
from syncheck.layout import views
from syncheck.layout.replica_groups import find_replicated
from syncheck.messages import Refusal
from syncheck.snapshots import MOST_ELEMENTS, Sharding, are_naturals
from syncheck.text import brief, make_unique_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


class _Position(NamedTuple):
    """Numbers or coordinates in pipeline, expert and tensor parallelism."""

    stage: int
    expert: int
    tensor: int


@dataclass(slots=True)
class _RankFile:
    """The contents of the file of one rank."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The ranks of a folder.

    sizes: the number of ranks in each kind of parallelism.
    positions: the coordinates of each file, by label.
    """

    sizes: _Position
    positions: Mapping[str, _Position]

    def list_ranks(self, stage: int, expert: int | None = None) -> tuple[int, ...]:
        """Return the ranks of a stage, or those with one coordinate in expert parallelism."""
        experts = range(self.sizes.expert) if expert is None else [expert]
        ranks: list[int] = []
        for number in experts:
            first = (stage * self.sizes.expert + number) * self.sizes.tensor
            ranks += range(first, first + self.sizes.tensor)

        return tuple(ranks)


def split(snapshot: Snapshot) -> dict[int, Snapshot]:
    """Return the files of all ranks of a folder, with layers and experts numbered as in the whole model.

    Tensors get the layout that their names show; a tensor with another name is refused if tensor parallelism can divide
    it. The optimizer numbers its parameters, so its tensors are refused. A folder with another layout (experts with
    their own degree of tensor parallelism) is returned alone. Raises MalformedFile if ranks or layers are missing.
    """
    files = _split_files(snapshot)
    grid = _find_grid(snapshot, files)
    if grid is None:
        return {0: snapshot}

    first_layers = _number_layers(snapshot, files, grid)
    experts = _count_experts(files)
    ranks: dict[int, Snapshot] = {}
    for label, position in sorted(grid.positions.items(), key=lambda item: item[1]):
        file = files[label]
        placing = _Placing(grid, position, first_layers, experts, file)
        tensors = placing.place_all()
        path = f"{snapshot.path}/{label}"
        sizes: dict[str, int] = {}
        for tensor in tensors.values():
            if tensor.opened is not None:
                sizes[tensor.path] = tensor.opened.st_size

        if tensors:
            path = next(iter(tensors.values())).path

        ranks[len(ranks)] = replace(
            snapshot,
            path=path,
            bytes=sum(sizes.values()),
            tensors=tensors,
            values={name: value for name, value in file.values.items() if not _LAYOUT.match(name)},
            mesh={"pp": position.stage, "ep": position.expert, "tp": position.tensor},
            shard_labels=frozenset(),
            ties=(),
        )

    return ranks


def _split_files(snapshot: Snapshot) -> dict[str, _RankFile]:
    """Return the contents of the file of each rank, by label."""
    files: dict[str, _RankFile] = defaultdict(_RankFile)
    for name, tensor in snapshot.tensors.items():
        label, inner_name = _split_label(name)
        files[label].tensors[inner_name] = tensor

    # Values without a label belong to the folder, and not to a rank.
    labels = {label for label, file in files.items() if file.tensors}
    for name, value in snapshot.values.items():
        label, inner_name = _split_label(name)
        files[label].values[inner_name] = value

    # A folder with one rank has names without label.
    if labels == {""}:
        path = next(iter(files[""].tensors.values())).path
        return {os.path.basename(os.path.dirname(path)): files[""]}

    return {label: file for label, file in files.items() if label in labels}


def _split_label(name: str) -> tuple[str, str]:
    """Return the label of the rank, and the name in its file."""
    container = "optimizer." if name.startswith("optimizer.") else ""
    label, _, inner_name = name.removeprefix(container).partition(".")
    if not _LABEL.fullmatch(label):
        return "", name

    return label, container + inner_name


def _find_grid(snapshot: Snapshot, files: Mapping[str, _RankFile]) -> _Grid | None:
    """Return the ranks of a folder, from the arguments of Megatron-LM in each file; None for other layouts."""
    if not files or not all(map(_LABEL.fullmatch, files)):
        return None

    degrees: set[_Position] = set()
    for file in files.values():
        pipeline, expert, tensor = (_read_degree(file.values, kind) for kind in ("pipeline", "expert", "tensor"))
        # Experts with their own degree of tensor parallelism have other boxes.
        if expert > 1 and _read_degree(file.values, "expert_tensor", tensor) != tensor:
            return None

        degrees.add(_Position(pipeline, expert, tensor))

    if len(degrees) > 1:
        found = f"degrees {brief(sorted(tuple(degree) for degree in degrees))}"
        raise _malformed(snapshot, "args", found, "the files of one run")

    (sizes,) = degrees
    positions = {label: _read_position(label, sizes) for label in files}
    count = math.prod(sizes)
    if set(positions.values()) != _list_positions(sizes, len(files)) or len(positions) != count:
        raise _malformed(snapshot, "model-parallel ranks", brief(sorted(positions)), f"{count} ranks")

    return _Grid(sizes, positions)


def _read_position(label: str, sizes: _Position) -> _Position:
    """Return the coordinates in the label of a file: mp_rank_<tensor>_<stage>_<expert>, without unused kinds."""
    tensor, *numbers = (int(number) for number in label.removeprefix("mp_rank_").split("_"))
    stage = numbers.pop(0) if sizes.stage > 1 and numbers else 0
    expert = numbers[0] if numbers else 0
    return _Position(stage, expert, tensor)


def _list_positions(sizes: _Position, files: int) -> set[_Position]:
    """Return all positions in a grid; empty if there are more of them than files, as untrusted sizes may claim."""
    if math.prod(sizes) > files:
        return set()

    return {_Position(*numbers) for numbers in itertools.product(*map(range, sizes))}


def _read_degree(values: Mapping[str, Any], kind: str, default: int = 1) -> int:
    name = f"args.{kind}_model_parallel_size"
    if kind.startswith("expert_"):
        name = f"args.{kind}_parallel_size"

    degree = values.get(name)
    return degree if degree and are_naturals([degree]) else default


def _malformed(snapshot: Snapshot, place: str, found: str, needed: str) -> MalformedFile:
    next_step = "copy the folders of all ranks, or save again"
    return MalformedFile(snapshot.path, place=place, found=found, needed=needed, next_step=next_step)


def _split_chunk(name: str) -> tuple[int, str]:
    """Return the number of the virtual pipeline stage within the rank, and the name without it."""
    match = _CHUNK.fullmatch(name)
    if match is None:
        return 0, name

    return int(match[1]), match[2]


class _Stage(NamedTuple):
    """A pipeline stage. chunk: the number of the virtual stage within the rank."""

    chunk: int
    stage: int


def _number_layers(snapshot: Snapshot, files: Mapping[str, _RankFile], grid: _Grid) -> dict[tuple[str, int, int], int]:
    """Return the number of the first layer in the whole model, by the name before it, virtual stage and stage."""
    numbers: dict[str, dict[_Stage, set[int]]] = defaultdict(lambda: defaultdict(set))
    chunks_by_label: dict[str, set[int]] = defaultdict(set)
    for label, position in grid.positions.items():
        for name in files[label].tensors:
            chunk, plain_name = _split_chunk(name)
            chunks_by_label[label].add(chunk)
            match = _LAYER.fullmatch(plain_name)
            if match is not None:
                numbers[match[1]][_Stage(chunk, position.stage)].add(int(match[2]))

    # Each rank has a part of every virtual stage.
    count = len(set().union(*chunks_by_label.values()))
    for label, chunks in chunks_by_label.items():
        if chunks != set(range(count)):
            raise _malformed(snapshot, f"virtual stages of {label}", brief(sorted(chunks)), f"{count} from 0 on")

    first_layers: dict[tuple[str, int, int], int] = {}
    for start, layers_by_stage in numbers.items():
        for stage, first_layer in _count_layers(snapshot, start, layers_by_stage).items():
            first_layers[start, stage.chunk, stage.stage] = first_layer

    return first_layers


def _count_layers(snapshot: Snapshot, start: str, layers_by_stage: Mapping[_Stage, set[int]]) -> dict[_Stage, int]:
    """Return what to add to the numbers of the layers of each stage. start: the name before the number."""
    all_numbers: list[int] = []
    for layers in layers_by_stage.values():
        all_numbers += layers

    # Some libraries number the layers of all stages, or the model has one stage.
    if sorted(all_numbers) == [*range(len(all_numbers))]:
        return dict.fromkeys(layers_by_stage, 0)

    first_layers: dict[_Stage, int] = {}
    total = 0
    for stage, layers in sorted(layers_by_stage.items()):
        if layers != set(range(len(layers))):
            place = f"{start}* of stage {stage.stage}"
            raise _malformed(snapshot, place, brief(sorted(layers)), "layers from 0 on")

        first_layers[stage] = total
        total += len(layers)

    return first_layers


def _count_experts(files: Mapping[str, _RankFile]) -> int:
    """Return the number of experts of one rank in a layer."""
    last_expert = 0
    for file in files.values():
        for name in file.tensors:
            expert = _Expert.find(name)
            if expert is not None:
                last_expert = max(last_expert, expert.number)

    return last_expert + 1


class _Expert(NamedTuple):
    """The name of a tensor of an expert: the text before and after its number."""

    start: str
    number: int
    end: str

    @classmethod
    def find(cls, name: str) -> _Expert | None:
        """Return the parts of a name; None if it is of no expert."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None

        return cls(match[1] or match[4], int(match[2] or match[6]), match[3] or match[5])


class _Placing:
    """Gives the tensors in the file of one rank their names and layouts in the whole model.

    grid, position: of all ranks, and of this rank.
    first_layers: as from `_number_layers`.
    experts: the number of experts of one rank.
    file: of this rank.
    """

    def __init__(
        self,
        grid: _Grid,
        position: _Position,
        first_layers: Mapping[tuple[str, int, int], int],
        experts: int,
        file: _RankFile,
    ) -> None:
        self._grid = grid
        self._position = position
        self._first_layers = first_layers
        self._experts = experts
        self._tensors = file.tensors
        self._replicated = find_replicated(_split_chunk(name)[1] for name in file.tensors)
        self._is_gated = file.values.get("args.swiglu") is True
        is_tied = file.values.get("args.untie_embeddings_and_output_weights") is False
        self._has_tied_output = is_tied and grid.sizes.stage > 1

    def place_all(self) -> dict[str, Tensor]:
        """Return the tensors by name, with their layouts. A tensor without a known layout is refused."""
        tensors: dict[str, Tensor] = {}
        for stored_name, tensor in self._tensors.items():
            name, sharding = self._place(stored_name, tensor)
            refused = tensor.refused
            if name in tensors:  # multi-token prediction stores the embedding of the last stage twice
                name = make_unique_name(name, tensors)
                refused = Refusal.UNPLACED_PARTS(layout="tensor parallelism")
            elif not refused and sharding is None:
                refused = Refusal.UNPLACED_PARTS(layout="tensor parallelism")

            tensors[name] = replace(tensor, name=name, sharding=sharding, refused=refused)

        return tensors

    def _place(self, stored_name: str, tensor: Tensor) -> tuple[str, Sharding | None]:
        """Return the name and the layout in the whole model; no layout for a tensor whose name does not show it."""
        if stored_name.startswith("optimizer."):
            return stored_name, None

        name, copied, ranks = self._place_copies(self._number_layer(stored_name))
        is_replicated = _split_chunk(stored_name)[1] in self._replicated
        placement = _find_placement(name, gated=self._is_gated, replicated=is_replicated)
        name = _unfuse(name)
        tensor_ranks = self._grid.sizes.tensor
        if placement is None and tensor_ranks > 1:
            return name, None

        shape = list(tensor.shape)
        if placement not in (None, "R"):
            dim = 1 if placement == "S(1)" else 0
            if dim >= len(shape) or shape[dim] * tensor_ranks > MOST_ELEMENTS:
                return name, None

            shape[dim] *= tensor_ranks

        # Data-parallel ranks save no files, so the other dimensions of the mesh hold copies.
        copied_sizes = [size for size, _ in copied.values()]
        copied_coordinates = [coordinate for _, coordinate in copied.values()]
        return name, Sharding(
            (*copied_sizes, tensor_ranks),
            ranks,
            (*["R"] * len(copied), placement or "R"),
            tuple(shape),
            (*copied, "tp"),
            (*copied_coordinates, self._position.tensor),
        )

    def _number_layer(self, stored_name: str) -> str:
        """Return a name with the number of its layer in the whole model."""
        chunk, name = _split_chunk(stored_name)
        match = _LAYER.fullmatch(name)
        if match is None:
            return name

        first_layer = self._first_layers[match[1], chunk, self._position.stage]
        return f"{match[1]}{first_layer + int(match[2])}{match[3]}"

    def _place_copies(self, name: str) -> tuple[str, dict[str, tuple[int, int]], tuple[int, ...]]:
        """Return the name in the whole model, the dimensions with copies and the ranks of the mesh.

        Dimensions have the number of copies and the coordinate of this rank.
        """
        stage, expert_position, _ = self._position
        expert = _Expert.find(name)
        if expert is not None:
            number = expert_position * self._experts + expert.number
            expert_name = f"{expert.start}local_experts.{number}.{expert.end}"
            return expert_name, {}, self._grid.list_ranks(stage, expert_position)

        copied = {"ep": (self._grid.sizes.expert, expert_position)}
        if self._has_tied_output and name in (_EMBEDDING, _OUTPUT):
            # The last stage has a copy of the embedding.
            ranks = self._grid.list_ranks(0) + self._grid.list_ranks(self._grid.sizes.stage - 1)
            return _EMBEDDING, {"pp": (2, int(stage > 0)), **copied}, ranks

        return name, copied, self._grid.list_ranks(stage)


def _find_placement(name: str, *, gated: bool, replicated: bool) -> str | None:
    """Return the placement along tensor parallelism, in torch's notation; None if the name does not show it."""
    if _COLUMN.fullmatch(name):
        # Gate and up, one after the other.
        is_striped = gated and _GATED.fullmatch(name) is not None
        return "_S(0, 2)" if is_striped else "S(0)"

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
    for stored_name, stacked_tensor in snapshot.tensors.items():
        for plain_name, tensor in _unstack_tensor(stored_name, stacked_tensor):
            if len(tensors) >= _MOST_SHARDS:
                raise MalformedFile(
                    snapshot.path,
                    place=f"tensor {brief(stored_name)}",
                    found=f"more than {_MOST_SHARDS} layers and experts",
                    needed="a readable layout",
                )

            name = make_unique_name(_unfuse(plain_name), tensors)
            tensors[name] = replace(tensor, name=name)

    values = {name: value for name, value in snapshot.values.items() if not _LAYOUT.match(name)}
    return replace(snapshot, tensors=tensors, values=values)


def _unstack_tensor(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of all layers and experts in a tensor."""
    unstacked_name = _name_unstacked(name)
    is_stack = tensor.shape and tensor.shape[0] <= _MOST_LAYERS and not tensor.refused
    if unstacked_name is None or not is_stack:
        yield name, tensor
        return

    for number, layer in enumerate(views.unstack(tensor)):
        yield from _unstack_tensor(unstacked_name.format(number), layer)


def _name_unstacked(name: str) -> str | None:
    """Return a format of the names of the tensors in a stack; None for other tensors."""
    if name.startswith("optimizer."):
        return None

    for pattern, insert in ((_STACKED, ""), (_STACKED_EXPERTS, "local_experts.")):
        match = pattern.fullmatch(name)
        if match is not None:
            start, end = (text.replace("{", "{{").replace("}", "}}") for text in match.groups())
            return f"{start}{insert}{{}}.{end}"

    return None
