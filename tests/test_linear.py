"""Linear layers over a few tokens by our own kernel: the same products, where they are quicker, and nothing else touched."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch
import torch.nn.utils.parametrize
from torch.overrides import TorchFunctionMode

import assistgen
from assistgen import linear, openmp
from assistgen.target import costs_of

from .tiny import build, pad_left, prompt


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=["best", "no tiles", "no pairs"])
def instructions(monkeypatch, request):
    """Of those that multiply bfloat16: the best of this CPU, and what there is without them."""
    from assistgen import kernels  # numba takes a second

    has = {"tiles": kernels.has_tiles("bf16"), "pairs": kernels.has_pairs()}
    if request.param == "no tiles" and not has["tiles"]:
        pytest.skip("has none")
    if request.param == "no pairs" and not any(has.values()):
        pytest.skip("has neither")
    monkeypatch.setattr(linear, "_kernel", linear._kernel.__wrapped__)
    if request.param != "best":
        monkeypatch.setattr(kernels, "has_tiles", lambda kind: False)
    if request.param == "no pairs":
        monkeypatch.setattr(kernels, "has_pairs", lambda: False)


@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 8), (6, 32), (64, 40), (301, 96)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 10, 65, 67, 150])
def test_product_is_torchs(instructions, dtype, with_bias, outputs, inputs, tokens):
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
@pytest.mark.parametrize("inputs", [40, 64])
def test_what_is_not_finite_stays_so(instructions, dtype, inputs):
    x, weight = torch.ones(3, inputs, dtype=dtype), torch.ones(30, inputs, dtype=dtype)
    x[1, 3], x[2, 4] = float("nan"), float("-inf")
    product = linear.product(x, weight)
    assert (product[0] == inputs).all() and product[1].isnan().all() and (product[2] == float("-inf")).all()


@DTYPES
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 6, 7, 8, 70])
@pytest.mark.parametrize("inputs", [192, 200])
def test_a_product_does_not_depend_on_its_neighbours(instructions, dtype, tokens, inputs):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(50, inputs).to(dtype)
    alone = torch.cat([linear.product(x[row : row + 1], weight) for row in range(tokens)])
    assert torch.equal(linear.product(x, weight), alone)


@pytest.fixture
def eager(monkeypatch):
    """Our own products wherever they can be, measured to be twice as quick; counts them and the measurements."""
    counts = []
    product = linear.product
    monkeypatch.setattr(linear, "_quick", {})
    monkeypatch.setattr(linear, "_asked", Counter())
    monkeypatch.setattr(linear, "MIN_WEIGHT", 1)
    monkeypatch.setattr(linear, "MIN_WORK", 0)
    monkeypatch.setattr(linear, "speed_up", lambda *args: counts.append("measured") or 2.0)
    monkeypatch.setattr(linear, "product", lambda *args: counts.append(args[0].numel() // args[0].shape[-1]) or product(*args))
    return counts


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
def test_output_is_plain_generates(eager, family, rows, method):
    model = build(family, dtype=torch.float32)
    prompts = [prompt(18 + row, seed=row, period=6) for row in range(rows)]
    inputs = pad_left(prompts)
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert eager == []
    # Drafts that are right: n-gram reads the answer, the draft model is the target once more.
    right = {"lookup_ids": plain} if method == "ngram" else {"model": build(family, dtype=torch.float32)}
    speculation = {"method": method, "depth": "constant", **right}
    fast = assistgen.generate(model, **inputs, max_new_tokens=24, do_sample=False, return_dict_in_generate=True, speculation=speculation)
    assert torch.equal(fast.sequences, plain)
    assert fast.speculation.num_drafts > 0
    assert fast.speculation.num_accepted_tokens > 0
    assert len(eager) > 0


@DTYPES
def test_not_before_the_first_token(eager, monkeypatch, dtype):
    """What the first token waits for is torch's; a short bfloat16 prompt's forward too."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    model, seen = build(dtype=dtype), []
    monkeypatch.setattr(linear, "MIN_WORK", 20 * linear.work(model, 1))

    class Streamer:
        def put(self, value):
            seen.append(len(eager))

        def end(self):
            pass

    assistgen.generate(model, prompt(12, period=4), max_new_tokens=24, do_sample=False, speculation="ngram", streamer=Streamer())
    assert seen[:2] == [0, 0] and seen[-1] > 0 and "measured" in eager


