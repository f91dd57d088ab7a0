"""Diagrams of the guide: boxes, arrows and texts in tables. Lengths are in the units of a grid, y goes up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    # x, y, width, height, text, color; x, y, x, y, text
    Box = tuple[float, float, float, float, str, str]
    Arrow = tuple[float, float, float, float, str]

# Light versions of Okabe and Ito's colours, readable under black text.
BLUE, ORANGE, GREEN, GREY, PINK = "#b3d7ee", "#f7cfb2", "#b3e2d3", "#e8e8e8", "#f0d3e3"
PER_UNIT = 0.62  # inches
LINE = 0.25  # height of a line of text


def draw(size: tuple[float, float], boxes: list[Box], arrows: list[Arrow], texts: list[tuple], _data: None) -> Figure:
    """Draw a diagram. texts: x, y and text, centered."""
    figure, axes = plt.subplots(figsize=(size[0] * PER_UNIT, size[1] * PER_UNIT))
    for x, y, width, height, text, color in boxes:
        style = "round,pad=0,rounding_size=0.08"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="#555555"))
        write(axes, x + width / 2, y + height / 2, text)
    for x, y, to_x, to_y, text in arrows:
        axes.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>", "color": "#333333"})
        axes.text((x + to_x) / 2, (y + to_y) / 2 + 0.12, text, ha="center", va="bottom", fontsize=8)
    for x, y, text in texts:
        write(axes, x, y, text)
    axes.set(xlim=(0, size[0]), ylim=(0, size[1]))
    axes.axis("off")
    figure.tight_layout()
    return figure


def write(axes: Axes, x: float, y: float, text: str) -> None:
    """Write centered lines. Each is a text of its own, which stays centered when translate_pictures.py replaces it."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        axes.text(x, y + ((len(lines) - 1) / 2 - i) * LINE, line, ha="center", va="center", fontsize=9)


def row(x: float, y: float, width: float, names: list[str], colors: list[str] | str, height: float = 0.8) -> list[Box]:
    """Return boxes side by side."""
    chosen = [colors] * len(names) if isinstance(colors, str) else colors
    return [
        (x + i * width, y, width * 0.92, height, name, color)
        for i, (name, color) in enumerate(zip(names, chosen, strict=True))
    ]


def turns(x: float, y: float, text: str) -> list[Box]:
    """Return a row of a schedule: F1 is the forward of micro-batch 1, B1 its backward, - a turn of waiting."""
    colors = {"F": BLUE, "B": ORANGE, "-": "#ffffff"}
    return row(x, y, 0.8, [part.strip("-") for part in text.split()], [colors[part[0]] for part in text.split()], 0.7)


