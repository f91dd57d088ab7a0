"""Frequencies of rotary embeddings that only one model stores: computed from its settings, or other ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama
from support.listings import list_codes

import syncheck
from syncheck.messages import Note
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

MODEL = llama.make_model()
CONFIG = llama.CONFIG | {"model_type": "llama", "rope_theta": 5e5}
NAME = "model.layers.{}.self_attn.rotary_emb.inv_freq"


def compute(theta: float, dtype: str = "f4", count: int = llama.HEAD // 2) -> Any:
    """Return the frequencies of a head."""
    return (theta ** -(np.arange(count) / count)).astype(dtype)


def add(frequencies: Any, name: str = NAME) -> llama.Weights:
    """Return the model with frequencies in each layer."""
    return MODEL | {name.format(i): frequencies for i in range(llama.LAYERS)}


def diff_all(folder: Path, a: llama.Weights, b: llama.Weights, configs: tuple[Any, Any]) -> list[syncheck.Report]:
    """Return the comparisons in both directions, and under the map of the library."""
    first, second = llama.write(folder / "a", a, configs[0]), llama.write(folder / "b", b, configs[1])
    mapped = syncheck.diff(first, second, options=DiffOptions(map="llama"))
    return [syncheck.diff(first, second), syncheck.diff(second, first), mapped]


COMPUTED = {
    "stated": (compute(5e5), (CONFIG, CONFIG)),
    "float16": (compute(5e5, "f2"), (CONFIG, CONFIG)),
    "stated by one model": (compute(5e5), (CONFIG, None)),
    "default": (compute(1e4), ({"model_type": "llama"}, {"model_type": "llama"})),
    "without settings": (compute(3e4), (None, None)),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_frequencies_that_follow_from_the_settings_are_omitted(tmp_path: Path, case: str) -> None:
    """The models are in sync, and a note names the frequencies and their base."""
    frequencies, configs = COMPUTED[case]
    for report in diff_all(tmp_path, MODEL, add(frequencies), configs):
        assert (report.exit_code, report.counts.identical) == (0, len(MODEL))
        assert Note.COMPUTED_FREQUENCIES in list_codes(report.groups[-1].notes)


OTHER = {
    "another base": (compute(1e4), (CONFIG, CONFIG)),
    "another base in float16": (compute(4.9e5, "f2"), (CONFIG, CONFIG)),
    "two bases": (compute(5e5), (CONFIG, CONFIG | {"rope_theta": 1e4})),
    "another size": (compute(5e5, count=llama.HEAD), (CONFIG, CONFIG)),
    "unknown default": (compute(1e4), ({"model_type": "mixtral"}, {"model_type": "mixtral"})),
    "no frequencies": (np.array([1, 0.5, 0.2, np.nan], "f4"), (None, None)),
    "not positive": (np.array([1, 0.5, 0, -1], "f4"), (None, None)),
    "settings of another kind": (compute(5e5), (CONFIG | {"rope_theta": "5e5", "partial_rotary_factor": {}}, None)),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_frequencies_are_missing(tmp_path: Path, case: str) -> None:
    """Frequencies that do not follow from the settings are never in sync, also under the map of the library."""
    frequencies, configs = OTHER[case]
    for report in diff_all(tmp_path, MODEL, add(frequencies), configs):
        assert report.exit_code == 1
        assert Note.COMPUTED_FREQUENCIES not in list_codes(report.groups[-1].notes)


def test_frequencies_of_both_models(tmp_path: Path) -> None:
    """Under one name they are compared, and under two names they need one base."""
    for name in (NAME, "model.blk.{}.inv_freq"):
        for theta, exit_code in ((3e4, 0), (1e4, 1)):
            reports = diff_all(tmp_path, add(compute(3e4)), add(compute(theta), name), (None, None))
            assert [report.exit_code for report in reports] == [exit_code] * 3
