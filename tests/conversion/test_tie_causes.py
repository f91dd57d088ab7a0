"""Weights that are tied in one model and separate in the other one are named as such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.found_causes import compare, draw, find, flip, get_parameters
from support.listings import list_codes

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

    from support.found_causes import State

EMBEDDING, HEAD = draw(48, 16), draw(48, 16, seed=1)
BODY = draw(16, 16, seed=2)
PAIRS = [
    ("embed.weight", "head.weight"),
    ("transformer.wte.weight", "lm_head.weight"),
    ("model.embed_tokens.weight", "output.weight"),
    ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
]


def make(names: tuple[str, str], head: torch.Tensor | None) -> State:
    """Return a model whose output layer is the embedding, unless it has a tensor of its own."""
    embedding, output = names
    return {embedding: EMBEDDING, "fc.weight": BODY, output: EMBEDDING if head is None else head}


@pytest.mark.parametrize("names", PAIRS)
def test_a_tie_is_broken_or_new(tmp_path: Path, names: tuple[str, str]) -> None:
    """The head of B is random, or is the embedding again although A has a head of its own."""
    tied, separate = make(names, None), make(names, HEAD)
    for side, pair in (("A", (tied, separate)), ("B", (separate, tied))):
        findings, _ = compare(tmp_path, *pair)
        assert set(findings) == {"SYN314"}
        assert findings["SYN314"].tensors == (names[1],)
        assert findings["SYN314"].certainty == "proved"
        assert get_parameters(tmp_path, *pair, names[1]) == {"other": names[0], "tied": side}


def test_equal_copies_without_shared_memory(tmp_path: Path) -> None:
    """Ties are found in files that store both names, and beside a conversion to another dtype."""
    names = PAIRS[0]
    copies = make(names, EMBEDDING.clone())
    assert find(tmp_path, make(names, HEAD), copies) == {"SYN314": {"head.weight"}}
    converted = {name: tensor.bfloat16() for name, tensor in copies.items()}
    findings = find(tmp_path, make(names, HEAD), converted)
    assert findings == {"SYN307": {"embed.weight", "fc.weight"}, "SYN314": {"head.weight"}}


def test_shared_memory_of_any_name(tmp_path: Path) -> None:
    """Tensors with other names are tied if a file stores them once."""
    shared = {"first.weight": BODY, "second.weight": BODY, "fc.weight": BODY * 2}
    separate = {**shared, "second.weight": draw(16, 16, seed=8)}
    assert find(tmp_path, shared, separate) == {"SYN314": {"second.weight"}}
    assert find(tmp_path, separate, shared) == {"SYN314": {"second.weight"}}


@pytest.mark.parametrize("swapped", [False, True])
def test_a_flip_in_a_tied_head(tmp_path: Path, *, swapped: bool) -> None:
    """One bit of a stored copy is a bit flip, in A or in B."""
    pair = [make(PAIRS[0], EMBEDDING.clone()), make(PAIRS[0], flip(EMBEDDING, 85, 3))]
    assert find(tmp_path, *(pair[::-1] if swapped else pair)) == {"SYN220": {"head.weight"}}


def test_tied_pipeline_stages(tmp_path: Path) -> None:
    """The copy of the embedding on the last stage, which the metadata lists as tied, has other values."""
    stages = ({"embed.weight": EMBEDDING, "layers.0.weight": BODY}, {"layers.1.weight": BODY * 2, "head.weight": HEAD})
    for rank, model in enumerate(stages):
        metadata = syncheck.metadata(
            run="r", rank=rank, world_size=2, step=3, mesh={"pp": rank}, tied={"head.weight": "embed.weight"}
        )
        torch.save({"model": model, "syncheck": metadata}, tmp_path / f"pp_rank{rank}.pth")
    complete = {**stages[0], **stages[1], "head.weight": EMBEDDING.clone()}
    torch.save({"model": complete}, tmp_path / "full.pt")
    pair = [str(tmp_path / "pp_rank*.pth"), str(tmp_path / "full.pt")]
    for sources in (pair, pair[::-1]):
        report = syncheck.diff(*sources)
        assert report.exit_code == 1
        assert "SYN314" in list_codes(report.groups[-1].findings)
        assert not {"SYN305", "SYN311"} & set(list_codes(report.groups[-1].findings))


def test_better_explanations_than_a_tie(tmp_path: Path) -> None:
    """A head with rows in another order, more rows, or another scale is that, although it is tied no more."""
    tied = make(PAIRS[0], None)
    order = torch.arange(47, -1, -1)
    for head, code in (
        (EMBEDDING[order], "SYN305"),
        (torch.cat([EMBEDDING, HEAD[:16]]), "SYN318"),
        (EMBEDDING * 4, "SYN312"),
        (EMBEDDING.bfloat16().float(), "SYN307"),
    ):
        assert find(tmp_path, tied, make(PAIRS[0], head)) == {code: {"head.weight"}}


def test_models_that_differ_everywhere(tmp_path: Path) -> None:
    """If the embedding differs as well, a changed tie explains nothing."""
    second = {"embed.weight": draw(48, 16, seed=5), "fc.weight": BODY, "head.weight": draw(48, 16, seed=6)}
    assert find(tmp_path, make(PAIRS[0], None), second) == {"SYN311": {"embed.weight", "head.weight"}}


def test_equal_layers_are_no_tie(tmp_path: Path) -> None:
    """Two layers with equal values, that no file stores once, are not one weight."""
    state = {"layers.0.weight": BODY, "layers.1.weight": BODY.clone(), "fc.weight": BODY * 2}
    assert find(tmp_path, state, {**state, "layers.1.weight": draw(16, 16, seed=7)}) == {"SYN311": {"layers.1.weight"}}


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (EMBEDDING + 0.001 * HEAD, "SYN314"),
        (HEAD, "SYN314"),
        (flip(EMBEDDING, 85, 28), "SYN220"),
        ((EMBEDDING / EMBEDDING.abs().max() * 127).round() * EMBEDDING.abs().max() / 127, "SYN308"),
    ],
    ids=["drifted", "random", "flipped", "quantized"],
)
def test_a_head_beside_a_model_that_stores_the_weight_once(tmp_path: Path, head: torch.Tensor, code: str) -> None:
    """A has the embedding alone, as `save_pretrained` writes it, and its map ties the head to it."""
    body = {"model.layers.0.mlp.down_proj.weight": BODY, "model.norm.weight": draw(16, seed=5)}
    once = {"model.embed_tokens.weight": EMBEDDING, **body}
    findings = find(tmp_path, once, {**once, "lm_head.weight": head}, map="llama")
    assert findings == {code: {"lm_head.weight"}}
