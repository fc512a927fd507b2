"""Stop strings against a search of each beginning of the text, one character longer at a time."""

from __future__ import annotations

import random

import pytest

from qcut.text.sequence_text import StopStrings


def naive(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The text before the string that is complete first, and the string: the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [s for s in strings if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def in_pieces(text: str, strings: list[str], cuts: list[int]) -> tuple[list[str], str | None]:
    stops = StopStrings(strings)
    given = [stops.add(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [*given, stops.rest()], stops.found


def test_random_texts_in_random_pieces() -> None:
    draw, found = random.Random(0), 0
    for _ in range(20000):
        text = "".join(draw.choices("ab\n", k=draw.randrange(0, 14)))
        strings = ["".join(draw.choices("ab\n", k=draw.randrange(1, 5))) for _ in range(draw.randrange(0, 4))]
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(0, 8)))
        given, stop = in_pieces(text, strings, cuts)
        assert ("".join(given), stop) == naive(text, strings), (text, strings, cuts)
        found += stop is not None
    assert 4000 < found < 16000


def test_nothing_is_held_that_cannot_become_a_stop() -> None:
    """After each piece, what is held is the beginning of a string, and the longest one at the text's end."""
    draw = random.Random(1)
    for _ in range(3000):
        strings = ["".join(draw.choices("ab", k=draw.randrange(1, 6))) for _ in range(2)]
        stops, text, given = StopStrings(strings), "", ""
        for _ in range(8):
            piece = "".join(draw.choices("abc", k=draw.randrange(0, 4)))
            text, given = text + piece, given + stops.add(piece)
            if stops.found:
                break
            beginnings = {s[:size] for s in strings for size in range(len(s))}
            assert text[len(given) :] == max((b for b in beginnings if text.endswith(b)), key=len)


@pytest.mark.parametrize(
    ("strings", "want", "stop"),
    [
        (["</s>"], "one <", "</s>"),
        (["two", "</s>"], "one <", "</s>"),
        (["s> tw", "</s> two"], "one <</", "s> tw"),
        (["/s>", "</s>"], "one <", "</s>"),
        (["none"], "one <</s> two", None),
        ([], "one <</s> two", None),
    ],
)
def test_first_complete_string_ends_the_text(strings: list[str], want: str, stop: str | None) -> None:
    text = "one <</s> two"
    for cuts in ([], list(range(1, len(text))), [5], [6, 7]):
        given, found = in_pieces(text, strings, cuts)
        assert ("".join(given), found) == (want, stop)


def test_nothing_comes_after_the_end() -> None:
    stops = StopStrings(["end"])
    assert [stops.add("an e"), stops.add("nd, more"), stops.add("more"), stops.rest()] == ["an ", "", "", ""]
