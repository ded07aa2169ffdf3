"""vLLM's and Arctic's configuration of drafts gives our settings, or an error in words."""

import pytest
import yaml
from kit import run_command

from serving.cli.main import make_parser
from serving.run.flags import parse_args, settle


def fields_of(*flags: str) -> dict:
    """All settings and controls of the engine, by name."""
    config, _ = settle(parse_args(make_parser(), ["check", *flags]))
    return config.flat() | config.controls()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"method": "ngram", "model": null}', {"speculation": "ngram"}),
        (
            '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
            {
                "speculation": "ngram",
                "max_draft_tokens": 5,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 4,
            },
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, '
            '"suffix_decoding_min_token_prob": 0.2, "suffix_decoding_max_tree_depth": 24, '
            '"suffix_decoding_max_cached_requests": 0}',
            {
                "speculation": "suffix",
                "suffix_factor": 2.0,
                "suffix_min_prob": 0.2,
                "suffix_max_match": 24,
                "suffix_corpus_tokens": 0,
            },
        ),
        (
            '{"enable_suffix_decoding": true, "suffix_max_spec_offset": 1, '
            '"disable_by_batch_size": 32, "hard_disable_by_batch_size": 48}',
            {
                "speculation": "suffix",
                "suffix_offset": 1.0,
                "fixed_drafts": True,
                "draft_max_seqs": 32,
                "draft_off_seqs": 48,
            },
        ),
        (
            '{"method": "arctic", "model": "some/speculator", "num_speculative_tokens": 3}',
            {"speculation": "model", "draft_model": "some/speculator", "max_draft_tokens": 3},
        ),
        (
            '{"method": "arctic", "model": "some/speculator", "enable_suffix_decoding": true}',
            {"speculation": "hybrid", "draft_model": "some/speculator"},
        ),
    ],
)
def test_names_of_others_are_settings_and_limits_of_ours(text, expected):
    assert fields_of("--speculative-config", text) == fields_of() | expected


def test_a_config_that_is_printed_has_the_settings_alone(capsys):
    text = '{"method": "suffix", "suffix_max_spec_factor": 2}'
    code, out, _ = run_command(capsys, "check", "--print-config", "--speculative-config", text)
    printed = yaml.safe_load(out)
    assert code == 0 and printed["speculation"] == "suffix"
    assert "suffix_factor" not in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ("{}", "method is missing: ngram, suffix"),
        ('{"method": "eagle3"}', "method = 'eagle3' is not in this version"),
        ('{"method": "arctic", "enable_suffix_decoding": true}', "hybrid needs draft_model"),
        ('{"method": 5}', "method = 5 is not in this version"),
        ('{"method": "ngram", "num_spec_tokens": 5}', "did you mean num_speculative_tokens?"),
        ('{"method": "ngram", "model": "x"}', "draft_model has no meaning with speculation"),
        ('{"method": "suffix", "suffix_cache_max_requests": 9}', "--suffix-corpus-tokens"),
        ('{"method": "ngram", "num_speculative_tokens": "many"}', "must be a whole number"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "must be at least 1"),
        ('{"method": "ngram", "suffix_max_spec_factor": 2}', "has no meaning with speculation"),
        ('{"method": "suffix", "suffix_max_spec_factor": 65}', "suffix_factor: must be at most 64"),
        ('{"method": "suffix", "suffix_max_spec_factor": "x"}', "suffix_factor: must be a number"),
        (
            '{"method": "suffix", "suffix_max_spec_factor": 2, '
            '"suffix_decoding_max_spec_factor": 2}',
            "sets suffix_factor a second time",
        ),
    ],
)
def test_what_is_not_here_is_refused_in_words(capsys, text, words):
    code, _, err = run_command(capsys, "check", "--print-config", "--speculative-config", text)
    assert code == 2
    assert any(words in line for line in err), err


def test_the_same_setting_twice_is_refused(capsys):
    flags = ("--speculative-config", '{"method": "ngram"}', "--speculation", "suffix")
    code, _, err = run_command(capsys, "check", "--print-config", *flags)
    assert code == 2
    assert any("--speculation and --speculative-config" in line for line in err), err
