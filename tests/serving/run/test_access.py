"""Which keys a server asks for."""

import pytest

from serving.run.access import read_keys
from serving.server.options import ServerOptions
from shiftjax.options import ConfigError


def test_keys_come_of_the_setting_the_file_and_vllms_variable(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("b\nc\n", "utf-8")
    options = ServerOptions(api_key="a", api_key_file=str(file))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert read_keys(options) == ("a", "b", "c") and read_keys(ServerOptions()) == ()
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert read_keys(options) == ("a", "v", "b", "c") and read_keys(ServerOptions()) == ("v",)


def test_a_file_without_keys_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(ServerOptions(api_key_file=str(tmp_path / "none")))
