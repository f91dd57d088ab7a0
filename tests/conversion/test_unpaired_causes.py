"""Tensors of two models that cannot be compared: unpaired names, other forms, no values, and infinite elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from support.found_causes import compare

import syncheck
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

LAYER = {"body.weight": torch.randn(8, 8), "body.bias": torch.randn(8)}


def test_a_renamed_tensor_with_exchanged_halves_is_not_called_unconverted(tmp_path: Path) -> None:
    """Each model lacks a tensor of the same size: the parts may be in another order, so nothing is proved."""
    weight = torch.randn(8, 4)
    renamed = {**LAYER, "out.linear.weight": torch.cat([weight[4:], weight[:4]])}
    findings, _ = compare(tmp_path, {**LAYER, "final.modulation.weight": weight}, renamed)
    assert (findings["SYN101"].certainty, findings["SYN101"].alternatives) == ("consistent", ("SYN305", "SYN306"))


def test_tensors_that_fit_into_unpaired_tensors_are_not_proved_missing(tmp_path: Path) -> None:
    """A fused tensor whose rows were permuted, and a tensor that lost a row, may be there under another name."""
    fused = torch.randn(24, 4)
    query, key, value = fused.split([16, 4, 4])
    permuted = query.view(4, 2, 2, 4).transpose(1, 2).reshape(16, 4)
    table = torch.randn(30, 6)
    pairs: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[str, ...]]] = [
        ({"a.wqkv": fused}, {"b.q": permuted, "b.k": key, "b.v": value}, ("SYN305", "SYN306")),
        ({"tok.weight": table}, {"embed.weight": torch.cat([table[:9], table[10:]])}, ("SYN318", "SYN309")),
        # Experts of one stack, with the rows of another expert.
        (
            {"a.experts": fused.view(3, 8, 4)},
            {"b.0": fused[16:], "b.1": fused[3:11], "b.2": fused[:8]},
            ("SYN305", "SYN306"),
        ),
    ]
    for source, copy, alternatives in pairs:
        findings, _ = compare(tmp_path, {**LAYER, **source}, {**LAYER, **copy})
        assert (findings["SYN101"].certainty, findings["SYN101"].alternatives) == ("consistent", alternatives)
    # No row of the other model is as long, or the other model lacks nothing.
    for copy in ({"embed.weight": table[:, :5].contiguous()}, {}):
        findings, _ = compare(tmp_path, {**LAYER, "tok.weight": table}, {**LAYER, **copy})
        assert findings["SYN101"].certainty == "proved"


def test_a_missing_tensor_is_proved(tmp_path: Path) -> None:
    """A tensor without a counterpart is missing."""
    findings, _ = compare(tmp_path, {**LAYER, "head.weight": torch.randn(8, 4)}, LAYER)
    assert findings["SYN101"].certainty == "proved"
    findings, _ = compare(tmp_path, {**LAYER, "a.w": torch.randn(8, 4)}, {**LAYER, "b.w": torch.randn(3, 3)})
    assert findings["SYN101"].certainty == "proved"


def test_forms_are_one_finding(tmp_path: Path) -> None:
    """The parts of a quantized or sparse tensor are not missing, and a meta tensor has no values."""
    quantized = torch.quantize_per_tensor(LAYER["body.weight"], 0.1, 0, torch.qint8)
    causes = []
    for form in (quantized, LAYER["body.weight"].to_sparse(), torch.empty(8, 8, device="meta")):
        findings, _ = compare(tmp_path, LAYER, {**LAYER, "body.weight": form})
        assert set(findings) == {"SYN102"}
        causes.append(findings["SYN102"].cause.code.name)
    assert causes == ["CAUSE_STORED", "CAUSE_STORED", "CAUSE_NO_VALUES"]


def test_infinity_in_one_model_is_said(tmp_path: Path) -> None:
    """A row that overflowed in one model is the cause, beside small differences."""
    overflowed = LAYER["body.weight"] * (1 + 1e-3 * torch.randn(8, 8))
    overflowed[3] = torch.inf
    findings, _ = compare(tmp_path, LAYER, {**LAYER, "body.weight": overflowed})
    assert findings["SYN399"].cause.code.name == "CAUSE_NOT_FINITE"


def test_few_elements_do_not_show_an_unrelated_tensor(tmp_path: Path) -> None:
    """A small tensor that was drawn again may be a strong change too; a large one may not."""
    certainties = []
    for width in (8, 32):
        layer = {"body.weight": torch.randn(width, width), "body.bias": torch.randn(width)}
        findings, _ = compare(tmp_path, layer, {**layer, "body.weight": torch.randn(width, width)})
        certainties.append(findings["SYN311"].certainty)
    assert certainties == ["consistent", "likely"]


def test_accepted_padding_and_orientation_are_in_sync(tmp_path: Path) -> None:
    """The option of the fix makes the exit code 0, because the common part and the orientation were compared."""
    weight = torch.randn(8, 4)
    for name, second in (("SYN309", torch.cat([weight, torch.zeros(2, 4)])), ("SYN304", weight.t().contiguous())):
        for label, tensor in (("a", weight), ("b", second)):
            torch.save({"model": {**LAYER, "embed.weight": tensor}}, tmp_path / f"{label}.pt")
        codes = []
        for allow in ((), (name,), ("SYN301",)):
            report = syncheck.diff(tmp_path / "a.pt", tmp_path / "b.pt", options=DiffOptions(allow=allow))
            codes.append(report.exit_code)
        assert codes == [1, 0, 1], name
