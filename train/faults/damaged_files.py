"""Faults in files: training is correct, but one rank's checkpoint does not match its state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from train.faults.base import Fault
from train.optional import read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from train.checkpoints.checkpoint_files import Checkpoint


class FileFault(Fault):
    """Base class of faults that affect files."""

    needs: ClassVar[Mapping[str, str]] = {
        "--save-per-rank": "it affects only saved files; add --save-per-rank",
    }


class OtherDtype(FileFault):
    """Save the model of the last rank in bfloat16, as if only that rank was configured to cast.

    All ranks continue to train in float32.
    """

    summary = "one rank saves its model in bfloat16"
    code = "SYN102"

    def before_save(self, checkpoint: Checkpoint, *, final: bool) -> Checkpoint | None:  # noqa: ARG002
        """Cast floating-point tensors."""
        if not self.is_faulty:
            return checkpoint
        tensors = checkpoint.model.items()
        return replace(checkpoint, model={n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors})


class LastSaveFailed(FileFault):
    """Skip the last save of the last rank, so that an earlier file of the same name remains.

    Examples: a full disk, a preempted node. The folder looks complete. To have an earlier file, the final files are
    also written at half of the run.
    """

    summary = "one rank's last save fails, so its file has an earlier step"
    code = "SYN106"
    when = "half"

    def _check(self) -> None:
        if self.fault_step >= self.steps:
            self.refuse(f"the earlier save must come before the last step, {self.steps}; use a smaller --fault-step")
        self.early_save_step = self.fault_step

    def before_save(self, checkpoint: Checkpoint, *, final: bool) -> Checkpoint | None:
        """Skip the second write of the final file; the history is unaffected."""
        return None if self.is_faulty and final and checkpoint.step == self.steps else checkpoint


class DamagedOnDisk(FileFault):
    """Change one byte of the last rank's final file after it has been written.

    Data can be corrupted on disk and in transfer. torch.save stores a CRC-32 of each tensor, which torch.load ignores.
    """

    summary = "one byte of a tensor in one rank's file changes on disk"
    code = "SYN223"
    needs: ClassVar[Mapping[str, str]] = {
        **FileFault.needs,
        "--save-format pth": "{save_format} files have no checksums; use --save-format pth",
    }

    def after_save(self, path: Path, *, final: bool) -> None:
        """Invert a mantissa byte in the middle of a weight of a convolution or linear layer."""
        if not (self.is_faulty and final):
            return
        tensors = read(str(path)).tensors.items()
        weights = [tensor for name, tensor in tensors if len(tensor.shape) > 1 and not name.startswith("optimizer.")]
        generator = torch.Generator().manual_seed(self.settings.seed)
        tensor = weights[int(torch.randint(len(weights), (), generator=generator))]
        offset = tensor.offset + 4 * (math.prod(tensor.shape) // 2) + 1
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0xFF]))
