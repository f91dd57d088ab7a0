"""A model without an output layer of its own is tied only if its configuration does not state the opposite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import llama
from support.listings import list_codes

import syncheck
from syncheck.messages import Note
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def make_tied() -> llama.Weights:
    """Return a model whose output layer has the values of its embedding, as a tensor of its own."""
    model = llama.make_model()
    return {**model, HEAD: model[EMBEDDING].copy()}


def drop(model: llama.Weights, name: str) -> llama.Weights:
    """Return a model without one tensor."""
    return {other: array for other, array in model.items() if other != name}


def find(report: syncheck.Report) -> dict[str, set[str]]:
    """Return the names of the tensors of each finding."""
    return {finding.code: set(finding.tensors) for finding in report.groups[-1].findings}


@pytest.mark.parametrize(
    ("config_a", "config_b", "missing"),
    [
        ({}, {"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": False}, {}, True),  # the files of B have no statement of their own
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        ({}, {"text_config": {"tie_word_embeddings": False}}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
        ({}, {"tie_word_embeddings": True}, False),
    ],
)
def test_a_head_that_a_configuration_does_not_tie_is_missing(
    tmp_path: Path, config_a: Any, config_b: Any, missing: bool
) -> None:
    """The configuration of the model without the head decides, then that of the other one; in both directions."""
    model = make_tied()
    a = llama.write(tmp_path / "a", model, llama.CONFIG | config_a)
    b = llama.write(tmp_path / "b", drop(model, HEAD), llama.CONFIG | config_b)
    for pair in ((a, b), (b, a)):
        report = syncheck.diff(*pair)
        assert report.exit_code == int(missing)
        assert find(report) == ({"SYN101": {HEAD}} if missing else {})


@pytest.mark.parametrize(
    ("model_type", "tied"), [("llama", False), ("mistral", False), ("qwen3", False), ("gemma", True), ("gemma2", True)]
)
def test_the_default_of_a_type_decides(tmp_path: Path, model_type: str, tied: bool) -> None:
    """A lost head is missing without a statement if the type does not tie it; the default equals its statement."""
    model = make_tied()
    config = llama.CONFIG | {"model_type": model_type}
    a = llama.write(tmp_path / "a", model, config)
    b = llama.write(tmp_path / "b", drop(model, HEAD), config)
    for pair in ((a, b), (b, a)):
        report = syncheck.diff(*pair)
        assert find(report) == ({} if tied else {"SYN101": {HEAD}})
        assert Note.ASSUMED_TIE not in list_codes(report.groups[-1].notes)

    for stated in (True, False):
        c = llama.write(tmp_path / "c", drop(model, HEAD), config | {"tie_word_embeddings": stated})
        for pair in ((b, c), (c, b)):
            # Without a head in either file, a model without a tie gets a random head.
            report = syncheck.diff(*pair)
            assert report.exit_code == (0 if stated == tied else 2)
            names = [value.name for value in report.groups[-1].values]
            assert names == ([] if stated == tied else ["(model setting tie_word_embeddings)"])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "my_model"},
        {"tie_word_embeddings": "false"},
        {"model_type": "llama", "tie_word_embeddings": None},
        {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
    ],
)
def test_an_unknown_tie_is_undecided(tmp_path: Path, config: dict[str, Any]) -> None:
    """Without a known default, or with two statements, nothing decides whether a lost head is tied."""
    model = make_tied()
    a = llama.write(tmp_path / "a", model, llama.CONFIG | config)
    b = llama.write(tmp_path / "b", drop(model, HEAD), llama.CONFIG | config)
    report = syncheck.diff(a, b)
    assert (report.exit_code, find(report)) == (2, {})
    (value,) = report.groups[-1].values
    assert (value.name, value.unknown) == ("(model setting tie_word_embeddings)", True)
    assert syncheck.diff(a, b, options=DiffOptions(exclude=(value.name,))).exit_code == 0


@pytest.mark.parametrize("config", [None, llama.CONFIG, llama.CONFIG | {"tie_word_embeddings": "false"}])
def test_without_a_statement_the_tie_is_noted(tmp_path: Path, config: Any) -> None:
    """A note names the missing head, and no note is needed if the configuration ties it."""
    model = make_tied()
    a = llama.write(tmp_path / "a", model, config)
    report = syncheck.diff(a, llama.write(tmp_path / "b", drop(model, HEAD), config))
    assert report.exit_code == (0 if config is None else 2)
    [note] = [note for note in report.groups[-1].notes if note.code is Note.ASSUMED_TIE]
    assert note.parameters == {"side": "B", "names": (HEAD,)}
    stated = llama.write(tmp_path / "c", drop(model, HEAD), llama.CONFIG | {"tie_word_embeddings": True})
    assert Note.ASSUMED_TIE not in list_codes(syncheck.diff(a, stated).groups[-1].notes)


def test_shared_memory_of_the_other_model(tmp_path: Path) -> None:
    """A file that stores both names once shows a tie of its own model, and not of one with another configuration."""
    embedding, body = torch.randn(20, 8), torch.randn(8, 8)
    tied = {"embed.weight": embedding, "fc.weight": body, "out_head.weight": embedding}
    torch.save({"model": tied}, tmp_path / "a.pth")
    for lost in ("out_head.weight", "embed.weight"):
        folder = tmp_path / lost
        rest = {name: tensor.numpy() for name, tensor in tied.items() if name != lost}
        for config, code in ((None, 0), ({"tie_word_embeddings": False}, 1)):
            report = syncheck.diff(tmp_path / "a.pth", llama.write(folder, rest, config))
            assert report.exit_code == code
            assert find(report) == ({"SYN101": {lost}} if code else {})


def test_an_accepted_inferred_map(tmp_path: Path) -> None:
    """Other names of all tensors do not hide the head that the configuration of B states."""
    model = make_tied()
    renamed = {f"net.{name}".replace("layers", "blocks"): array for name, array in drop(model, HEAD).items()}
    a = llama.write(tmp_path / "a", model)
    options = DiffOptions(accept_inferred=True)
    for config, code in (({"tie_word_embeddings": True}, 0), ({"tie_word_embeddings": False}, 1)):
        report = syncheck.diff(a, llama.write(tmp_path / "b", renamed, config), options=options)
        assert report.exit_code == code


def test_megatron_states_separate_weights(tmp_path: Path) -> None:
    """The arguments in a file of Megatron count like a configuration."""
    model = make_tied()
    converted = drop(llama.to_megatron(model), "output_layer.weight")
    tensors = {name: torch.from_numpy(array.copy()) for name, array in converted.items()}
    a = llama.write(tmp_path / "a", model, llama.CONFIG)
    for untie in (False, True):
        arguments = {
            "untie_embeddings_and_output_weights": untie,
            "make_vocab_size_divisible_by": 128,
            "num_attention_heads": 4,
            "group_query_attention": True,
            "num_query_groups": 2,
        }
        torch.save({"model": tensors, "args": arguments}, tmp_path / "b.pt")
        report = syncheck.diff(a, tmp_path / "b.pt")
        assert report.exit_code == int(untie)