def test_only_this_thread_and_only_while_entered(eager):
    layer, x = torch.nn.Linear(32, 16), torch.randn(4, 32)

    def run():
        with torch.no_grad():
            layer(x)

    products, others = linear.QuickProducts([layer], [(4, 4)]), linear.QuickProducts([layer], [(4, 4)])
    with products.over(4):
        run()
        assert eager == [4]
        other = threading.Thread(target=run)
        other.start()
        other.join()
        with others.over(4):  # another call's
            run()
        run()
        assert eager == [4, 4, 4]
    run()
    with products.over(5):
        run()
    assert eager == [4, 4, 4]
    assert "forward" not in layer.__dict__


def test_whoever_leaves_last_takes_it_back(eager):
    layer, x = torch.nn.Linear(32, 16), torch.randn(4, 32)
    entered, left = threading.Event(), threading.Event()

    def stay():
        with linear.QuickProducts([layer], [(4, 4)]):
            entered.set()
            left.wait()
            with torch.no_grad():
                layer(x)

    other = threading.Thread(target=stay)
    with linear.QuickProducts([layer], [(4, 4)]):
        other.start()
        entered.wait()
    assert "forward" in layer.__dict__
    left.set()
    other.join()
    assert eager == [4] and "forward" not in layer.__dict__


def test_what_somebody_else_put_in_the_way_stays(eager):
    """accelerate's hooks do, for one: they bring the weights."""
    layer, x, seen = torch.nn.Linear(32, 16), torch.randn(4, 32), []
    layer.forward = lambda input: seen.append(1) or torch.nn.Linear.forward(layer, input)
    theirs = layer.forward
    with torch.no_grad(), linear.QuickProducts([layer], [(4, 4)]):
        layer(x)
    assert seen == [1] and eager == [] and layer.forward is theirs


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_is_made_when_asked_for_is_left_to_torch(eager, name):
    class Negative(torch.nn.Module):
        def forward(self, tensor):
            return -tensor

    layer, x = torch.nn.Linear(32, 16), torch.randn(4, 32)
    torch.nn.utils.parametrize.register_parametrization(layer, name, Negative())
    with torch.no_grad(), linear.QuickProducts([layer], [(4, 4)]):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert eager == []


def test_weights_that_are_exchanged_meanwhile(eager):
    layer, x = torch.nn.Linear(32, 16), torch.randn(4, 32)
    with torch.no_grad(), linear.QuickProducts([layer], [(4, 4)]):
        layer.weight.data = torch.zeros(16, 32)
        assert torch.equal(layer(x), layer.bias.expand(4, 16))
        layer.weight = torch.nn.Parameter(torch.zeros(8, 32))
        layer.bias = None
        assert torch.equal(layer(x), torch.zeros(4, 8))
    assert eager == []


def test_other_modes_see_the_linear_layers(eager):
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    products = linear.QuickProducts([torch.nn.Linear(32, 16)], [(4, 4)])
    with Watch():
        assert not isinstance(products.over(4), linear.QuickProducts)
    with torch.device("cpu"):
        assert isinstance(products.over(4), linear.QuickProducts)