DATAPARALLEL = (
    (14, 3.4),
    [
        (0.2, 1.3, 2, 0.9, "batch", GREY),
        *row(3.4, 2.1, 2.2, ["GPU 0: half", "weights"], BLUE),
        *row(3.4, 0.6, 2.2, ["GPU 1: half", "copy of weights"], GREEN),
        (8.8, 2.1, 2, 0.8, "outputs, loss", BLUE),
        (11.6, 2.1, 2.2, 0.8, "gradients: sum", BLUE),
    ],
    [
        (2.2, 1.8, 3.3, 2.4, ""),
        (2.2, 1.7, 3.3, 1, ""),
        (6.6, 2.1, 6.6, 1.45, ""),
        (7.8, 2.5, 8.7, 2.5, ""),
        (7.8, 1, 8.8, 2.1, "4 gather"),
        (10.8, 2.5, 11.5, 2.5, ""),
    ],
    [(2.7, 2.75, "1 scatter"), (6.6, 3.1, "2 replicate the weights"), (5.5, 0.3, "3 apply, in threads of one process")],
)
DDP = (
    (14, 3.6),
    [
        *row(0.3, 2.3, 3, ["rank 0: samples 0, 2, 4, 6", "forward, backward"], BLUE),
        *row(0.3, 0.5, 3, ["rank 1: samples 1, 3, 5, 7", "forward, backward"], GREEN),
        (6.8, 0.5, 2.6, 2.6, "all-reduce:\nmean of the\ngradients", ORANGE),
        (10.3, 2.3, 3, 0.8, "the same step", BLUE),
        (10.3, 0.5, 3, 0.8, "the same step", GREEN),
    ],
    [(6.1, 2.7, 6.7, 2.7, ""), (6.1, 0.9, 6.7, 0.9, ""), (9.4, 2.7, 10.2, 2.7, ""), (9.4, 0.9, 10.2, 0.9, "")],
    [(11.8, 1.8, "equal weights stay equal")],
)
ACCUMULATION = (
    (14, 2.6),
    [
        *row(
            0.3, 1, 2.1, ["micro-batch 1", "micro-batch 2", "micro-batch 3", "micro-batch 4"], [GREY] * 3 + [BLUE], 0.9
        ),
        (9.2, 1, 2.1, 0.9, "all-reduce", ORANGE),
        (11.7, 1, 2, 0.9, "step", GREEN),
    ],
    [(8.7, 1.45, 9.1, 1.45, ""), (11.3, 1.45, 11.6, 1.45, "")],
    [(3.4, 2.2, "no_sync(): gradients add up on each rank"), (4.5, 0.5, "loss / 4 in each")],
)
PRECISION = (
    (14, 3.2),
    [
        (0.5, 2.1, 13, 0.6, "float32: 1e-38 to 3e38, 7 digits", BLUE),
        (0.5, 1.2, 13, 0.6, "bfloat16: 1e-38 to 3e38, 2 to 3 digits", GREEN),
        (5.4, 0.3, 3.6, 0.6, "float16: 6e-8 to 65,504", ORANGE),
    ],
    [(3.2, 0.6, 5.3, 0.6, "")],
    [(1.7, 0.6, "small gradients: 0,\nso the loss is scaled")],
)
OVERLAP = (
    (14, 3),
    [
        *row(0.3, 1.8, 2.4, ["backward layer 4", "layer 3", "layer 2", "layer 1"], BLUE),
        *row(5.2, 0.5, 2.4, ["bucket 1: all-reduce", "bucket 2"], ORANGE),
        (10.6, 0.5, 2, 0.8, "step", GREEN),
    ],
    [(5, 1.8, 5.6, 1.35, ""), (9.6, 1.8, 8.4, 1.35, "")],
    [(2.4, 0.9, "gradients of layers 4 and 3\nfill the first bucket")],
)
FSDP = (
    (14, 3.4),
    [
        *row(
            0.3,
            2.3,
            1.7,
            ["gather 1", "forward 1", "free 1", "gather 2", "forward 2", "free 2", "...", ""][:7],
            [ORANGE, BLUE, GREY, ORANGE, BLUE, GREY, "#ffffff"],
        ),
        *row(
            0.3,
            0.9,
            1.7,
            ["gather 2", "backward 2", "scatter 2", "gather 1", "backward 1", "scatter 1", "step"],
            [ORANGE, BLUE, ORANGE, ORANGE, BLUE, ORANGE, GREEN],
        ),
    ],
    [],
    [(6, 0.4, "scatter: reduce-scatter, after which each rank has its shard of the mean gradient")],
)
LAUNCHING = (
    (14, 3.6),
    [
        (5.4, 2.6, 3.2, 0.8, "store at rank 0's address", ORANGE),
        (0.5, 1.4, 5, 0.8, "node 0: torchrun --node-rank 0", GREY),
        (8.5, 1.4, 5, 0.8, "node 1: torchrun --node-rank 1", GREY),
        *row(0.5, 0.2, 2.6, ["rank 0, cuda:0", "rank 1, cuda:1"], BLUE),
        *row(8.5, 0.2, 2.6, ["rank 2, cuda:0", "rank 3, cuda:1"], GREEN),
    ],
    [
        (3, 2.2, 5.4, 2.9, ""),
        (11, 2.2, 8.6, 2.9, ""),
        (1.7, 1.4, 1.7, 1.05, ""),
        (4.3, 1.4, 4.3, 1.05, ""),
        (9.7, 1.4, 9.7, 1.05, ""),
        (12.3, 1.4, 12.3, 1.05, ""),
    ],
    [],
)
SPEED = (
    (14, 2.6),
    [
        *row(0.3, 1.5, 4.4, ["load data", "forward, backward", "step"], [GREY, BLUE, GREEN], 0.7),
        (6.5, 0.5, 4.6, 0.7, "all-reduce", ORANGE),
    ],
    [],
    [(12.5, 0.85, "the end is not\noverlapped: lost"), (3.3, 0.85, "meanwhile, workers load\nthe next batch")],
)
FINDING = (
    (14, 3.8),
    [
        (0.2, 1.5, 2.4, 0.9, "what differs?", GREY),
        *row(3.4, 2.8, 3.4, ["only BatchNorm statistics", "SYN201, SYN202"], [BLUE, GREEN]),
        *row(3.4, 1.9, 3.4, ["step counters too", "SYN214: skipped step"], [BLUE, GREEN], 0.75),
        *row(3.4, 1, 3.4, ["all trained tensors", "SYN211: not averaged"], [BLUE, GREEN], 0.75),
        *row(3.4, 0.1, 3.4, ["one part of the model", "SYN212: not wrapped"], [BLUE, GREEN], 0.75),
        (11.2, 1.5, 2.5, 0.9, "fix, and a test", ORANGE),
    ],
    [
        (2.6, 2, 3.3, 3.2, ""),
        (2.6, 2, 3.3, 2.3, ""),
        (2.6, 1.9, 3.3, 1.4, ""),
        (2.6, 1.9, 3.3, 0.5, ""),
        (10, 3.2, 11.1, 2.2, ""),
        (10, 2.3, 11.1, 2, ""),
        (10, 1.4, 11.1, 1.8, ""),
        (10, 0.5, 11.1, 1.7, ""),
    ],
    [],
)
SUMS = (
    (14, 2.6),
    [
        *row(0.4, 1.4, 1.5, ["1e8", "+ 1", "- 1e8"], BLUE),
        (5.4, 1.4, 1.4, 0.8, "= 0", ORANGE),
        *row(7.6, 1.4, 1.5, ["1e8", "- 1e8", "+ 1"], BLUE),
        (12.4, 1.4, 1.4, 0.8, "= 1", GREEN),
    ],
    [],
    [(7, 0.6, "float32 has 7 digits, so the order of a sum changes its result: other ranks, other order, other bits")],
)
SCRIPT = (
    (14, 3.4),
    [
        *row(
            0.2,
            1.9,
            1.95,
            ["connect", "model, wrap", "batch", "forward", "backward", "step", "save"],
            [ORANGE, ORANGE, BLUE, BLUE, ORANGE, BLUE, ORANGE],
        ),
        *row(
            0.2,
            0.6,
            1.95,
            ["connect", "model, wrap", "batch", "forward", "backward", "step", "(wait)"],
            [ORANGE, ORANGE, GREEN, GREEN, ORANGE, GREEN, ORANGE],
        ),
    ],
    [],
    [(7, 3.05, "rank 0 above, rank 1 below; orange: all ranks must take part")],
)
FSDP_TRAINING = (
    (14, 3.4),
    [
        (0.2, 1.3, 2.2, 0.9, "meta model:\nshapes only", GREY),
        (3.4, 2.2, 2.2, 0.8, "shard of rank 0", BLUE),
        (3.4, 0.5, 2.2, 0.8, "shard of rank 1", GREEN),
        (6.8, 0.5, 2.6, 2.5, "step_5/\nparts of both ranks\n.metadata", ORANGE),
        (10.8, 1.3, 2.9, 0.9, "one rank: whole model", PINK),
    ],
    [
        (2.4, 1.9, 3.3, 2.5, ""),
        (2.4, 1.6, 3.3, 1, ""),
        (5.6, 2.6, 6.7, 2.2, ""),
        (5.6, 0.9, 6.7, 1.3, ""),
        (9.4, 1.75, 10.7, 1.75, "load"),
    ],
    [(2.8, 3.1, "fully_shard, to_empty"), (6.2, 2.75, "save")],
)
TENSOR_PARALLEL = (
    (14, 3.8),
    [
        (0.2, 1.4, 1.8, 0.9, "input x", GREY),
        (3, 2.4, 2.6, 0.9, "W1, first half", BLUE),
        (3, 0.4, 2.6, 0.9, "W1, second half", GREEN),
        (6.6, 2.4, 2.6, 0.9, "W2, first half", BLUE),
        (6.6, 0.4, 2.6, 0.9, "W2, second half", GREEN),
        (10, 1.4, 1.5, 0.9, "sum", ORANGE),
        (12.2, 1.4, 1.6, 0.9, "output", GREY),
    ],
    [
        (2, 2, 2.9, 2.8, ""),
        (2, 1.7, 2.9, 0.9, ""),
        (5.6, 2.85, 6.5, 2.85, "gelu"),
        (5.6, 0.85, 6.5, 0.85, "gelu"),
        (9.2, 2.8, 10.2, 2.35, ""),
        (9.2, 0.9, 10.2, 1.35, ""),
        (11.5, 1.85, 12.1, 1.85, ""),
    ],
    [
        (4.3, 3.55, "column-wise"),
        (7.9, 3.55, "row-wise"),
        (10.75, 1.05, "all-reduce"),
        (1.1, 0.5, "rank 0 above,\nrank 1 below"),
    ],
)
PIPELINE = (
    (14, 4.4),
    [
        *turns(2.4, 3.2, "F1 F2 F3 F4 - - B1 B2 B3 B4"),
        *turns(2.4, 2.4, "- F1 F2 F3 F4 B1 B2 B3 B4 -"),
        *turns(2.4, 1.1, "F1 F2 - B1 F3 B2 F4 B3 - B4"),
        *turns(2.4, 0.3, "- F1 B1 F2 B2 F3 B3 F4 B4 -"),
    ],
    [],
    [
        (1.2, 3.6, "GPipe, stage 0"),
        (1.2, 2.8, "stage 1"),
        (1.2, 1.5, "1F1B, stage 0"),
        (1.2, 0.7, "stage 1"),
        (12.2, 2.3, "empty: waiting\n(the bubble)"),
    ],
)
CONTEXT = (
    (14, 3.6),
    [
        *row(0.2, 2.3, 1.5, ["tokens 0-3", "queries"], BLUE),
        *row(0.2, 0.6, 1.5, ["tokens 4-7", "queries"], GREEN),
        (4, 0.6, 2.2, 2.5, "keys and values\nof all tokens\n(all-gather)", ORANGE),
        (7.6, 2.3, 1.8, 0.8, "tokens, rank 0", BLUE),
        (7.6, 0.6, 1.8, 0.8, "tokens, rank 1", GREEN),
        (11.8, 2.3, 1.9, 0.8, "expert 0", PINK),
        (11.8, 0.6, 1.9, 0.8, "expert 1", PINK),
    ],
    [
        (3.2, 2.7, 3.9, 2.7, ""),
        (3.2, 1, 3.9, 1, ""),
        (9.4, 2.7, 11.7, 2.7, ""),
        (9.4, 2.6, 11.7, 1.2, ""),
        (9.4, 1.1, 11.7, 2.5, ""),
        (9.4, 1, 11.7, 1, ""),
    ],
    [(10.6, 3.2, "all-to-all, and back"), (3, 0.2, "context parallelism"), (10.6, 0.2, "expert parallelism")],
)
SAME_MODEL = (
    (14, 3.4),
    [
        (0.2, 2.2, 3, 0.9, "A: Hugging Face folder", BLUE),
        (0.2, 0.4, 3, 0.9, "B: 4 files of ranks", GREEN),
        (4.4, 0.4, 2.4, 0.9, "join the shards", GREY),
        (8, 0.4, 2.4, 0.9, "map names,\ndivide fused", GREY),
        (4.4, 2.2, 6, 0.9, "gate, up, query, key, value, ...", BLUE),
        (11.6, 1.3, 2.2, 0.9, "compare bytes", ORANGE),
    ],
    [
        (3.2, 0.85, 4.3, 0.85, ""),
        (6.8, 0.85, 7.9, 0.85, ""),
        (3.2, 2.65, 4.3, 2.65, ""),
        (10.4, 0.85, 11.8, 1.3, ""),
        (10.4, 2.65, 11.8, 2.2, ""),
    ],
    [],
)
RING = (
    (14, 4),
    [
        (2.4, 2.8, 2, 0.8, "server", ORANGE),
        *row(0.3, 0.6, 2.2, ["worker 1", "worker 2", "worker 3"], BLUE),
        (8, 2.8, 1.8, 0.8, "rank 0", BLUE),
        (11.6, 2.8, 1.8, 0.8, "rank 1", GREEN),
        (11.6, 0.6, 1.8, 0.8, "rank 2", PINK),
        (8, 0.6, 1.8, 0.8, "rank 3", GREY),
    ],
    [
        (1.5, 1.4, 2.8, 2.75, ""),
        (3.4, 1.4, 3.4, 2.75, ""),
        (5.5, 1.4, 4, 2.75, ""),
        (9.8, 3.2, 11.5, 3.2, "chunk"),
        (12.5, 2.8, 12.5, 1.45, ""),
        (11.6, 1, 9.9, 1, ""),
        (8.9, 1.4, 8.9, 2.75, ""),
    ],
    [],
)

