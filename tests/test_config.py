"""Keys, defaults and messages of `speculation=`."""

import logging

import pytest

from assistgen import SpeculationConfig


def test_defaults():
    config = SpeculationConfig()
    assert config.method == "auto"
    assert [entry.method for entry in config.chain] == ["suffix"]
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


def test_nearest_name():
    with pytest.raises(ValueError, match="Did you mean `prompt_lookup_max`"):
        SpeculationConfig.from_dict({"promt_lookup_max": 3})
    with pytest.raises(ValueError, match="Did you mean `prompt_lookup`"):
        SpeculationConfig(method="promptlookup")


def test_auto_asks_what_it_was_given():
    model = object()
    config = SpeculationConfig(model=model, prompt_lookup_max=3)
    assert [entry.method for entry in config.chain] == ["suffix", "ngram", "draft_model"]
    assert [entry.model for entry in config.chain] == [None, None, model]
    assert config.chain[1].ngram_sizes == (2, 3)
    assert [entry.method for entry in SpeculationConfig(model=model).chain] == ["suffix", "draft_model"]
    with pytest.raises(ValueError, match="'auto' can't be one"):
        SpeculationConfig(drafters=["auto", "ngram"])


def test_depth_by_batch_size():
    config = SpeculationConfig(num_speculative_tokens=6, num_speculative_tokens_per_batch_size=[(1, 2, 9), [4, 8, 3], (9, 64, 0)])
    assert [config.max_draft_tokens_of(rows) for rows in (1, 2, 3, 4, 8, 9, 64, 500)] == [6, 6, 6, 3, 3, 0, 0, 0]
    for bad in ([(1, 2)], [(1, 2, "3")], [1, 2, 3], "1,2,3", [(1, 2, 3.0)]):
        with pytest.raises(TypeError, match="num_speculative_tokens_per_batch_size"):
            SpeculationConfig(num_speculative_tokens_per_batch_size=bad)
    for bad in ([(2, 1, 3)], [(0, 1, 3)], [(1, 2, -1)]):
        with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size"):
            SpeculationConfig(num_speculative_tokens_per_batch_size=bad)


def test_confidence():
    config = SpeculationConfig(method="draft_model", model=object(), depth="confidence")
    assert config.confidence_threshold == 0.4
    assert SpeculationConfig(method="suffix", depth="confidence", draft_confidence_threshold=0.7).suffix_settings[2] == 0.7
    assert SpeculationConfig(method="draft_model", model=object()).confidence_threshold is None
    for name in ("min_acceptance", "draft_confidence_threshold"):
        with pytest.raises(ValueError, match=name):
            SpeculationConfig(**{name: 1.5})
    with pytest.raises(ValueError, match="draft_timeout_s"):
        SpeculationConfig(draft_timeout_s=0)
