"""Megatron-Core checkpoints in folders per model-parallel rank: the files of all ranks, with the layouts of tensors.

A file of a rank does not show how its tensors are divided. Their names do (megatron/core/tensor_parallel/layers.py):
column-parallel layers and vocabularies divide dimension 0, row-parallel layers dimension 1. A gated first layer of an
MLP stores the rank's parts of gate and up, one after the other. Each pipeline stage numbers its layers, and each
expert-parallel rank its experts, from 0.

With virtual pipeline stages, a file has the state dicts `model0`, `model1`, ... Layers continue from stage to stage
within `model0`, and then within `model1` (get_transformer_layer_offset in megatron/core/transformer).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import defaultdict
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import MalformedFile
from syncheck.frozen import mutable_record, record
from syncheck.layout.megatron_names import LAYER, Expert, find_placement, select_of_model, split_chunk, unfuse
from syncheck.layout.replicated_names import find_replicated
from syncheck.messages import Refusal
from syncheck.snapshots import MOST_ELEMENTS, Sharding, are_naturals
from syncheck.text import brief, make_unique_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.snapshots import Snapshot, Tensor

_LABEL = re.compile(r"mp_rank_(\d+(?:_\d+){0,2})")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# The dimension that a placement divides.
_DIMENSIONS = {"S(0)": 0, "_S(0, 2)": 0, "S(1)": 1}


class _Position(NamedTuple):
    """Numbers or coordinates in pipeline, expert and tensor parallelism."""

    stage: int
    expert: int
    tensor: int


@mutable_record
class _RankFile:
    """The contents of the file of one rank."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@record
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
        tensors = _Placing(
            grid=grid,
            position=position,
            first_layers=first_layers,
            experts=experts,
            file=file,
        ).place_all()
        # The file that a rank's tensors are in; a rank without tensors has only a folder.
        path = next((tensor.path for tensor in tensors.values()), f"{snapshot.path}/{label}")
        ranks[rank] = replace(
            snapshot,
            path=path,
            bytes=_count_bytes(tensors.values()),
            tensors=tensors,
            values=select_of_model(file.values),
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
        raise _malformed(
            snapshot,
            place="args",
            found=f"degrees {found_degrees}",
            needed="the files of one run",
        )

    (sizes,) = degrees
    positions = {label: _read_position(label, sizes) for label in files}
    count = math.prod(sizes)
    # The count first: untrusted sizes may claim any number of positions.
    if len(files) != count or set(positions.values()) != set(itertools.product(*map(range, sizes))):
        raise _malformed(
            snapshot,
            place="model-parallel ranks",
            found=brief(sorted(positions)),
            needed=f"{count} ranks",
        )

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
    return MalformedFile(
        snapshot.path,
        place=place,
        found=found,
        needed=needed,
        next_step=next_step,
    )


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
            chunk, plain_name = split_chunk(name)
            chunks_by_label[label].add(chunk)
            match = LAYER.fullmatch(plain_name)
            if match is not None:
                numbers[match[1]][_Stage(chunk, position.stage)].add(int(match[2]))

    # Each rank has a part of every virtual stage.
    count = len(set().union(*chunks_by_label.values()))
    for label, chunks in chunks_by_label.items():
        if chunks != set(range(count)):
            raise _malformed(
                snapshot,
                place=f"virtual stages of {label}",
                found=brief(sorted(chunks)),
                needed=f"{count} from 0 on",
            )

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
            raise _malformed(
                snapshot,
                place=place,
                found=brief(sorted(layers)),
                needed="layers from 0 on",
            )

        first_layers[stage] = total
        total += len(layers)

    return first_layers


def _count_experts(files: Mapping[str, _RankFile]) -> int:
    """Return the number of experts of one rank in a layer."""
    last_expert = 0
    for file in files.values():
        for name in file.tensors:
            expert = Expert.find(name)
            if expert is not None:
                last_expert = max(last_expert, expert.number)

    return last_expert + 1


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
        # Newer versions of Transformer Engine store the state of its casts as bytes in a tensor.
        self._tensors = select_of_model(file.tensors)
        self._replicated = find_replicated(split_chunk(name)[1] for name in file.tensors)
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
            tensors[name] = replace(
                tensor,
                name=name,
                sharding=sharding,
                refused=refused,
            )

        return tensors

    def _place(self, stored_name: str, tensor: Tensor) -> tuple[str, Sharding | None]:
        """Return the name and the layout in the whole model; no layout for a tensor whose name does not show it."""
        if stored_name.startswith("optimizer."):
            return stored_name, None

        name, mesh = self._place_copies(self._number_layer(stored_name))
        is_replicated = split_chunk(stored_name)[1] in self._replicated
        placement = find_placement(name, gated=self._is_gated, replicated=is_replicated)
        name = unfuse(name)
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
        chunk, name = split_chunk(stored_name)
        match = LAYER.fullmatch(name)
        if match is None:
            return name

        first_layer = self._first_layers[match[1]][_Stage(chunk, self._position.stage)]
        return f"{match[1]}{first_layer + int(match[2])}{match[3]}"

    def _place_copies(self, name: str) -> tuple[str, _CopyMesh]:
        """Return the name in the whole model, and the mesh of the ranks with parts or copies of the tensor."""
        stage, expert_position, _ = self._position
        expert = Expert.find(name)
        if expert is not None:
            number = expert_position * self._experts + expert.number
            expert_name = f"{expert.start}local_experts.{number}.{expert.end}"
            return expert_name, _CopyMesh(self._grid.list_ranks(stage, expert_position))

        expert_ranks = self._grid.sizes.expert
        if self._has_tied_output and name in (_EMBEDDING, _OUTPUT):
            # The last stage has a copy of the embedding.
            ranks = self._grid.list_ranks(0) + self._grid.list_ranks(self._grid.sizes.stage - 1)
            is_copy = int(stage > 0)
            return _EMBEDDING, _CopyMesh(
                ranks=ranks,
                names=("pp", "ep"),
                sizes=(2, expert_ranks),
                coordinate=(is_copy, expert_position),
            )

        return name, _CopyMesh(
            ranks=self._grid.list_ranks(stage),
            names=("ep",),
            sizes=(expert_ranks,),
            coordinate=(expert_position,),
        )


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
