"""Keys, defaults and messages of `speculation=`."""

import logging

import pytest

from assistgen import SpeculationConfig, Speculator


def test_defaults():
    config = SpeculationConfig()
    assert config.method == "ngram"
    assert config.ngram_sizes == (2, 5)
    assert config.max_draft_tokens == 15
    assert SpeculationConfig(prompt_lookup_min=8).ngram_sizes == (8, 8)
    assert SpeculationConfig(prompt_lookup_max=1).ngram_sizes == (1, 1)


def test_a_vllm_config_runs(caplog):
    with caplog.at_level(logging.INFO, logger="assistgen"):
        config = SpeculationConfig.from_dict(
            {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
                "draft_tensor_parallel_size": 1,
            }
        )
    assert config.num_speculative_tokens == 5
    assert sum("draft_tensor_parallel_size" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("method", ["auto", "early_exit"])
def test_methods_of_open_issues(method):
    with pytest.raises(ValueError, match="not available yet"):
        Speculator({"method": method})


@pytest.mark.parametrize("key", ["min_acceptance", "draft_timeout_s", "compile", "lookup_ids"])
def test_reserved_keys(key):
    with pytest.raises(ValueError, match=f"`{key}` is not available yet"):
        SpeculationConfig.from_dict({"method": "ngram", key: 1})


def test_nearest_name():
    with pytest.raises(ValueError, match="Did you mean `prompt_lookup_max`"):
        SpeculationConfig.from_dict({"promt_lookup_max": 3})
    with pytest.raises(ValueError, match="Did you mean `prompt_lookup`"):
        SpeculationConfig(method="promptlookup")
