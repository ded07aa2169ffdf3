"""The engine as a service: what its one thread is spared."""

from kit import COMPLETION

from shiftjax.control import engine


def test_a_request_is_validated_once_and_not_by_the_engines_thread(client, monkeypatch):
    """It takes milliseconds for a long prompt, and every step would wait."""
    monkeypatch.setattr(engine, "validate_request", lambda request, limits: 1 // 0)
    assert client.post(COMPLETION, json={"prompt": "x"}).status_code == 200
