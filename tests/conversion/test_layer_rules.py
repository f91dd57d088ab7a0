"""An inferred map has one rule for all layers: a layer that needs another rule is a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama
from support.listings import find_all, list_codes, list_fields
from support.states import add_prefix, replace_in_names

import syncheck
from syncheck.conversion.numbering import find_numbering
from syncheck.messages import Note
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from support.llama import Weights

    Damage = Callable[[Weights, int], None]

LAYERS, WIDTH, INNER = 4, 32, 48


def make_pair(layers: int = LAYERS) -> tuple[Weights, Weights]:
    """Return a model, and the same model with other names, fused gate and up, and transposed output layers."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype("f4")

    a: Weights = {"embed.weight": draw(60, WIDTH)}
    b: Weights = {"tok.w": a["embed.weight"]}
    for i in range(layers):
        first, second = f"layers.{i}.", f"net.h.{i}."
        parts = {"gate": draw(INNER, WIDTH), "up": draw(INNER, WIDTH), "down": draw(WIDTH, INNER)}
        parts |= {"q": draw(WIDTH, WIDTH), "k": draw(WIDTH, WIDTH), "o": draw(WIDTH, WIDTH)}
        a |= {f"{first}{x}.weight": weight for x, weight in parts.items()}
        b |= {
            f"{second}w13.w": np.concatenate([parts["gate"], parts["up"]]),
            f"{second}query.w": llama.interleave(parts["q"]),
            f"{second}key.w": llama.interleave(parts["k"]),
            f"{second}out.w": parts["o"].T,
            f"{second}w2.w": parts["down"],
        }
    return a, b


def draw_matrices(number: int, size: int = 8) -> list[Any]:
    """Return square matrices."""
    return list(np.random.default_rng(0).standard_normal((number, size, size)).astype("f4"))


def name_layers(pattern: str, weights: list[Any], numbers: Iterable[int] = range(100)) -> Weights:
    """Return a model of one weight per layer. numbers: the numbers of the layers in their names."""
    return {pattern.format(number): weight for number, weight in zip(numbers, weights, strict=False)}


def swap_gate_and_up(b: Weights, i: int) -> None:
    """Exchange the halves of a fused tensor."""
    b[f"net.h.{i}.w13.w"] = np.roll(b[f"net.h.{i}.w13.w"], INNER, 0)


def forget_rotary(b: Weights, i: int) -> None:
    """Leave the rows of one query in the order of the source."""
    rows = b[f"net.h.{i}.query.w"].reshape(-1, llama.HEAD // 2, 2, WIDTH)
    b[f"net.h.{i}.query.w"] = rows.swapaxes(1, 2).reshape(WIDTH, WIDTH)


def forget_transposition(b: Weights, i: int) -> None:
    """Store one matrix in the other orientation."""
    b[f"net.h.{i}.out.w"] = b[f"net.h.{i}.out.w"].T


def exchange_layers(b: Weights, i: int) -> None:
    """Exchange one tensor with the next layer."""
    first, second = f"net.h.{i}.w2.w", f"net.h.{(i + 1) % LAYERS}.w2.w"
    b[first], b[second] = b[second], b[first]


def exchange_query_and_key(b: Weights, i: int) -> None:
    """Exchange two tensors of one layer."""
    first, second = f"net.h.{i}.query.w", f"net.h.{i}.key.w"
    b[first], b[second] = b[second], b[first]


def copy_a_layer(b: Weights, i: int) -> None:
    """Store the data of the first layer twice."""
    b[f"net.h.{i}.w2.w"] = b[f"net.h.{(i + 1) % LAYERS}.w2.w"]


FAULTS: list[tuple[Damage, set[str]]] = [
    (swap_gate_and_up, {"SYN305"}),
    (forget_rotary, {"SYN306"}),
    (forget_transposition, {"SYN304"}),
    (exchange_layers, {"SYN313"}),
    (exchange_query_and_key, {"SYN305", "SYN313"}),
    (copy_a_layer, {"SYN101", "SYN313"}),
]


@pytest.mark.parametrize(("damage", "codes"), FAULTS)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_one_layer_with_another_rule(tmp_path: Path, damage: Damage, codes: set[str], layer: int, turned: bool) -> None:
    """The finding names the layer, also if the user accepts the map."""
    a, b = make_pair()
    damage(b, layer)
    paths = [llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)]
    first, second = paths[::-1] if turned else paths
    for accept in (False, True):
        report = syncheck.diff(first, second, options=DiffOptions(accept_inferred=accept))
        found_codes = set(list_codes(report.groups[-1].findings))
        assert report.exit_code == 1
        assert found_codes & codes or turned, found_codes
        assert all(
            str(layer) in diff.name or str((layer + 1) % LAYERS) in diff.name for diff in report.groups[-1].tensors
        )


