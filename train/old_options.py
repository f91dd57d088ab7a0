"""Unknown options: those of older training scripts, with their counterparts in run.py, and misspelled ones.

docs/from-your-old-script.md explains the counterparts.
"""

from __future__ import annotations

import difflib
import re
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Long names are spelled with hyphens. A counterpart begins with an option of run.py.
COUNTERPARTS = {
    "--gpu": "--gpus 0",
    "--gpu-id": "--gpus 0",
    "--gpu-ids": "--gpus 0,1",
    "--gpu-devices": "--gpus 0,1",
    "--device-ids": "--gpus 0,1",
    "--gpu-nums": "--spawn N",
    "--num-gpus": "--spawn N",
    "--ngpus": "--spawn N",
    "--multiprocessing-distributed": "--spawn N",
    "-g": "--spawn N",
    "--dist-url": "--init-method URL",
    "--dist-backend": "--backend",
    "--arch": "--model",
    "-a": "--model",
    "-e": "--epochs",
    "-b": "--batch-size",
    "--num-workers": "--workers",
    "-j": "--workers",
    "--learning-rate": "--lr",
    "--lr-scheduler": "--schedule",
    "--scheduler": "--schedule",
    "--warmup": "--warmup-steps",
    "--optim": "--optimizer",
    "--opt": "--optimizer",
    "--wd": "--weight-decay",
    "--grad-accu-steps": "--accumulate",
    "--gradient-accumulation-steps": "--accumulate",
    "--fp16": "--amp fp16",
    "--bf16": "--amp bf16",
    "--use-amp": "--amp bf16",
    "--sync-batchnorm": "--sync-bn",
    "--train-dir": "--out",
    "-td": "--out",
    "--dataset-dir": "--data-dir",
    "--data-folder": "--data-dir",
    "-dd": "--data-dir",
    "-li": "--log-interval",
    "--resume-from": "--resume",
    "--save-model": "--save-per-rank",
    "-sm": "--save-per-rank",
    "--print-freq": "--log-interval",
    "-p": "--log-interval",
}


# The counterpart of an older option for the number of a GPU, if its value selects the CPU.
CPU = dict.fromkeys(product(("--gpus 0", "--gpus 0,1"), ("cpu", "none", "no", "off", "false", "-1")), "--gpus none")


# Options of older scripts that another program of the trainer replaces.
PROGRAMS = {"--evaluate": "python -m train.evaluate ckpts/"}

# The least similarity of a misspelled option and its suggestion: the leading dashes make all options similar.
SIMILARITY = 0.75


def suggest_options(message: str, options: Iterable[str]) -> str:
    """Return a question with the options that were probably meant in a message about unrecognized arguments.

    options: the spellings of run.py. Empty if the message has another subject, or no argument has a suggestion.
    """
    _, is_about_unknown, arguments = message.partition("unrecognized arguments: ")
    if not is_about_unknown:
        return ""
    words = arguments.split()
    typed_options = []
    suggestions = {}
    for word, next_word in zip(words, [*words[1:], ""], strict=True):
        typed, _, value = word.partition("=")
        if re.match("-+[a-zA-Z]", typed):
            typed_options.append(typed)
            suggestions[typed] = _suggest_option(typed, (value or next_word).lower(), options)
    pairs = [f"{suggestion} for {typed}" for typed, suggestion in suggestions.items() if suggestion]
    if not pairs:
        return ""
    # A single option needs no name.
    if len(typed_options) == 1:
        return f"; did you mean {suggestions[typed_options[0]]}?"
    return f"; did you mean {', '.join(pairs)}?"


def _suggest_option(typed: str, value: str, options: Iterable[str]) -> str:
    """Return what an unknown option was probably meant to be, or an empty string. value: its value in lower case."""
    name = typed.lower().replace("_", "-")
    # The options of other scripts are no misspelling: the most similar name would often be a wrong one.
    counterpart = PROGRAMS.get(name) or COUNTERPARTS.get(name)
    if counterpart is not None:
        return CPU.get((counterpart, value), counterpart)
    # Single letters resemble each other by chance.
    if not name.startswith("--"):
        return ""
    similar = difflib.get_close_matches(name, list(options), n=1, cutoff=SIMILARITY)
    return "".join(similar)
