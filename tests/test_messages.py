"""Sentences as data: every template renders, and options have the names of their fields."""

from __future__ import annotations

import pickle

import pytest

from syncheck import messages
from syncheck.errors import OptionError
from syncheck.messages import Hint, Message, Note, Refusal, Sentence, Undecided
from syncheck.text import options_as_typed


class Example(Sentence):
    """Sentences with every kind of field."""

    RANKS = "on {ranks:ranks}"
    NAMES = "{names:names 2}"
    NUMBER = "{ratio:.2f} times"
    START = "{ranks:Ranks} {ranks:verb differs|differ}"
    LIST = "{parts:list}"
    SETS = "{groups:sets 2}"
    VALUES = "{values:by_rank}"
    COUNT = "{batches:count batch|batches} and {tensors:count tensor} {tensors:verb differs|differ}"
    WHOLE = "{number:number 3}"
    NESTED = "because: {reason}"
    OPTION = "{allow:option=SYN201}, {group_by:option REGEX}, {quick:option}"


def test_options_have_the_names_of_their_fields() -> None:
    """A message names an option by its field, also within another message."""
    message = Example.OPTION()
    assert str(message) == "allow='SYN201', group_by=REGEX, quick"
    assert str(Example.NESTED(reason=message)) == f"because: {message}"


def test_the_command_line_spells_options_with_dashes() -> None:
    """Within `options_as_typed`, messages and errors name options like arguments; before and after, by their fields."""
    message = Example.OPTION()
    errors = [
        OptionError("belong together", rtol=0.5, close=True),
        OptionError("no such code", allow=("a b", "SYN9")),
        pickle.loads(pickle.dumps(OptionError("must be at least 1", jobs=0))),
    ]
    with options_as_typed():
        assert str(message) == "--allow SYN201, --group-by REGEX, --quick"
        texts = list(map(str, errors))
    assert texts[0] == "--rtol 0.5 --close: belong together"
    assert texts[1] == "--allow 'a b' --allow SYN9: no such code"
    assert texts[2] == "--jobs 0: must be at least 1"
    assert str(message) == "allow='SYN201', group_by=REGEX, quick"
    assert str(errors[0]) == "rtol=0.5 close=True: belong together"


def test_a_missing_parameter_is_an_error() -> None:
    """A sentence never renders with the name of a parameter in place of its value."""
    with pytest.raises(KeyError):
        str(Note.REFERENCE())


def test_errors_name_their_options() -> None:
    """An option error starts with the field and its value."""
    assert str(OptionError("must be at least 1", jobs=0)) == "jobs=0: must be at least 1"
    assert str(OptionError("belong together")) == "belong together"


def test_fields() -> None:
    """Ranks, names and numbers are parameters, and text only after rendering."""
    assert str(Example.RANKS(ranks=(0, 2))) == "on ranks 0, 2"
    assert str(Example.NAMES(names=("a", "b", "c"))) == "a, b and 1 more"
    assert str(Example.NUMBER(ratio=0.4216)) == "0.42 times"
    assert str(Example.START(ranks=(1,))) == "Rank 1 differs"
    assert str(Example.START(ranks=(1, 3))) == "Ranks 1, 3 differ"
    assert str(Example.SETS(groups=((0, 2), (1, 3), (4, 5)))) == "ranks 0, 2 and ranks 1, 3 and 1 more"
    assert str(Example.LIST(parts=(Example.START(ranks=(1,)), 2))) == "Rank 1 differs, 2"
    assert str(Example.COUNT(batches=2, tensors=1)) == "2 batches and 1 tensor differs"
    assert [str(Example.WHOLE(number=number)) for number in (1000001, 12.0, 0.09253)] == ["1000001", "12", "0.0925"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({0: 1e-20, 1: 0.25, 2: 0.25}, "0.25 on ranks 1, 2 and 1e-20 on rank 0"),
        ({0: 0.1, 1: 0.10000001}, "0.1 on rank 0 and 0.10000001 on rank 1"),
        ({0: 2**62, 1: 2**62 + 1, 2: None}, f"{2**62} on rank 0 and {2**62 + 1} on rank 1 and missing on rank 2"),
        ({0: 65536.0, 1: float("inf")}, "65536 on rank 0 and inf on rank 1"),
        (
            dict(enumerate("abcde")),
            "'a' on rank 0 and 'b' on rank 1 and 'c' on rank 2 and 'd' on rank 3 and 1 more",
        ),
    ],
)
def test_values_by_rank(values: dict[int, object], text: str) -> None:
    """Different values look different, and the most common value comes first."""
    assert str(Example.VALUES(values=values)) == text


def test_braces_in_names_are_names() -> None:
    """A name from a file is never taken for a template."""
    assert str(Example.NAMES(names=("{quick:option}", "{0}"))) == "{quick:option}, {0}"


def test_messages_compare_by_code_and_parameters() -> None:
    """Equal messages have equal hashes, also after pickling."""
    message = Note.RANKS_ABSENT(ranks=(1,), world_size=2)
    assert message == Note.RANKS_ABSENT(ranks=(1,), world_size=2)
    assert message != Note.RANKS_ABSENT(ranks=(0,), world_size=2)
    assert pickle.loads(pickle.dumps(message)) == message
    assert len({message, pickle.loads(pickle.dumps(message))}) == 1


def test_templates_are_unique() -> None:
    """Templates are unique, because enum members with equal values would be one member."""
    enums = [result for result in vars(messages).values() if isinstance(result, type) and issubclass(result, Sentence)]
    assert {Note, Refusal, Hint, Undecided} <= set(enums)
    for enum in enums:
        assert len(enum.__members__) == len(enum)
        for sentence in enum:
            assert isinstance(sentence(), Message)
