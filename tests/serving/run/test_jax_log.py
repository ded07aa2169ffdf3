"""JAX's plugins that do not start, in a line each."""

import logging

from serving.run.jax_log import BACKENDS, shorten_jax_log


def test_an_error_of_a_plugin_is_a_line_and_what_is_not_there_is_none(caplog):
    shorten_jax_log()
    logger = logging.getLogger(BACKENDS)
    logger.info("Unable to initialize backend 'tpu'")
    try:
        raise RuntimeError("no cuDNN.\nIs it installed?")
    except RuntimeError:
        logger.exception("Exception when calling %s", "plugin.initialize()")
    logger.warning("a GPU may be present")
    assert caplog.messages == [
        "Exception when calling plugin.initialize(): no cuDNN. Is it installed?",
        "a GPU may be present",
    ]
    assert "Traceback" not in caplog.text
