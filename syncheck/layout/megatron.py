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
    from collections.abc import Iterable, Iterator, Mapping

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
# The dimension that a placement divides.
_DIMENSIONS = {"S(0)": 0, "_S(0, 2)": 0, "S(1)": 1}
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
    for rank, label in enumerate(sorted(grid.positions, key=grid.positions.__getitem__)):
        file = files[label]
        position = grid.positions[label]
        tensors = _Placing(grid, position, first_layers, experts, file).place_all()
        # The file that a rank's tensors are in; a rank without tensors has only a folder.
        path = next((tensor.path for tensor in tensors.values()), f"{snapshot.path}/{label}")
        ranks[rank] = replace(
            snapshot,
            path=path,
            bytes=_count_bytes(tensors.values()),
            tensors=tensors,
            values=_select_model_values(file.values),
            mesh={"pp": position.stage, "ep": position.expert, "tp": position.tensor},
            shard_labels=frozenset(),
            ties=(),
        )

    return ranks


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the files with some tensors."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.opened is not None:
            sizes[tensor.path] = tensor.opened.st_size

    return sum(sizes.values())


def _select_model_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those that describe the run and its layout."""
    return {name: value for name, value in values.items() if not _LAYOUT.match(name)}


def _split_files(snapshot: Snapshot) -> dict[str, _RankFile]:
    """Return the contents of the file of each rank, by label."""
    files: dict[str, _RankFile] = defaultdict(_RankFile)
    for name, tensor in snapshot.tensors.items():
        label, inner_name = _split_label(name)
        files[label].tensors[inner_name] = tensor

    # Values without a label belong to the folder, and not to a rank.
    for name, value in snapshot.values.items():
        label, inner_name = _split_label(name)
        if label in files:
            files[label].values[inner_name] = value

    # A folder with one rank has names without label.
    if files.keys() == {""}:
        path = next(iter(files[""].tensors.values())).path
        return {os.path.basename(os.path.dirname(path)): files[""]}

    return files


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
        expert = _read_degree(file.values, "expert_model_parallel_size")
        tensor = _read_degree(file.values, "tensor_model_parallel_size")
        # Experts with their own degree of tensor parallelism have other boxes.
        if expert > 1 and _read_degree(file.values, "expert_tensor_parallel_size", tensor) != tensor:
            return None

        degrees.add(_Position(_read_degree(file.values, "pipeline_model_parallel_size"), expert, tensor))

    if len(degrees) > 1:
        found_degrees = brief(sorted(map(tuple, degrees)))
        raise _malformed(snapshot, "args", f"degrees {found_degrees}", "the files of one run")

    (sizes,) = degrees
    positions = {label: _read_position(label, sizes) for label in files}
    count = math.prod(sizes)
    # The count first: untrusted sizes may claim any number of positions.
    if len(files) != count or set(positions.values()) != set(itertools.product(*map(range, sizes))):
        raise _malformed(snapshot, "model-parallel ranks", brief(sorted(positions)), f"{count} ranks")

    return _Grid(sizes, positions)


def _read_position(label: str, sizes: _Position) -> _Position:
    """Return the coordinates in the label of a file: mp_rank_<tensor>_<stage>_<expert>, without unused kinds."""
    tensor, *numbers = (int(number) for number in label.removeprefix("mp_rank_").split("_"))
    # Expert parallelism alone has the first of two numbers.
    if sizes.stage == 1:
        numbers.insert(0, 0)

    stage, expert, *_ = (*numbers, 0, 0)
    return _Position(stage, expert, tensor)


def _read_degree(values: Mapping[str, Any], argument: str, default: int = 1) -> int:
    """Return an argument of Megatron-LM that is a number of ranks; the default if it is absent, 0 or invalid."""
    degree = values.get(f"args.{argument}")
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


def _number_layers(snapshot: Snapshot, files: Mapping[str, _RankFile], grid: _Grid) -> dict[str, dict[_Stage, int]]:
    """Return the number of the first layer of each stage in the whole model, by the name before the number."""
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

    return {start: _count_layers(snapshot, start, layers_by_stage) for start, layers_by_stage in numbers.items()}


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
        first_layers: Mapping[str, Mapping[_Stage, int]],
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
            # Multi-token prediction stores the embedding of the last stage twice.
            is_repeated = name in tensors
            is_unplaced = sharding is None and not refused
            if is_repeated or is_unplaced:
                refused = Refusal.UNPLACED_PARTS(layout="tensor parallelism")

            name = make_unique_name(name, tensors)
            tensors[name] = replace(tensor, name=name, sharding=sharding, refused=refused)

        return tensors

    def _place(self, stored_name: str, tensor: Tensor) -> tuple[str, Sharding | None]:
        """Return the name and the layout in the whole model; no layout for a tensor whose name does not show it."""
        if stored_name.startswith("optimizer."):
            return stored_name, None

        name, mesh = self._place_copies(self._number_layer(stored_name))
        is_replicated = _split_chunk(stored_name)[1] in self._replicated
        placement = _find_placement(name, gated=self._is_gated, replicated=is_replicated)
        name = _unfuse(name)
        tensor_ranks = self._grid.sizes.tensor
        if placement is None:
            if tensor_ranks > 1:
                return name, None

            # A single tensor-parallel rank has whole tensors.
            placement = "R"

        shape = list(tensor.shape)
        dim = _DIMENSIONS.get(placement)
        if dim is not None:
            if dim >= len(shape) or shape[dim] * tensor_ranks > MOST_ELEMENTS:
                return name, None

            shape[dim] *= tensor_ranks

        # Data-parallel ranks save no files, so the other dimensions of the mesh hold copies.
        copied = ["R"] * len(mesh.names)
        return name, Sharding(
            mesh=(*mesh.sizes, tensor_ranks),
            ranks=mesh.ranks,
            placements=(*copied, placement),
            shape=tuple(shape),
            names=(*mesh.names, "tp"),
            coordinate=(*mesh.coordinate, self._position.tensor),
        )

    def _number_layer(self, stored_name: str) -> str:
        """Return a name with the number of its layer in the whole model."""
        chunk, name = _split_chunk(stored_name)
        match = _LAYER.fullmatch(name)
        if match is None:
            return name

        first_layer = self._first_layers[match[1]][_Stage(chunk, self._position.stage)]
        return f"{match[1]}{first_layer + int(match[2])}{match[3]}"

    def _place_copies(self, name: str) -> tuple[str, _CopyMesh]:
        """Return the name in the whole model, and the mesh of the ranks with parts or copies of the tensor."""
        stage, expert_position, _ = self._position
        expert = _Expert.find(name)
        if expert is not None:
            number = expert_position * self._experts + expert.number
            expert_name = f"{expert.start}local_experts.{number}.{expert.end}"
            return expert_name, _CopyMesh(self._grid.list_ranks(stage, expert_position))

        expert_ranks = self._grid.sizes.expert
        if self._has_tied_output and name in (_EMBEDDING, _OUTPUT):
            # The last stage has a copy of the embedding.
            ranks = self._grid.list_ranks(0) + self._grid.list_ranks(self._grid.sizes.stage - 1)
            is_copy = int(stage > 0)
            return _EMBEDDING, _CopyMesh(ranks, ("pp", "ep"), (2, expert_ranks), (is_copy, expert_position))

        return name, _CopyMesh(self._grid.list_ranks(stage), ("ep",), (expert_ranks,), (expert_position,))


class _CopyMesh(NamedTuple):
    """The ranks with a tensor, and the dimensions of their mesh along which they hold copies.

    ranks: in all dimensions, also in that of tensor parallelism.
    names: of the dimensions with copies.
    sizes: the number of copies along each dimension.
    coordinate: of the rank of the file, in each dimension.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()


def _find_placement(name: str, *, gated: bool, replicated: bool) -> str | None:
    """Return the placement along tensor parallelism, in torch's notation; None if the name does not show it."""
    if _COLUMN.fullmatch(name):
        # Gate and up, one after the other.
        is_striped = gated and _GATED.fullmatch(name) is not None
        return "_S(0, 2)" if is_striped else "S(0)"

    if _ROW.fullmatch(name):
        return "S(1)"

    if replicated or _COPIED.fullmatch(name):
        return "R"

    return None


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

    return replace(snapshot, tensors=tensors, values=_select_model_values(snapshot.values))


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
            return f"{_escape_braces(match[1])}{insert}{{}}.{_escape_braces(match[2])}"

    return None


def _escape_braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