@pytest.mark.parametrize(("damage", "codes"), FAULTS[:5])
def test_one_of_two_layers(tmp_path: Path, damage: Damage, codes: set[str]) -> None:
    """Of two layers, nothing shows which one is wrong, but they do not have one rule."""
    a, b = make_pair(layers=2)
    damage(b, 0)
    report = syncheck.diff(llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b))
    assert report.exit_code == 1
    assert set(list_codes(report.groups[-1].findings)) & (codes | {"SYN305", "SYN313"})


def test_all_layers_in_another_order(tmp_path: Path) -> None:
    """Whole layers under other numbers are a finding, although every tensor of A is in B."""
    a, b = make_pair()
    order = [1, 2, 3, 0]
    moved = {name: weight for name, weight in b.items() if ".h." not in name}
    for name, weight in b.items():
        if ".h." in name:
            parts = name.split(".")
            parts[2] = str(order[int(parts[2])])
            moved[".".join(parts)] = weight
    report = syncheck.diff(llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", moved))
    assert set(list_codes(report.groups[-1].findings)) >= {"SYN313"}


@pytest.mark.parametrize("numbers", [range(1, 6), range(0, 10, 2), range(3, 36, 7)], ids=str)
def test_layers_with_other_numbers(tmp_path: Path, numbers: range) -> None:
    """Layers numbered from 1, or as in an nn.Sequential with other modules between them: undecided, and accepted."""
    weights = draw_matrices(5)
    a = llama.write(tmp_path / "a", name_layers("layers.{}.w", weights))
    b = llama.write(tmp_path / "b", name_layers("net.{}.w", weights, numbers))
    weights[1], weights[2] = weights[2], weights[1]
    c = llama.write(tmp_path / "c", name_layers("net.{}.w", weights, numbers))
    accept = DiffOptions(accept_inferred=True)
    assert [syncheck.diff(a, b).exit_code, syncheck.diff(a, b, options=accept).exit_code] == [2, 0]
    assert set(list_codes(syncheck.diff(a, c, options=accept).groups[-1].findings)) & {"SYN313", "SYN305"}


def test_layers_of_two_kinds(tmp_path: Path) -> None:
    """Layers that alternate between two kinds of modules have two rules, because each kind has names of its own."""
    rng = np.random.default_rng(0)
    a: Weights = {}
    b: Weights = {}
    for i in range(6):
        weight = rng.standard_normal((8, 8)).astype("f4")
        a[f"layers.{i}.mixer.weight"] = weight
        b[f"h.{i}.{'attn' if i % 2 else 'mamba'}.weight"] = weight
    first_path, second_path = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    for pair in ((first_path, second_path), (second_path, first_path)):
        assert syncheck.diff(*pair, options=DiffOptions(accept_inferred=True)).exit_code == 0


def test_modules_of_a_sequential(tmp_path: Path) -> None:
    """The first and the last module of a sequence may have names of their own in the other model."""
    weights = draw_matrices(5)
    named = dict(zip(["stem.w", "body.0.w", "body.1.w", "body.2.w", "head.w"], weights, strict=True))
    a = llama.write(tmp_path / "a", name_layers("net.{}.w", weights, range(0, 10, 2)))
    b = llama.write(tmp_path / "b", named)
    for pair in ((a, b), (b, a)):
        assert syncheck.diff(*pair, options=DiffOptions(accept_inferred=True)).exit_code == 0


def test_transposed_and_fused(tmp_path: Path) -> None:
    """GPT-2's layers with inputs first and query, key and value in one tensor, against single linear layers."""
    a: Weights = {}
    b: Weights = {}
    matrices = draw_matrices(9, 16)
    for i in range(3):
        parts = matrices[3 * i : 3 * i + 3]
        a[f"h.{i}.attn.c_attn.weight"], a[f"h.{i}.attn.c_attn.bias"] = np.concatenate(parts).T, np.zeros(48, "f4")
        for name, part in zip("qkv", parts, strict=True):
            b |= {f"layers.{i}.{name}.weight": part, f"layers.{i}.{name}.bias": np.zeros(16, "f4")}
    first_path, second_path = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    for pair in ((first_path, second_path), (second_path, first_path)):
        report = syncheck.diff(*pair, options=DiffOptions(accept_inferred=True))
        assert (report.exit_code, report.counts.identical) == (0, len(b))
    b["layers.1.q.weight"], b["layers.1.k.weight"] = b["layers.1.k.weight"], b["layers.1.q.weight"]
    report = syncheck.diff(first_path, llama.write(tmp_path / "c", b))
    assert set(list_codes(report.groups[-1].findings)) <= {"SYN305", "SYN313"}
    assert report.exit_code == 1


def test_positions_in_a_layer(tmp_path: Path) -> None:
    """The number of a module in its layer is constant, also if one layer has other data."""
    weights = draw_matrices(8)
    a = name_layers("layers.{}.fc1.w", weights[:4]) | name_layers("layers.{}.fc2.w", weights[4:])
    b = replace_in_names(replace_in_names(a, "fc1", "mlp.0"), "fc2", "mlp.2")
    b["layers.2.mlp.2.w"] = b["layers.2.mlp.2.w"] + 1
    first_path, second_path = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    for pair, name in (((first_path, second_path), "layers.2.fc2.w"), ((second_path, first_path), "layers.2.mlp.2.w")):
        (diff,) = syncheck.diff(*pair).groups[-1].tensors
        assert (diff.name, diff.mismatched) == (name, 64)


@pytest.mark.parametrize("layers", [2, 3, 4, 8])
@pytest.mark.parametrize(("start", "step"), [(0, 1), (1, 1), (3, 2)])
def test_layers_in_reverse_order(tmp_path: Path, layers: int, start: int, step: int) -> None:
    """Numbers from the other end are the same as exchanged layers; other numbers in the same order are accepted."""
    rng = np.random.default_rng(0)
    a: Weights = {}
    ordered: Weights = {}
    reverse: Weights = {}
    for i in range(layers):
        for name in ("w", "block.0.x", "block.1.x"):
            weight = rng.standard_normal((8, 8)).astype("f4")
            a[f"h.{i}.{name}"] = ordered[f"layers.{start + step * i}.{name}"] = weight
            reverse[f"layers.{start + step * (layers - 1 - i)}.{name}"] = weight
    accept = DiffOptions(accept_inferred=True)
    first_path = llama.write(tmp_path / "a", a)
    for name, model, code in (("ordered", ordered, 0), ("reverse", reverse, 1)):
        second_path = llama.write(tmp_path / name, model)
        assert syncheck.diff(first_path, second_path, options=accept).exit_code == code
        assert syncheck.diff(second_path, first_path, options=accept).exit_code == code


@pytest.mark.parametrize("join", [np.stack, np.concatenate])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)])
@pytest.mark.parametrize("layers", [1, 3])
def test_experts_in_one_tensor(tmp_path: Path, join: Any, order: tuple[int, ...], layers: int) -> None:
    """Experts that are stacked or joined have the order of their numbers in every layer."""
    a: Weights = {}
    b: Weights = {}
    matrices = np.array(draw_matrices(layers * len(order)))
    for i in range(layers):
        experts = matrices[i * len(order) : (i + 1) * len(order)]
        a |= name_layers(f"l.{i}.e.{{}}.w", list(experts))
        # Only the first layer has another order.
        b[f"x.{i}.all"] = join(list(experts[list(order)] if i == 0 else experts))
    first_path, second_path = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    for pair in ((first_path, second_path), (second_path, first_path)):
        report = syncheck.diff(*pair, options=DiffOptions(accept_inferred=True))
        assert report.exit_code == (order != (0, 1, 2, 3))