PARITY_PARTS = ["g[0]: rank 0, part 0", "g[1]: rank 0, part 1", "g[2]: rank 1, part 0", "g[3]: rank 1, part 1"]
PARITY = (
    (14, 4.4),
    [*row(0.2, 3.2, 3.4, PARITY_PARTS, BLUE), (3.2, 0.3, 7.4, 0.9, "gradient of each rank: sum of W[o] g[o]", GREEN)],
    [(1.8 + 3.4 * i, 3.2, 4.4 + 1.7 * i, 1.2, f"W[{i}]") for i in range(4)],
    [(12.3, 0.75, "right: all weights are 1")],
)
DIAGRAMS: dict[str, Callable[[None], Figure]] = {
    name: partial(draw, *table)
    for name, table in {
        "dataparallel": DATAPARALLEL,
        "ddp": DDP,
        "accumulation": ACCUMULATION,
        "precision": PRECISION,
        "overlap": OVERLAP,
        "fsdp": FSDP,
        "launching": LAUNCHING,
        "speed": SPEED,
        "finding": FINDING,
        "sums": SUMS,
        "script": SCRIPT,
        "fsdp_training": FSDP_TRAINING,
        "tensor_parallel": TENSOR_PARALLEL,
        "pipeline": PIPELINE,
        "context": CONTEXT,
        "same_model": SAME_MODEL,
        "parity": PARITY,
        "ring": RING,
    }.items()
}
