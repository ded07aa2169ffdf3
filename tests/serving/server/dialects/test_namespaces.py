"""Names of functions in namespaces."""

import re

from serving.server.dialects.namespaces import MOST, joined


def test_a_name_is_one_word_that_chats_allow():
    assert joined(None, "f") == joined("", "f") == "f"
    assert joined("mcp__rome", "f") == joined("mcp__rome__", "f") == "mcp__rome__f"
    long = [joined("mcp__" + "x" * 70, name) for name in ("f", "g")]
    assert len(set(long)) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", each) for each in long)
    assert all(len(each) == MOST for each in long)