def test_a_stack_beside_another_tensor(tmp_path: Path) -> None:
    """A number and a transposed matrix with the pattern of a stack are no stacks."""
    torch = pytest.importorskip("torch")
    rows, matrices, matrix = torch.randn(2, 8), torch.randn(2, 4, 8), torch.randn(4, 8)
    a, b = str(tmp_path / "a.pth"), str(tmp_path / "b.pth")
    torch.save({"w.0": rows, "w.1": torch.tensor(3.5)}, a)
    torch.save({"v.0": rows[0].clone(), "v.1": rows[1].clone()}, b)
    (diff,) = syncheck.diff(a, b).groups[-1].tensors
    assert diff.name == "w.1"
    torch.save({"v.0": matrices[0].clone(), "v.1": matrices[1].clone(), "v.2": matrix}, a)
    for converted, code in ((matrix.T.contiguous(), 2), (matrix.T.contiguous().to(torch.bfloat16), 1)):
        torch.save({"w.0": matrices, "w.1": converted}, b)
        assert syncheck.diff(a, b).exit_code == code


def test_a_transposed_copy_of_one_layer(tmp_path: Path) -> None:
    """An extra tensor that could replace a layer is a difference, not an error."""
    a, b = make_pair()
    # The first of both tensors gets the data of the layer.
    b = {"net.h.1.extra.w": b["net.h.1.out.w"], **b}
    first_path, second_path = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    for pair in ((first_path, second_path), (second_path, first_path)):
        assert syncheck.diff(*pair, options=DiffOptions(accept_inferred=True)).exit_code == 1