def test_what_is_left_to_torch(eager):
    """Whatever the kernel's addresses don't fit, torch says what it is, or that it is wrong."""
    x, weight, bias = torch.randn(4, 32), torch.randn(16, 32), torch.randn(16)

    def layer_of(weight, bias=None):
        layer = torch.nn.Linear(2, 2)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.bias = torch.nn.Parameter(bias, requires_grad=False) if bias is not None else None
        return layer

    def by_products(x, weight, bias=None):
        layer = layer_of(weight, bias)
        with linear.QuickProducts([layer], [(1, 64)]):
            return layer(x)

    linear_ = torch.nn.functional.linear
    cases = [
        (x.double(), weight.double(), None),  # no type of the kernel's
        (x, weight[:2], None),  # fewer outputs than it takes at once
        (x[:, :30].contiguous(), weight[:, :30].contiguous(), bias),  # inputs left over
        (x, weight, bias[:1]),  # a bias for all outputs
        (x, weight.t().contiguous().t(), bias),  # not contiguous
        (x, weight, bias[:1].expand(16)),
        (torch.randn(0, 32), weight, bias),
        (x[0], weight[0], None),  # one output, as a vector
    ]
    for case in cases:
        with torch.no_grad():
            assert torch.equal(by_products(*case), linear_(*case))
    assert eager == []
    with torch.no_grad(), pytest.raises(RuntimeError):
        by_products(torch.randn(1, 48), weight)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert by_products(x, weight).dtype == torch.bfloat16
    assert eager == []
    with torch.no_grad():
        torch.testing.assert_close(by_products(x.t().contiguous().t(), weight, bias), x @ weight.t() + bias, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_products(x[1], weight, bias), weight @ x[1] + bias, rtol=1e-5, atol=1e-5)
    assert eager == [4, 1]


def test_several_threads():
    """Blocks of rows overlap at the end; the threads write the same there."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, weight = torch.randn(70, 1024), torch.randn(2002, 1024)
        torch.testing.assert_close(linear.product(x, weight), x @ weight.t(), rtol=1e-4, atol=1e-3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_in_turn_with_torchs_own():
    """Both may use what a processor keeps for each thread (the tiles of AMX)."""
    torch.manual_seed(0)
    weight, x = torch.randn(320, 192).bfloat16(), torch.randn(40, 192).bfloat16()
    ours, torchs = linear.product(x, weight), torch.nn.functional.linear(x, weight)
    for tokens in (40, 1, 17, 3) * 5:
        assert torch.equal(linear.product(x[:tokens], weight), ours[:tokens])
        torch.testing.assert_close(torch.nn.functional.linear(x[:tokens], weight), torchs[:tokens], rtol=2**-6, atol=2**-4)


def test_torchs_own_way_where_gradients_are_wanted(eager):
    layer, x = torch.nn.Linear(32, 16), torch.randn(4, 32)
    with torch.enable_grad(), linear.QuickProducts([layer], [(4, 4)]):
        layer(x).sum().backward()
    assert eager == [] and layer.weight.grad is not None


def test_which_models(eager):
    model = build(dtype=torch.float32)
    assert linear.quick_products(model, 100) is not None
    assert linear.quick_products(build(dtype=torch.float64), 100) is None
    model.forward = torch.compile(model.forward, backend="eager")
    assert linear.quick_products(model, 100) is None
    compiled = build(dtype=torch.float32)
    compiled.compile(backend="eager")
    assert linear.quick_products(compiled, 100) is None
    partly = build(dtype=torch.float32)
    partly.model = torch.compile(partly.model, backend="eager")
    assert linear.quick_products(partly, 100) is None
    assert linear.quick_products(torch.compile(build(dtype=torch.float32), backend="eager"), 100) is None


def test_prompts(eager, monkeypatch):
    """A prefill goes torch's own way, but in bfloat16 on a CPU without instructions for it, if it is long."""
    model, other = build(dtype=torch.bfloat16), build(dtype=torch.float32)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(linear, "MIN_WORK", linear.work(model, 100))
    assert not isinstance(linear.over_prompt(model, 99), linear.QuickProducts)
    assert isinstance(linear.over_prompt(model, 100), linear.QuickProducts)
    assert not isinstance(linear.over_prompt(other, 100), linear.QuickProducts)
    assistgen.generate(model, prompt(100), max_new_tokens=1, do_sample=False, speculation="ngram")
    assert 100 in eager
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not isinstance(linear.over_prompt(model, 100), linear.QuickProducts)


