"""Whatever stops plain decoding stops the accelerated call at the same token, also in the middle of an accepted block."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, StoppingCriteria

import assistgen
from assistgen import compat

from .oracles import OracleGenerator
from .tiny import VOCAB, build, prompt


pytestmark = pytest.mark.exactness

NEW = 40


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE with more entries than the alphabet."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=324, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat; the other cat sat there too, then it ran"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=None)


@pytest.fixture(scope="module")
def speaker(tokenizer):
    """A model over the tokenizer's vocabulary, a prompt, and what it says greedily."""
    model = build(vocab_size=len(tokenizer), seed=4)
    ids = torch.randint(2, len(tokenizer), (1, 12), generator=torch.Generator().manual_seed(1))
    return model, ids, model.generate(ids, max_new_tokens=NEW, do_sample=False)


def run(model, ids, truth, depth=6, **kwargs):
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_scores": True} | kwargs
    plain = model.generate(ids, **kwargs)
    streamed = Collect()
    fast = assistgen.generate(model, ids, speculation=OracleGenerator(truth, depth), streamer=streamed, **kwargs)
    assert torch.equal(plain.sequences, fast.sequences)
    assert streamed.ids == fast.sequences[0, ids.shape[1] :].tolist()
    assert streamed.ended == 1
    assert len(plain.scores) == len(fast.scores)
    assert compat.length_of(getattr(fast, compat.CACHE)) == fast.sequences.shape[1] - 1
    stats = fast.speculation
    assert stats.num_accepted_tokens + stats.target_forwards == stats.num_tokens or stats.num_tokens < NEW
    return fast


class Collect:
    """A streamer written for one token at a time."""

    def __init__(self):
        self.ids, self.ended, self.prompt = [], 0, None

    def put(self, value):
        if self.prompt is None:
            self.prompt = value
            return
        assert value.shape == (1,)
        self.ids.append(int(value))

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("position", range(1, 20))
def test_eos_inside_a_block(position):
    model, ids = build(seed=2), prompt(12)
    truth = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    eos = truth[0, 12 + position].item()
    fast = run(model, ids, truth, eos_token_id=eos)
    run(model, ids, truth, eos_token_id=[eos, 1])
    if fast.speculation.num_tokens > 2:
        assert fast.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("position", range(1, 24))
def test_stop_string_inside_a_block(speaker, tokenizer, position):
    model, ids, truth = speaker
    text = tokenizer.decode(truth[0, 12 + position : 12 + position + 2])
    if "\N{REPLACEMENT CHARACTER}" in text or not text:
        pytest.skip("not a string of whole characters")
    fast = run(model, ids, truth, stop_strings=[text], tokenizer=tokenizer)
    if fast.speculation.num_tokens > 2:
        assert fast.speculation.num_accepted_tokens > 0


def test_stop_strings_of_a_saved_configuration(speaker, tokenizer):
    model, ids, truth = speaker
    words = [tokenizer.decode(truth[0, 12 + p : 12 + p + 2]) for p in range(4, 30)]
    word = next(w for w in words if w and "\N{REPLACEMENT CHARACTER}" not in w)
    model.generation_config.stop_strings = [word]
    try:
        fast = run(model, ids, truth, tokenizer=tokenizer)
        assert fast.speculation.num_tokens < NEW
        with pytest.raises(ValueError, match="tokenizer"):
            assistgen.generate(model, ids, speculation="ngram", max_new_tokens=4)
    finally:
        model.generation_config.stop_strings = None


class LastToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        assert scores is None or len(scores) == input_ids.shape[1] - 12
        return torch.tensor([bool(input_ids[0, -1] == self.token)])


@pytest.mark.parametrize("position", range(1, 20))
def test_custom_criterion_sees_every_prefix_once(position):
    model, ids = build(seed=2), prompt(12)
    truth = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    criterion = LastToken(truth[0, 12 + position].item())
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False, stopping_criteria=[criterion])
    criterion.lengths.clear()
    fast = assistgen.generate(
        model, ids, max_new_tokens=NEW, do_sample=False, stopping_criteria=[criterion], speculation=OracleGenerator(truth, 7)
    )
    assert torch.equal(plain, fast)
    assert criterion.lengths == list(range(13, fast.shape[1] + 1))


@pytest.mark.parametrize("arguments", [{"max_length": 30}, {"max_new_tokens": 17}, {"max_new_tokens": 20, "min_new_tokens": 9}])
@pytest.mark.parametrize("eos", [None, 7, [3, 7, 9, 21]])
def test_lengths(arguments, eos):
    model, ids = build("qwen2", seed=1), prompt(12)
    truth = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    kwargs = {"do_sample": False, "eos_token_id": eos} | arguments
    plain = model.generate(ids, **kwargs)
    fast = assistgen.generate(model, ids, **kwargs, speculation=OracleGenerator(truth, 6), return_dict_in_generate=True)
    assert torch.equal(plain, fast.sequences)
    assert fast.speculation.num_accepted_tokens > 0 or fast.speculation.num_tokens < 4


def test_values_of_a_saved_generation_config():
    model, ids = build(seed=2), prompt(12)
    truth = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    config = model.generation_config
    config.eos_token_id, config.max_new_tokens, config.repetition_penalty = [truth[0, 12 + 15].item()], NEW, 1.05
    plain = model.generate(ids)
    fast = assistgen.generate(model, ids, speculation=OracleGenerator(plain, 6), return_dict_in_generate=True)
    assert torch.equal(plain, fast.sequences)
    assert fast.speculation.num_accepted_tokens > 0

    config.do_sample, config.temperature = True, 0.7
    torch.manual_seed(3)
    plain = model.generate(ids)
    torch.manual_seed(3)
    assert torch.equal(plain, assistgen.generate(model, ids, speculation="ngram"))


def test_max_time_stops():
    model, ids = build(), prompt(12)
    output = assistgen.generate(model, ids, speculation="ngram", max_new_tokens=900, max_time=0.2, do_sample=False)
    assert 12 < output.shape[1] < 912
    assert output.max() < VOCAB
