"""Draw the guide's pictures: `python docs/guide/make_plots.py` trains what they show, and writes pictures/NAME.svg.

python docs/guide/make_plots.py bn_drift       # only that one; without a name all
python docs/guide/make_plots.py --from-data    # draws again what was measured, and trains nothing

The numbers of a picture stand beside it in NAME.json. Training is the same bits on one machine and torch version, so
the numbers are too. A picture is a function that draws, in a module plots_TOPIC.py, and a line in PLOTS; what it needs
to train is a function that is given an empty folder.
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

PICTURES = Path(__file__).resolve().parent / "pictures"
LOOK = {
    "svg.hashsalt": "guide",  # names of parts are made from it, and else at random
    "svg.fonttype": "none",  # text stays text
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
    """draw: is given what measure returned, as JSON holds it; with nothing to measure, None."""

    draw: Callable[[Any], Figure]
    measure: Callable[[Path], Any] | None = None


PLOTS = {
    "collectives": Plot(plots_collectives.draw),
    "bn_drift": Plot(plots_batchnorm.draw_drift, plots_batchnorm.measure_drift),
    "bn_batch": Plot(plots_batchnorm.draw_batch, plots_batchnorm.measure_batch),
}


def data_of(name: str, measure: Callable[[Path], Any], *, anew: bool) -> Any:
    """Read what was measured, or measure and write it."""
    path = PICTURES / f"{name}.json"
    if anew:
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(json.dumps(measure(Path(folder)), indent=1) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def save(name: str, figure: Figure) -> None:
    """Write a picture without the date, so that the same numbers make the same file."""
    path = PICTURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
    plt.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


def main() -> int:
    """Make the pictures that the arguments name."""
    parser = argparse.ArgumentParser(description="Draw the guide's pictures.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (all): {', '.join(PLOTS)}")
    parser.add_argument("--from-data", action="store_true", help="draw what was measured before")
    args = parser.parse_args()
    if unknown := set(args.names) - set(PLOTS):
        parser.error(f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join(PLOTS)}")
    PICTURES.mkdir(exist_ok=True)
    plt.rcParams.update(LOOK)
    for name in args.names or PLOTS:
        plot = PLOTS[name]
        data = None if plot.measure is None else data_of(name, plot.measure, anew=not args.from_data)
        save(name, plot.draw(data))
        print(PICTURES / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
