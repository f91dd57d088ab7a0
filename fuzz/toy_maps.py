"""Write a map between the names of two libraries: a right map, or a map with a mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.toy_models import Model, Naming

# `wrong` confuses two parts of the second library, and `incomplete` lacks a part of both.
MAPS = ("right", "wrong", "incomplete")
_CONFUSED = {"gate.weight": "up.weight", "up.weight": "gate.weight"}
_OMITTED = "o.weight"


def render_map(model: Model, namings: tuple[Naming, Naming], kind: str) -> str:
    """Return a map in TOML from the names of two libraries to the parts of the model. kind: one of MAPS."""
    first, second = namings
    rules = _list_rules(model, first, {})
    # A rule for a name that both libraries use must not appear twice.
    confused = {"wrong": _CONFUSED}.get(kind, {})
    rules |= _list_rules(model, second, confused)
    if kind == "incomplete":
        for naming in namings:
            rules.pop(_get_template(naming, _OMITTED), None)
    return "\n".join(rules.values())


def _list_rules(model: Model, naming: Naming, confused: dict[str, str]) -> dict[str, str]:
    """Return the rule of each tensor, by its template."""
    rules = {}
    for part in model.parts:
        if naming.is_follower(part):
            continue
        members = naming.fused.get(part, (part,))
        targets = []
        for member in members:
            target = confused.get(member, member)
            targets.append(_quote(_add_layer(f"common.{target}", model, part)))
        template = _get_template(naming, part)
        lines = ["[[rule]]", f"name = {_quote(template)}", f"parts = [{', '.join(targets)}]", ""]
        if part in naming.fused:
            # Key and value projections may have fewer rows than the query projection.
            rows = [model.tensors[member, 0].shape[0] for member in members]
            lines.insert(3, f"sizes = {rows}")
        rules[template] = "\n".join(lines)
    return rules


def _get_template(naming: Naming, part: str) -> str:
    template = naming.prefix + naming.templates[part]
    return template.replace("<i>", "{i}")


def _add_layer(name: str, model: Model, part: str) -> str:
    """Return the name with a placeholder for the layer, if each layer has this part."""
    if part in model.layered_parts:
        return f"{name}.{{i}}"
    return name


def _quote(text: str) -> str:
    """Return a TOML string for a name without control characters."""
    escaped = text.replace("\\", "\\\\")
    escaped = escaped.replace('"', '\\"')
    return f'"{escaped}"'
