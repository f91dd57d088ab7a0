"""Create the plots of the guide from training runs and write them to pictures/NAME.svg.

python docs/guide/make_plots.py                # train for and draw all plots
python docs/guide/make_plots.py bn_drift       # a single plot
python docs/guide/make_plots.py --from-data    # redraw from saved numbers without training

The numbers of a plot are saved in pictures/NAME.json. They are bitwise reproducible on one machine with one torch
version. To add a plot, write a draw function in a module plots_TOPIC.py and add a line to PLOTS. A plot with training
runs also needs a measure function, which receives an empty folder. The plots of pages with a translation also need
Chinese texts, in docs/zh-CN/labels.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import plots_batchnorm
import plots_collectives
import plots_diagrams
import translate_pictures

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

PICTURES = Path(__file__).resolve().parent / "pictures"
LOOK = {
    "svg.hashsalt": "guide",  # makes element ids reproducible
    "svg.fonttype": "none",  # keep text instead of paths
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """A plot: `draw` receives the JSON-decoded result of `measure`, or None if there is nothing to measure."""

    draw: Callable[[Any], Figure]
    measure: Callable[[Path], Any] | None = None


PLOTS = {
    "collectives": Plot(plots_collectives.draw),
    "bn_drift": Plot(plots_batchnorm.draw_drift, plots_batchnorm.measure_drift),
    "bn_batch": Plot(plots_batchnorm.draw_batch, plots_batchnorm.measure_batch),
    **{name: Plot(draw) for name, draw in plots_diagrams.DIAGRAMS.items()},
}


def data_of(name: str, measure: Callable[[Path], Any], *, anew: bool) -> Any:
    """Return the numbers of a plot, measured again if `anew` is set."""
    path = PICTURES / f"{name}.json"
    if anew:
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(json.dumps(measure(Path(folder)), indent=1) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def save(name: str, figure: Figure) -> None:
    """Write an SVG file without a date, so equal numbers give equal files."""
    path = PICTURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
    plt.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


def main() -> int:
    """Create the plots named on the command line."""
    parser = argparse.ArgumentParser(description="Create the plots of the guide.", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"plots to create (default: all): {', '.join(PLOTS)}")
    parser.add_argument("--from-data", action="store_true", help="redraw from saved numbers without training")
    args = parser.parse_args()
    if unknown := set(args.names) - set(PLOTS):
        parser.error(f"unknown plot {', '.join(sorted(unknown))}; choose from {', '.join(PLOTS)}")
    PICTURES.mkdir(exist_ok=True)
    plt.rcParams.update(LOOK)
    for name in args.names or PLOTS:
        plot = PLOTS[name]
        data = None if plot.measure is None else data_of(name, plot.measure, anew=not args.from_data)
        save(name, plot.draw(data))
        print(PICTURES / f"{name}.svg")
    translate_pictures.write_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
