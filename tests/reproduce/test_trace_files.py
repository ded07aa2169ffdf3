"""Traces that are not part of the package: found where they lie, and asked for by name."""

from shiftjax.reproduce.trace_files import TRACES, find_trace

LINES = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def test_a_trace_is_found_below_a_folder(tmp_path):
    below = tmp_path / "some" / "where"
    below.mkdir(parents=True)
    (below / "AzureLLMInferenceTrace_code.csv").write_text(LINES)
    found = find_trace("azure", tmp_path)
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in found] == [
        (4808, 10),
        (3180, 8),
    ]


def test_the_archived_part_goes_first(tmp_path):
    """In the format of the patched benchmark; its moments stay as they are."""
    (tmp_path / "AzureLLMInferenceTrace_code.csv").write_text(LINES)
    rows = [(0, 100, 5), (0, 200, 6), (2500, 300, 7)]
    line = '{"timestamp": %d, "input_length": %d, "output_length": %d}'
    archived = tmp_path / "AzureLLMInferenceTrace_code_15mins.jsonl"
    archived.write_text("\n".join(line % row for row in rows))
    found = find_trace("azure", tmp_path)
    assert [(each.arrival_seconds, each.num_prompt_tokens) for each in found] == [
        (0.0, 100),
        (0.0, 200),
        (2.5, 300),
    ]


def test_what_is_missing_is_said_with_the_place_where_it_is_published(tmp_path):
    for folder in (None, tmp_path):
        for name, trace in TRACES.items():
            words = find_trace(name, folder)
            assert all(file in words for file in trace.names)
            assert trace.published in words
    assert "--traces" in find_trace("azure", None)
    assert str(tmp_path) in find_trace("azure", tmp_path)