@pytest.mark.parametrize("prefix", ["model.", "net."])
def test_a_prefix_of_all_names(tmp_path: Path, prefix: str) -> None:
    """A second `model.` is no container, but another naming, and a note names the prefix, also with an accepted map."""
    model = llama.make_model()
    second = add_prefix(model, prefix)
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", second)
    for pair, longer in (((a, b), "B"), ((b, a), "A")):
        for accept in (False, True):
            report = syncheck.diff(*pair, options=DiffOptions(accept_inferred=accept))
            (note,) = find_all(report.groups[-1].notes, code=Note.PREFIX)
            assert report.exit_code == (0 if accept else 2)
            assert (note.parameters["longer"], note.parameters["prefix"]) == (longer, prefix)


def test_prefixes_that_differ(tmp_path: Path) -> None:
    """Another name, besides the prefix, is another naming."""
    weights = draw_matrices(3)
    a = llama.write(tmp_path / "a", dict(zip(["h.0.w", "h.1.w", "head.w"], weights, strict=True)))
    b = llama.write(tmp_path / "b", dict(zip(["net.h.0.w", "net.h.1.w", "out.w"], weights, strict=True)))
    report = syncheck.diff(a, b)
    assert report.exit_code == 2
    assert Note.PREFIX not in list_codes(report.groups[-1].notes)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        # Equal numbers, and two of them exchanged.
        ([((0,), (0,)), ((1,), (2,)), ((2,), (1,)), ((3,), (3,))], {(0,): (0,), (1,): (1,), (2,): (2,), (3,): (3,)}),
        # Only two layers, exchanged.
        ([((0,), (1,)), ((1,), (0,))], {(0,): (0,), (1,): (1,)}),
        # Two numbers in the other order.
        ([((0, 1), (1, 0)), ((1, 0), (0, 1))], {(0, 1): (1, 0), (1, 0): (0, 1)}),
        # Another start.
        ([((0,), (1,)), ((1,), (2,))], {(0,): (1,), (1,): (2,)}),
        # A stage that is a number in one model only.
        ([((0,), (4, 0)), ((1,), (4, 1))], {(0,): (4, 0), (1,): (4, 1)}),
        # Gaps.
        ([((0,), (0,)), ((1,), (3,)), ((2,), (4,))], {(0,): (0,), (1,): (3,), (2,): (4,)}),
    ],
)
def test_numberings(pairs: Any, expected: Any) -> None:
    """The numbers of the parts follow one rule."""
    assert dict(find_numbering(pairs, sorted(list_fields(pairs, 0)), sorted(list_fields(pairs, 1)))) == expected
