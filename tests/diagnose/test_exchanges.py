"""Exchanged tensors of two models are stated as pairs and cycles, and all other copies alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import llama

import syncheck
from syncheck.diagnose.exchanges import Exchanged
from syncheck.diagnose.model_layouts import FusedOrder
from syncheck.diagnose.model_positions import WrongShard

if TYPE_CHECKING:
    from pathlib import Path

    from support.llama import Weights

    from syncheck.findings import Finding

LAYERS = range(3)
PARTS = ("q", "k", "v")


def make_model() -> Weights:
    """Return the query, key and value of some layers."""
    rng = np.random.default_rng(0)
    names = [f"layers.{i}.{part}.weight" for i in LAYERS for part in PARTS]
    return {name: rng.standard_normal((16, 16), np.float32) for name in names}


def diff_after(tmp_path: Path, sources: dict[str, str]) -> Finding:
    """Return the finding after tensors of a model get the values of others, by name."""
    model = make_model()
    copy = model | {name: model[source] for name, source in sources.items()}
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", copy)
    (finding,) = syncheck.diff(a, b).findings
    return finding


def test_a_pair(tmp_path: Path) -> None:
    """Two tensors with each other's values are one statement."""
    first, second = "layers.1.q.weight", "layers.1.k.weight"
    finding = diff_after(tmp_path, {first: second, second: first})
    (fact,) = finding.facts
    assert (finding.code, fact.code) == ("SYN305", Exchanged.PAIR)
    assert dict(fact.parameters) == {"first": first, "second": second}


def test_a_cycle(tmp_path: Path) -> None:
    """Each tensor of a cycle is followed by the one whose values it has."""
    q, k, v = (f"layers.0.{part}.weight" for part in PARTS)
    (fact,) = diff_after(tmp_path, {q: v, k: q, v: k}).facts
    assert fact.code == Exchanged.CYCLE
    assert dict(fact.parameters) == {"count": 3, "names": (q, v, k)}


def test_layers_in_a_cycle(tmp_path: Path) -> None:
    """Layers that are counted from another number are one cycle for each of their tensors."""
    sources = {f"layers.{i}.{part}.weight": f"layers.{(i + 1) % 3}.{part}.weight" for i in LAYERS for part in PARTS}
    finding = diff_after(tmp_path, sources)
    assert finding.code == "SYN313"
    assert [fact.code for fact in finding.facts] == [Exchanged.CYCLE] * 3
    assert {fact.parameters["names"][0] for fact in finding.facts} == {f"layers.0.{part}.weight" for part in PARTS}


@pytest.mark.parametrize("end", ["q", "v"])
def test_copies_are_no_exchange(tmp_path: Path, end: str) -> None:
    """A tensor that is copied, and a chain of copies that does not return, are stated one by one."""
    names = {part: f"layers.0.{part}.weight" for part in PARTS}
    finding = diff_after(tmp_path, {names["k"]: names["q"], names[end]: names["v" if end == "q" else "q"]})
    assert [fact.code for fact in finding.facts] == [FusedOrder.OTHER] * 2


def test_further_tensors_are_counted(tmp_path: Path) -> None:
    """Behind the limit of statements, the number is that of tensors, not of pairs."""
    rng = np.random.default_rng(0)
    names = [f"m{'abcdefghijkl'[i]}.norm.weight" for i in range(12)]
    model = {name: rng.standard_normal((16, 16), np.float32) for name in names}
    partners = dict(zip(names[::2], names[1::2], strict=True))
    partners |= {second: first for first, second in partners.items()}
    a = llama.write(tmp_path / "a", model)
    b = llama.write(tmp_path / "b", {name: model[partners[name]] for name in names})
    (finding,) = syncheck.diff(a, b).findings
    *pairs, more = finding.facts
    assert [fact.code for fact in pairs] == [Exchanged.PAIR] * 4
    assert (more.code, more.parameters["count"]) == (WrongShard.MORE, 4)
