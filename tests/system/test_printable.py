"""Nothing that others wrote reaches a terminal as a command."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rlsdk.system.printable import json_line, printable

ATTACKS = "a\x1b[2J\x1b]0;title\x07\x1b]52;c;cm0=\x07\x9b1m\x7f\r\x08\u202egnp\ud800z"


def test_control_sequences_are_written_out() -> None:
    assert printable(ATTACKS) == (r"a\x1b[2J\x1b]0;title\x07\x1b]52;c;cm0=\x07\x9b1m\x7f\r\x08\u202egnp\ud800z")
    assert printable("two\n\tlines, ümlaut, 数, 🙂") == "two\n\tlines, ümlaut, 数, 🙂"


@given(st.text(st.characters(codec=None)))
def test_no_character_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = printable(text)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert not any(0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in shown)
    assert printable(shown) == shown
    shown.encode()


@given(st.text(st.characters(codec=None)))
def test_a_line_of_json_reads_back_equal(text: str) -> None:
    line = json_line({"response": text})
    assert json.loads(line) == {"response": text}
    assert printable(line) == line
