"""What a report of parity says about its scope: gradients, norm, clipping, update, and limits without an effect."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.parity_cases import ManualCase, codes
from torch import nn

from syncheck.messages import Compared, Note
from syncheck.parity.check import check_parity
from syncheck.report import words
from syncheck.report.formats import render_format
from syncheck.report.plain import render
from syncheck.report.summary import summarize

pytestmark = pytest.mark.syncheck(ranks=2)
UPDATE = (Compared.UPDATE, Compared.SETTINGS)
# The gradient norm of the case is between these limits.
LOW, HIGH = 0.1, 1e3


def sgd(_self: Any, model: Any) -> Any:
    """Return an optimizer whose step shows the gradient."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def clip_by_norm(limit: float) -> Any:
    """Return a method that clips at a limit of its own, whatever the case declares, and steps."""

    def finish(_self: Any, model: Any, optimizer: Any) -> Any:
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        return norm

    return finish


def clip_by_value(limit: float) -> Any:
    """Return a method that clips each element at a limit of its own, steps, and returns no norm."""

    def finish(_self: Any, model: Any, optimizer: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), limit)
        optimizer.step()

    return finish


def check(**changes: Any) -> tuple[Any, dict[Any, Any]]:
    """Return the report of a right program, and the parameters of its notes by code."""
    report = check_parity(type("Case", (ManualCase,), {"optimizer": sgd, **changes})())
    assert (codes(report), report.verdict) == ([], "in_sync")
    return report, {note.code: note.parameters for note in report.groups[0].notes}


def list_compared(notes: dict[Any, Any]) -> list[Any]:
    """Return the codes of the parts that were compared."""
    return [part.code for part in notes[Note.PARITY_COMPARED]["parts"]]


def test_without_a_step() -> None:
    """Without `finish`, only gradients are compared, and the summary and all formats say so."""
    report, notes = check()
    assert list_compared(notes) == [Compared.GRADIENTS]
    sentence = str(Note.PARITY_NO_FINISH())
    assert sentence in render(summarize(report))
    document = json.loads(render_format("json", report))
    codes_in_json = [message["code"] for message in document["groups"][0]["messages"]["notes"]]
    assert "Note.PARITY_NO_FINISH" in codes_in_json
    for name in ("text", "html", "markdown"):
        assert "not compared: gradient norm, clipping and update" in render_format(name, report)
    assert "were not compared" not in render_format("github", report)


@pytest.mark.parametrize("name", ["text", "html", "markdown"])
def test_the_scope_is_stated_once(name: str) -> None:
    """A report of a wrong program, which prints the details of its group, has each part of the scope once."""

    def halve(self: Any, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 0.5 * ManualCase.factor(self, targets, all_targets)

    for changes in ({}, {"factor": halve}):
        report = check_parity(type("Case", (ManualCase,), {"optimizer": sgd, **changes})(), "float32")
        text = render_format(name, report)
        scope = [str(note) for note in report.groups[0].notes if note.code in words.SCOPE]
        assert len(scope) == 2
        # Markdown writes names between other marks.
        assert [text.count(sentence[:40]) for sentence in scope] == [1, 1]


def test_a_norm_below_both_limits() -> None:
    """A program with another limit passes if neither limit has an effect; the summary says that nothing was clipped."""
    report, notes = check(max_norm=HIGH, finish=clip_by_norm(2 * HIGH))
    assert list_compared(notes) == [Compared.GRADIENTS, Compared.NORM, Compared.UNCLIPPED, *UPDATE]
    parameters = notes[Note.PARITY_SMALL_NORM]
    assert (parameters["limit"], LOW < parameters["norm"] < HIGH) == (HIGH, True)
    assert "clipping was not exercised" in render(summarize(report))


def test_everything_is_compared() -> None:
    """If the limit of the norm has an effect, all parts were compared, and no note names an omission."""
    _, notes = check(max_norm=LOW, finish=clip_by_norm(LOW))
    assert list_compared(notes) == [Compared.GRADIENTS, Compared.NORM, Compared.MAX_NORM, *UPDATE]
    assert notes.keys() == {Note.PARITY, Note.PARITY_COMPARED}


def test_clipping_by_value() -> None:
    """A limit of elements without an effect is named, with the largest element; so is a norm that nobody returned."""
    _, notes = check(clip_value=HIGH, finish=clip_by_value(2 * HIGH))
    assert list_compared(notes) == [Compared.GRADIENTS, Compared.UNCLIPPED, *UPDATE]
    assert 1e-3 < notes[Note.PARITY_SMALL_ELEMENTS]["largest"] < HIGH
    assert notes[Note.PARITY_NO_NORM]["ranks"] == (0, 1)
    _, notes = check(clip_value=1e-3, finish=clip_by_value(1e-3))
    assert list_compared(notes) == [Compared.GRADIENTS, Compared.CLIP_VALUE, *UPDATE]


def test_without_an_optimizer() -> None:
    """A case that only returns the norm is told that clipping and update were not compared."""

    def return_norm(_self: Any, model: Any, _optimizer: Any) -> Any:
        return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    _, notes = check(optimizer=ManualCase.optimizer, finish=return_norm)
    assert list_compared(notes) == [Compared.GRADIENTS, Compared.NORM]
    assert {Note.PARITY_NO_CLIPPING, Note.PARITY_NO_UPDATE} <= notes.keys()


def test_ranks_and_bytes_of_a_wrong_tensor() -> None:
    """A tensor that is wrong on all ranks names them, and each rank has the bytes of its gradients."""

    def halve(self: Any, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
        return 0.5 * ManualCase.factor(self, targets, all_targets)

    report = check_parity(type("Case", (ManualCase,), {"factor": halve})(), "float32")
    elements = sum(parameter.numel() for parameter in ManualCase().build().parameters())
    assert [replica.bytes for replica in report.groups[0].replicas] == [4 * elements] * 2
    assert {tensor.clusters for tensor in report.tensors} == {((0, 1),)}
