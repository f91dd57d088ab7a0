"""From whatever started this process to a RankContext."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import RankError, UserError
from train.launch import by_hand, slurm, spawn, torchrun
from train.launch.context import CPU, RankContext
from train.launch.devices import choose_backend, choose_devices, count
from train.launch.options import LaunchOptions
from train.launch.place import TORCHRUN

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from train.launch.place import Launcher

# The first that recognizes itself is taken. torchrun inside srun: torchrun started this process, srun started
# torchrun. --spawn is by hand too: the first process types the options for those that it starts.
LAUNCHERS: dict[str, Launcher] = {"torchrun": torchrun, "by_hand": by_hand, "slurm": slurm}
NOTHING_TYPED = LaunchOptions()


def find_launcher(environment: Mapping[str, str], options: LaunchOptions) -> Launcher | None:
    """Find what started this process among others; None where nothing did."""
    return next((launcher for launcher in LAUNCHERS.values() if launcher.recognizes(environment, options)), None)


def launcher_name(environment: Mapping[str, str], options: LaunchOptions) -> str:
    """Name what started this process: torchrun, by_hand, slurm, spawn or alone."""
    launcher = find_launcher(environment, options)
    if launcher is by_hand and options.local_world_size is not None:
        return "spawn"  # which alone knows it
    return next((name for name, known in LAUNCHERS.items() if known is launcher), "alone")


def launched(environment: Mapping[str, str], args: argparse.Namespace | None = None) -> bool:
    """Tell whether a group of processes was asked for, in which case the default method is ddp."""
    options = LaunchOptions.of(args)
    if spawn.wanted(options):
        return True
    launcher = find_launcher(environment, options)
    return launcher is not None and launcher.several(environment, options)


def from_environment(
    environment: Mapping[str, str], method: str, *, grouped: bool, options: LaunchOptions = NOTHING_TYPED
) -> RankContext:
    """Find out who this process is.

    grouped: whether `method` needs a process group, hence a launcher. Raises UserError when launcher and
    method do not fit, RankError for what is wrong with this rank's variables or options only.
    """
    launcher = find_launcher(environment, options)
    if launcher is None:
        if grouped:
            raise UserError(f"--method {method} needs a launcher: start it with '{TORCHRUN}', or add --spawn 2")
        return _alone(method, options)
    place = launcher.place(environment, options)
    if not grouped:
        if place.world_size > 1:
            raise UserError(f"--method {method} is one process, the launcher started {place.world_size}")
        return _alone(method, options)
    if not place.init_method:
        raise RankError(f"RANK is set but MASTER_ADDR is not: {torchrun.ADVICE}, or unset RANK")
    devices = choose_devices(options.gpus, place)
    local_rank = place.local_rank
    if local_rank is None:  # by hand: count on as the devices do
        local_rank = place.rank % max(count(), 1) if devices else place.rank
    return RankContext(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=local_rank,
        device=devices[0] if devices else CPU,
        backend=choose_backend(options.backend, devices),
        local_world_size=place.local_world_size or 1,
        node=place.node,
        devices=devices,
        init_method=place.init_method,
    )


def _alone(method: str, options: LaunchOptions) -> RankContext:
    """Describe a process that has no group: it may use all GPUs."""
    if options.backend is not None:
        raise UserError(f"--backend {options.backend}: --method {method} has no process group")
    devices = choose_devices(options.gpus, None)
    return RankContext(device=devices[0] if devices else CPU, devices=devices)
