"""Sentences as data: every template renders, and each surface writes options in its own way."""

from __future__ import annotations

import pickle

import pytest

from syncheck import messages
from syncheck.errors import COMMAND_LINE, PYTEST, PYTHON, TOML, OptionError, Words, spelling
from syncheck.messages import Hint, Message, Note, Refusal, Sentence, Undecided


class Example(Sentence):
    """Sentences with every kind of field."""

    RANKS = "on {ranks:ranks}"
    NAMES = "{names:names 2}"
    NUMBER = "{ratio:.2f} times"
    NESTED = "because: {reason}"
    OPTION = "{allow:option=SYN201}, {group_by:option REGEX}, {quick:option}"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (PYTHON, "allow='SYN201', group_by=REGEX, quick"),
        (COMMAND_LINE, "--allow SYN201, --group-by REGEX, --quick"),
        (PYTEST, "--syncheck-allow SYN201, --syncheck-group-by REGEX, --syncheck-quick"),
        (TOML, "tool.syncheck.allow = 'SYN201', tool.syncheck.group-by = REGEX, tool.syncheck.quick"),
    ],
)
def test_each_surface_writes_options(words: Words, text: str) -> None:
    """One message, four spellings; outside a surface, Python's."""
    message = Example.OPTION()
    with spelling(words):
        assert str(message) == text
        assert str(Example.NESTED(reason=message)) == f"because: {text}"
    assert str(message) == str(Example.OPTION())


def test_a_message_is_one_key_on_all_surfaces() -> None:
    """Its hash does not depend on how options are written."""
    kept = {Example.OPTION()}
    with spelling(COMMAND_LINE):
        assert Example.OPTION() in kept


def test_a_missing_parameter_is_an_error() -> None:
    """A sentence never renders with the name of a parameter in place of its value."""
    with pytest.raises(KeyError):
        str(Note.REFERENCE())


def test_errors_follow_the_surface() -> None:
    """An option error names its option as the surface that prints it does."""
    error = OptionError("must be at least 1", jobs=0)
    assert str(error) == "jobs=0: must be at least 1"
    with spelling(COMMAND_LINE):
        assert str(error) == "--jobs 0: must be at least 1"


def test_fields() -> None:
    """Ranks, names and numbers are parameters, and text only after rendering."""
    assert str(Example.RANKS(ranks=(0, 2))) == "on ranks 0, 2"
    assert str(Example.NAMES(names=("a", "b", "c"))) == "a, b and 1 more"
    assert str(Example.NUMBER(ratio=0.4216)) == "0.42 times"


def test_braces_in_names_are_names() -> None:
    """A name from a file is never taken for a template."""
    assert str(Example.NAMES(names=("{quick:option}", "{0}"))) == "{quick:option}, {0}"


def test_messages_compare_by_code_and_parameters() -> None:
    """Equal messages hash alike, also after another process sent one."""
    message = Note.RANKS_ABSENT(ranks=(1,), world_size=2)
    assert message == Note.RANKS_ABSENT(ranks=(1,), world_size=2)
    assert message != Note.RANKS_ABSENT(ranks=(0,), world_size=2)
    assert pickle.loads(pickle.dumps(message)) == message
    assert len({message, pickle.loads(pickle.dumps(message))}) == 1


def test_no_two_sentences_have_one_template() -> None:
    """Members with one value would be one member to Python."""
    enums = [found for found in vars(messages).values() if isinstance(found, type) and issubclass(found, Sentence)]
    assert {Note, Refusal, Hint, Undecided} <= set(enums)
    for enum in enums:
        assert len(enum.__members__) == len(enum)
        for sentence in enum:
            assert isinstance(sentence(), Message)
