"""The engine as a service: what its one thread is spared."""

import pytest
from kit import COMPLETION, make_drafting_engine, running_server

from shiftjax.core import engine


def test_a_request_is_validated_once_and_not_by_the_engines_thread(client, monkeypatch):
    """It takes milliseconds for a long prompt, and every step would wait."""
    monkeypatch.setattr(engine, "validate_request", lambda request, limits: 1 // 0)
    assert client.post(COMPLETION, json={"prompt": "x"}).status_code == 200


def test_what_indexes_for_drafts_ends_with_the_server():
    engine = make_drafting_engine(speculation="suffix")
    drafting = engine.lanes[0].scheduler.lookahead._drafting
    with running_server(engine):
        drafting._indexer.submit(int).result()
    with pytest.raises(RuntimeError, match="after shutdown"):
        drafting._indexer.submit(int)
