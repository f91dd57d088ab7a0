"""What goes wrong with the files: training is right, and one rank's checkpoint is not what it held."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from syncheck import read
from train.faults.base import Fault

if TYPE_CHECKING:
    from pathlib import Path

    from train.checkpoints.formats import Snapshot
    from train.launch import RankContext
    from train.settings import Settings


class FileFault(Fault):
    """Base of those that need files."""

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if not settings.save_per_rank:
            self.refuse("it shows in the files, and none are saved; add --save-per-rank")


class OtherDtype(FileFault):
    """Save the model of the last rank in bfloat16.

    A cast that only one rank was configured for. Training goes on in float32 on all ranks.
    """

    says = "one rank saves its model in bfloat16"
    code = "SYN102"

    def saving(self, snapshot: Snapshot, *, final: bool) -> Snapshot | None:  # noqa: ARG002
        """Cast what is a float."""
        if not self.bad:
            return snapshot
        tensors = snapshot.model.items()
        return replace(snapshot, model={n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors})


class LastSaveFailed(FileFault):
    """Lose the last save of the last rank, where an earlier one has left a file of the same name.

    A disk that was full, a node that was taken away: the folder looks complete. The final files are written once
    more, at half of the run, to be that earlier save.
    """

    says = "one rank's last save fails, so its file is of an earlier step"
    code = "SYN106"
    when = "half"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if self.at >= steps:
            self.refuse(f"the earlier save needs a step before the last one, {steps}; use a smaller --fault-step")
        self.early = self.at

    def saving(self, snapshot: Snapshot, *, final: bool) -> Snapshot | None:
        """Write nothing the second time; what is written to the history is another matter."""
        return None if self.bad and final and snapshot.step == self.steps else snapshot


class DamagedOnDisk(FileFault):
    """Change one byte of the last rank's final file when it has been written.

    Bits rot on disks and on the way through networks. torch.save stores a CRC-32 of each tensor; torch.load does
    not look at it.
    """

    says = "one byte of one rank's file changes on disk, inside a tensor"
    code = "SYN223"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if settings.save_format != "pth":
            self.refuse(f"{settings.save_format} files carry no checksum that could tell; use --save-format pth")

    def saved(self, path: Path, *, final: bool) -> None:
        """Invert a byte in the middle of a convolution's or a linear layer's weight, in its mantissa."""
        if not (self.bad and final):
            return
        tensors = read(str(path)).tensors.items()
        weights = [tensor for name, tensor in tensors if len(tensor.shape) > 1 and not name.startswith("optimizer.")]
        generator = torch.Generator().manual_seed(self.settings.seed)
        tensor = weights[int(torch.randint(len(weights), (), generator=generator))]
        place = tensor.offset + 4 * (math.prod(tensor.shape) // 2) + 1
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0xFF]))