def test_what_is_measured_once_is_no_part_of_a_drafts_price(eager, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(linear, "speed_up", lambda *args: eager.append("measured") or time.sleep(0.2) or 2.0)
    model, draft = build(dtype=torch.bfloat16), build(dtype=torch.bfloat16, hidden_size=64)  # another shape is measured anew
    speculator = assistgen.Speculator({"method": "draft_model", "model": draft})
    assistgen.generate(model, prompt(40), max_new_tokens=8, do_sample=False, speculation=speculator)
    assert eager.count("measured") == 2 * len(linear.SAMPLES)
    assert 0.0 < costs_of(draft).reading(1) < 0.2 / 40


def test_small_weights_are_left_alone():
    assert linear.quick_products(build(dtype=torch.float32), 100) is None


def test_where_it_is_not_quicker(eager, monkeypatch):
    speed_ups = {1: 1.0, 2: 0.9, 4: 1.5, 8: 1.2, 16: 1.0, 32: 1.0, 64: 1.0}
    monkeypatch.setattr(linear, "speed_up", lambda dtype, outputs, inputs, tokens: speed_ups[tokens])
    mode = linear.quick_products(build(dtype=torch.float32), 100)
    assert [n for n in range(80) if mode.over(n) is mode] == [4, 5, 6, 7, 8]
    monkeypatch.setattr(linear, "_quick", {})
    monkeypatch.setattr(linear, "speed_up", lambda *args: 1.0)
    assert linear.quick_products(build(dtype=torch.float32), 100) is None


def test_measured_once_and_not_for_a_few_tokens(eager, monkeypatch):
    model = build(dtype=torch.float32)
    monkeypatch.setattr(linear, "MIN_WORK", linear.work(model, 50))
    assert linear.quick_products(model, 49) is None and eager == []
    assert linear.quick_products(model, 50) is not None
    assert linear.quick_products(model, 1) is not None and eager.count("measured") == len(linear.SAMPLES)
    other = build(dtype=torch.float32, hidden_size=64)
    monkeypatch.setattr(linear, "MIN_WORK", linear.work(other, 50))
    assert linear.quick_products(other, 25) is None
    assert linear.quick_products(other, 25) is not None  # calls add up


def test_measurement(monkeypatch):
    assert 0 < linear.speed_up(torch.float32, 700, 600, 4) < 1000
    model = build(dtype=torch.float32)
    monkeypatch.setattr(linear, "_quick", {})
    monkeypatch.setattr(linear, "MIN_WEIGHT", 1)
    monkeypatch.setattr(linear, "MIN_WORK", 0)
    monkeypatch.setattr(linear, "MARGIN", 0.0)
    products = linear.quick_products(model, 1)
    assert all(products.pays(low) and products.pays(high) for low, high in linear.SAMPLES.values())


def test_a_kernel_that_does_not_run_is_no_fault_of_the_call(eager, monkeypatch, caplog):
    def broken(*args):
        raise NotImplementedError("no compiler")

    monkeypatch.setattr(openmp, "_ruled_out", threading.Event())
    monkeypatch.setattr(linear, "product", broken)
    model, ids = build(dtype=torch.float32), prompt(12, period=4)
    fast = assistgen.generate(model, ids, max_new_tokens=12, do_sample=False, speculation="ngram")
    assert torch.equal(fast, model.generate(ids, max_new_tokens=12, do_sample=False))
    assert "kernel" in caplog.text


def test_where_torch_has_other_threads(eager, other_threads, caplog):
    """That is no fault of anybody's: torch's own way, and no word about it."""
    assert linear.quick_products(build(dtype=torch.float32), 100) is None
    assert eager == [] and caplog.text == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork():
    """In a process of its own: this one has run torch's threads."""
    code = """if True:
        import os, torch
        from assistgen import linear, openmp
        x, weight = torch.ones(4, 64), torch.ones(32, 64)
        linear.product(x, weight)
        child = os.fork()
        if child == 0:
            os._exit(0 if openmp.is_ruled_out() else 1)
        assert os.waitpid(child, 0)[1] == 0 and not openmp.is_ruled_out()
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_are_as_long_as_the_kernel_takes_them():
    from assistgen import kernels  # numba takes a second

    assert kernels.LANES == linear.LANES
