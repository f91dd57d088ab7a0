"""The JSON document: messages as data beside their texts, and documents of schema 1."""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from support.checkpoints import changed, network, save_pth
from support.hostile_report import hostile
from support.listings import find_all, list_codes, list_fields

import syncheck
from syncheck.messages import Note
from syncheck.readers import outputs
from syncheck.report import html, json_document
from syncheck.sentences import Sentence

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = json.loads((Path(syncheck.__file__).parent / "report" / "schema.json").read_text())


class Example(Sentence):
    """A sentence with values from files."""

    VALUES = "{values:by_rank}, {number}, {sets:sets}, {reason}"


def render(report: syncheck.Report) -> dict[str, Any]:
    """Return the document after checking it against the schema."""
    document: dict[str, Any] = json.loads(json_document.render(report, "0"))
    jsonschema.validate(document, SCHEMA)
    return document


def as_schema_1(value: Any) -> Any:
    """Return a document without the fields of schema 2."""
    if isinstance(value, dict):
        return {key: as_schema_1(item) for key, item in value.items() if key != "messages"}
    return [as_schema_1(item) for item in value] if isinstance(value, list) else value


def test_each_text_has_its_messages(tmp_path: Path) -> None:
    """Findings, notes and details of tensors have codes and parameters, and the same texts."""
    for rank in range(2):
        model = changed(network(), "running_mean", by=rank)
        if rank:
            del model["fc.bias"]
        save_pth(tmp_path / f"rank{rank}.pth", model)
    document = render(syncheck.compare(tmp_path))
    (group,) = document["groups"]
    assert document["schema"] == 2
    assert list_fields(group["messages"]["notes"], "text") == group["notes"]
    assert set(list_codes(group["findings"])) >= {"SYN101", "SYN201"}
    for finding in group["findings"]:
        messages = finding["messages"]
        assert "; ".join(list_fields(messages["evidence"], "text")) == finding["evidence"]
        assert messages["cause"]["text"] == finding["cause"]
        assert messages["fix"]["text"] == finding["fix"]
        assert messages["fix"]["code"].startswith(finding["code"])
    (missing,) = find_all(group["tensors"], name="fc.bias")
    assert missing["messages"]["detail"] == {"code": "Detail.MISSING", "text": missing["detail"],
                                             "parameters": {"ranks": [1]}}  # fmt: skip


def test_documents_of_schema_1_are_valid(tmp_path: Path) -> None:
    """A document of an earlier version validates, and a new report may replace it."""
    document = as_schema_1(render(hostile("calm"))) | {"schema": 1}
    jsonschema.validate(document, SCHEMA)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document, indent=1))
    outputs.check(str(path), "-o")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"schema": 3}, SCHEMA)


def test_parameters_are_json_values() -> None:
    """Values from files that JSON does not have become text of bounded length."""
    message = Example.VALUES(
        values={0: float("nan"), 1: 10**5000, 2: b"x" * 5000, 3: [[[1.0]]], 4: None, 5: True},
        number=float("inf"),
        sets=((0, 1), (2,)),
        reason=Note.QUICK(),
    )
    report = hostile("calm")
    group = replace(report.groups[0], notes=(Note.STORED(text="a"), message))
    document = render(replace(report, groups=(group,)))
    parameters = document["groups"][0]["messages"]["notes"][-1]["parameters"]
    values = parameters["values"]
    assert (values["0"], values["4"], values["5"]) == ("nan", None, True)
    assert len(values["1"]) < 300
    assert len(values["2"]) < 300
    assert parameters["number"] == "inf"
    assert parameters["sets"] == [[0, 1], [2]]
    assert parameters["reason"] == {"code": "Note.QUICK", "text": str(Note.QUICK()), "parameters": {}}


@pytest.mark.parametrize(
    ("constant", "text"), [(np.inf, "inf"), (-np.inf, "-inf")], ids=["infinity", "negative infinity"]
)
def test_infinite_constants_of_models_are_text(tmp_path: Path, constant: float, text: str) -> None:
    """A row of infinities in one of two models is evidence, and its value is text in every part of the document."""
    model = {"weight": np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)}
    save_pth(tmp_path / "a.pth", model)
    model["weight"] = model["weight"].copy()
    model["weight"][2] = constant
    save_pth(tmp_path / "b.pth", model)

    document = render(syncheck.diff(tmp_path / "a.pth", tmp_path / "b.pth"))
    (tensor,) = document["groups"][0]["tensors"]
    assert tensor["evidence"]["relation"]["parameters"]["value"] == text


def test_no_float_of_a_record_breaks_a_document(tmp_path: Path) -> None:
    """Infinity and NaN in any field of a report are text, and the same words in a name stay."""
    report = hostile("NaN, Infinity")
    group = replace(report.groups[0], step=float("-inf"))
    document = json.loads(json_document.render(replace(report, groups=(group,)), "0"), parse_constant=pytest.fail)
    assert document["groups"][0]["step"] == "-inf"
    assert document["groups"][0]["name"] == "NaN, Infinity"


@pytest.mark.parametrize("elements", [1, 512], ids=["one element", "all elements"])
def test_a_difference_beyond_the_largest_number_is_reported(tmp_path: Path, elements: int) -> None:
    """Two finite numbers of float64 whose difference is infinite are out of sync in every format."""
    model = {"weight": np.random.default_rng(0).standard_normal((8, 64))}
    for name, value in (("a", -1.7976e308), ("b", 1.7976e308)):
        model["weight"].flat[:elements] = value
        save_pth(tmp_path / f"{name}.pth", model)

    report = syncheck.diff(tmp_path / "a.pth", tmp_path / "b.pth")
    assert report.exit_code == 1
    render(report)
    assert "OUT OF SYNC" in html.render(report, "0")


def topics(kind: type[Sentence] = Sentence) -> Iterator[type[Sentence]]:
    """Yield all topics of syncheck."""
    for module in pkgutil.walk_packages(syncheck.__path__, "syncheck."):
        if module.name.startswith(("syncheck.diagnose", "syncheck.report")):
            importlib.import_module(module.name)
    for topic in kind.__subclasses__():
        if topic.__module__.startswith("syncheck."):
            yield topic


def test_codes_are_unique() -> None:
    """No two sentences have one code, and the sentences of a rule begin with its code."""
    keys = list_fields(chain.from_iterable(topics()), "key")
    assert len(keys) > 700
    assert len(set(keys)) == len(keys)
    assert {"Note.QUICK", "SYN201.CAUSE", "SYN309.FIX"} <= set(keys)
