"""Linear layers over a few tokens by our own kernel: the same products, where they are quicker, and nothing else touched."""

import threading

import pytest
import torch

import assistgen
from assistgen import linear

from .tiny import build, pad_left, prompt


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 8), (64, 33), (301, 96)])
@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 16, 150])
def test_product_is_torchs(dtype, with_bias, outputs, inputs, tokens):
    torch.manual_seed(0)
    x, weight = torch.randn(1, tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    true = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    product = linear.product(x, weight, bias)
    assert product.dtype == dtype and product.shape == true.shape
    if dtype == torch.float32:
        torch.testing.assert_close(product, true.float(), rtol=1e-5, atol=1e-4)
    else:  # rounded once, to the nearest; a sum close to the middle may go the other way
        assert (product != true.to(dtype)).float().mean() < 0.02
        torch.testing.assert_close(product, true.to(dtype), rtol=2**-7, atol=2**-7)


@DTYPES
def test_what_is_not_finite_stays_so(dtype):
    x, weight = torch.ones(3, 40, dtype=dtype), torch.ones(30, 40, dtype=dtype)
    x[1, 3], x[2, 4] = float("nan"), float("-inf")
    product = linear.product(x, weight)
    assert (product[0] == 40).all() and product[1].isnan().all() and (product[2] == float("-inf")).all()


@DTYPES
def test_a_product_does_not_depend_on_its_neighbours(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(9, 200).to(dtype), torch.randn(50, 200).to(dtype)
    assert torch.equal(linear.product(x, weight)[:2], linear.product(x[:2], weight))


@pytest.fixture
def eager(monkeypatch):
    """Our own products wherever they can be; counts them."""
    counts = []
    product = linear.product
    monkeypatch.setattr(linear, "MIN_WEIGHT", 1)
    monkeypatch.setattr(linear, "_speed_up", lambda *args: 2.0)
    monkeypatch.setattr(linear, "product", lambda *args: counts.append(args[0].shape[-2]) or product(*args))
    return counts


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
def test_output_is_plain_generates(eager, family, rows, method):
    model = build(family, dtype=torch.float32)
    speculation = {"method": method, "depth": "constant"} | ({"model": build(family, 1, torch.float32)} if method == "draft_model" else {})
    prompts = [prompt(18 + row, seed=row, period=6) for row in range(rows)]
    inputs = pad_left(prompts)
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert eager == []
    fast = assistgen.generate(model, **inputs, max_new_tokens=24, do_sample=False, return_dict_in_generate=True, speculation=speculation)
    assert torch.equal(fast.sequences, plain)
    assert fast.speculation.num_drafts > 0
    assert len(eager) > 0


def test_not_before_the_first_token(eager):
    model, seen = build(dtype=torch.float32), []

    class Streamer:
        def put(self, value):
            seen.append(len(eager))

        def end(self):
            pass

    # A prompt of a few tokens is no reason either: what the first token waits for is torch's.
    assistgen.generate(model, prompt(12, period=4), max_new_tokens=12, do_sample=False, speculation="ngram", streamer=Streamer())
    assert seen[:2] == [0, 0] and seen[-1] > 0


def test_only_this_thread_and_only_while_entered(eager):
    layer, x = torch.nn.Linear(32, 16), torch.randn(4, 32)
    mode = linear.QuickProducts([(4, 4)])
    with torch.no_grad():
        with mode.over(4):
            layer(x)
            other = threading.Thread(target=lambda: layer(x))
            other.start()
            other.join()
        layer(x)
        with mode.over(5):
            layer(x)
    assert len(eager) == 1


def test_torchs_own_way_where_gradients_are_wanted(eager):
    layer, x = torch.nn.Linear(32, 16), torch.randn(4, 32)
    with torch.enable_grad(), linear.QuickProducts([(4, 4)]).over(4):
        layer(x).sum().backward()
    assert eager == [] and layer.weight.grad is not None


def test_which_models(eager):
    model = build(dtype=torch.float32)
    assert linear.quick_products(model) is not None
    assert linear.quick_products(build(dtype=torch.float64)) is None
    model.forward = torch.compile(model.forward, backend="eager")
    assert linear.quick_products(model) is None
    compiled = build(dtype=torch.float32)
    compiled.compile(backend="eager")
    assert linear.quick_products(compiled) is None
    assert linear.quick_products(torch.compile(build(dtype=torch.float32), backend="eager")) is None


def test_prompts(eager, monkeypatch):
    """A prefill goes torch's own way, but in bfloat16 on a CPU without instructions for it, if it is long."""
    model, other = build(dtype=torch.bfloat16), build(dtype=torch.float32)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not isinstance(linear.over_prompt(model, 100), linear.QuickProducts)
    monkeypatch.setattr(linear, "MIN_WORK", 1000)
    assert isinstance(linear.over_prompt(model, 100), linear.QuickProducts)
    assert not isinstance(linear.over_prompt(other, 100), linear.QuickProducts)
    assistgen.generate(model, prompt(100), max_new_tokens=1, do_sample=False, speculation="ngram")
    assert 100 in eager
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not isinstance(linear.over_prompt(model, 100), linear.QuickProducts)


def test_small_weights_are_left_alone():
    assert linear.quick_products(build(dtype=torch.float32)) is None


def test_where_it_is_not_quicker(eager, monkeypatch):
    speed_ups = {1: 1.0, 2: 0.9, 4: 1.5, 16: 1.0, 64: 1.0}
    monkeypatch.setattr(linear, "_speed_up", lambda dtype, outputs, inputs, tokens: speed_ups[tokens])
    mode = linear.quick_products(build(dtype=torch.float32))
    assert [n for n in range(80) if mode.over(n) is mode] == [4, 5, 6, 7, 8]
    monkeypatch.setattr(linear, "_speed_up", lambda *args: 1.0)
    assert linear.quick_products(build(dtype=torch.float32)) is None


def test_measured_once():
    linear._speed_up.cache_clear()
    first = linear._speed_up(torch.float32, 700, 600, 4)
    assert first > 0 and linear._speed_up(torch.float32, 700, 600, 4) == first


def test_after_a_fork(eager, monkeypatch):
    model = build(dtype=torch.float32)
    linear._forked.set()
    try:
        assert linear.quick_products(model) is None
    finally:
        linear._forked.clear()
