"""A frozen base of less precision: what it is, and that it stays so."""

import copy
import itertools
import sys

import pytest
import torch
from conftest import LORA, forward
from local import encoder_cache, quantized

QUANTIZED = quantized.QUANTIZED
DECODER = LORA._replace(part="decoder")


def autocast(precision):
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast("cpu", dtype[precision], precision != "fp32")


def quantized_layers(whisper):
    """Name to layer."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return {
        name: layer
        for name, layer in whisper.model.named_modules()
        if isinstance(layer, (Linear4bit, Linear8bitLt))
    }


def content(whisper):
    """Every tensor, scales among them, in memory of its own."""
    state = whisper.model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


# What a base is made of


def test_a_base_in_bf16_is_the_source_rounded(build):
    source = build("full").model.state_dict()
    base = build("lora", "bf16").model.state_dict()
    rounded = set()
    for name, tensor in base.items():
        if "lora_" in name:
            assert tensor.dtype == torch.float32
            continue
        wanted = source[name.replace(".base_layer", "")]
        assert torch.equal(tensor, wanted.to(tensor.dtype)), name
        if tensor.dtype == torch.bfloat16:
            rounded.add(name.replace(".base_layer", ""))
        else:
            assert tensor.dtype == torch.float32
    kinds = ("conv", "_proj.", ".fc")
    assert rounded == {n for n in source if any(kind in n for kind in kinds)}


@pytest.mark.parametrize("base_precision", QUANTIZED)
def test_all_linear_layers_are_quantised_and_nothing_else(
    build, base_precision
):
    source = build("full")
    linear = {
        name: layer
        for name, layer in source.model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    assert len(linear) == 2 * 6 + 2 * 10
    whisper = build("lora", base_precision)
    found = {
        name.replace(".base_layer", ""): layer
        for name, layer in quantized_layers(whisper).items()
    }
    assert found.keys() == linear.keys()
    state = source.model.state_dict()
    for name, parameter in whisper.model.named_parameters():
        if parameter.is_floating_point():
            assert parameter.dtype == torch.float32, name
            if "lora_" not in name:
                wanted = state[name.replace(".base_layer", "")]
                assert torch.equal(parameter, wanted), name
    for name, layer in found.items():
        got, wanted = matrix(layer), linear[name].weight
        n_bytes = layer.weight.numel() * layer.weight.itemsize
        assert n_bytes == wanted.numel() // (2 if is_int4(layer) else 1)
        largest = wanted.abs().amax(None if is_int4(layer) else 1, True)
        step = 0.16 if is_int4(layer) else 0.5 / 127 + 1e-3
        assert ((got - wanted).abs() <= step * largest).all(), name


def is_int4(layer):
    return "quant_state" in dir(layer)


def matrix(layer):
    """What a quantised layer multiplies with, in fp32."""
    from bitsandbytes import functional

    weight = layer.weight
    if not is_int4(layer):
        return weight.data.float() * weight.SCB[:, None] / 127
    state = weight.quant_state
    assert state.quant_type == "nf4" and state.nested
    n_weights = state.shape.numel()  # in one row: blocks know no others
    flat = copy.copy(state)
    flat.shape = (1, n_weights)
    return functional.dequantize_4bit(weight.data, flat).view(state.shape)


@pytest.mark.parametrize("base_precision", ["fp32", "bf16"])
def test_nothing_is_asked_of_loading_where_nothing_is_quantised(base_precision):
    assert quantized.loading_options(base_precision, "cuda") == {}


# It stays what it is


@pytest.mark.parametrize("base_precision", ["bf16", *QUANTIZED])
def test_scoring_and_training_change_no_base(build, base_precision):
    """bitsandbytes casts biases in place, and may pack weights anew."""
    whisper = build("lora", base_precision)
    before = content(whisper)
    precisions = ["bf16", "fp32", "bf16"]
    if base_precision == "bf16":
        precisions = ["bf16"]
    for precision in precisions:
        with autocast(precision):
            with torch.no_grad():
                forward(whisper.eval())
            forward(whisper.train())[1].sum().backward()
        assert_same(content(whisper), before)
    trained = [p for p in whisper.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)


@pytest.mark.parametrize("base_precision", QUANTIZED)
def test_gradient_checkpointing_leaves_no_bias_behind(build, base_precision):
    """It ends the second forward of a layer as soon as it has enough."""
    whisper = build("lora", base_precision).train()
    whisper.model.gradient_checkpointing_enable({"use_reentrant": False})
    before = content(whisper)
    with autocast("bf16"):
        forward(whisper)[1].sum().backward()
    assert_same(content(whisper), before)


def test_a_failed_forward_leaves_no_bias_behind(build):
    whisper = build("lora", "int8")
    before = content(whisper)
    layers = quantized_layers(whisper).values()
    layer = next(one for one in layers if one.bias is not None)
    with autocast("bf16"), pytest.raises(RuntimeError):
        layer(torch.zeros(1, 7))  # of another width
    assert_same(content(whisper), before)


@pytest.mark.parametrize("base_precision", QUANTIZED)
def test_moving_a_base_changes_nothing(build, base_precision):
    whisper = build("lora", base_precision).eval()
    before = content(whisper)
    with torch.no_grad():
        logits = forward(whisper)[1]
        whisper.to("cpu")
        assert_same(content(whisper), before)
        assert torch.equal(forward(whisper)[1], logits)


@pytest.mark.parametrize("base_precision", QUANTIZED)
def test_a_copy_stands_alone(build, base_precision):
    whisper = build("lora", base_precision).eval()
    shared = {id(whisper.tokenizer): whisper.tokenizer}
    with torch.no_grad():
        logits = forward(whisper)[1]
        copied = copy.deepcopy(whisper, shared)
        assert torch.equal(forward(copied)[1], logits)
        for parameter in whisper.parameters():
            parameter.zero_()
        assert torch.equal(forward(copied)[1], logits)


# What it computes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("base_precision, atol", [("int8", 0.3), ("int4", 0)])
def test_training_hears_what_scoring_hears(
    build, base_precision, atol, precision
):
    """On a CPU, bitsandbytes rounds int8's inputs in scoring alone."""
    whisper = build("lora", base_precision)
    with autocast(precision):
        with torch.no_grad():
            scored = forward(whisper.eval())
        trained = forward(whisper.train())
        assert trained[1].requires_grad
        again = forward(whisper.eval())
    for one, two, three in zip(scored, trained, again):
        assert torch.equal(one, three)
        torch.testing.assert_close(one, two, atol=atol, rtol=0)


@pytest.mark.parametrize("base_precision", QUANTIZED)
@pytest.mark.parametrize(
    "precision, given",
    [
        ("fp32", torch.float32),
        *itertools.product(["bf16", "fp16"], [torch.float32, torch.bfloat16]),
    ],
)
def test_a_layer_gives_the_dtype_of_linear(
    build, base_precision, precision, given
):
    layers = quantized_layers(build("lora", base_precision))
    layer = layers["encoder.layers.0.fc1"]
    linear = torch.nn.Linear(layer.in_features, layer.out_features)
    linear.weight.data, linear.bias.data = matrix(layer), layer.bias.data
    inputs = torch.randn(2, 3, 144, generator=torch.Generator().manual_seed(1))
    with autocast(precision), torch.no_grad():
        got, wanted = layer(inputs.to(given)), linear(inputs.to(given))
    assert got.dtype == wanted.dtype
    close = {"atol": 0.05 if base_precision == "int8" else 0.02, "rtol": 0.02}
    torch.testing.assert_close(got, wanted, **close)


@pytest.mark.parametrize(
    "base_precision, error", [("bf16", 0), ("int8", 0.05), ("int4", 0.3)]
)
def test_logits_are_near_those_of_the_whole_base(build, base_precision, error):
    """As a share of their spread; a bf16 base is what autocast makes of one."""
    with torch.no_grad(), autocast("bf16"):
        wanted = forward(build("full").eval())[1].float()
        got = forward(build("lora", base_precision).eval())[1].float()
    share = ((got - wanted).std() / wanted.std()).item()
    assert error / 10 <= share <= error


# An encoder's identity, by which its states are kept


def fingerprint(whisper):
    return encoder_cache.fingerprint(whisper.model.encoder, torch.bfloat16)


@pytest.mark.parametrize("base_precision", QUANTIZED)
def test_the_identity_of_an_encoder(_built, build, base_precision):
    """Each has its own, at every load, and before and after it is used."""
    whisper = build("lora", base_precision, DECODER)
    assert whisper.freeze_encoder
    first = fingerprint(whisper)
    for precision in ("fp32", "bf16"):
        with torch.no_grad(), autocast(precision):
            forward(whisper.eval())
        assert fingerprint(whisper) == first
    assert fingerprint(_built.again("lora", base_precision, DECODER)) == first
    others = {fingerprint(build("lora", b, DECODER)) for b in ("fp32", "bf16")}
    assert len({first, *others}) == 3
    assert fingerprint(build("frozen_encoder")) in others


# Who can run it


@pytest.mark.parametrize(
    "base_precision, device, capability, message",
    [
        ("fp32", "mps", None, None),
        ("bf16", "cuda", (5, 0), None),
        ("int8", None, None, None),
        ("int8", "cpu", None, None),
        ("int4", "cpu", None, None),
        ("int8", "cuda", (7, 5), None),
        ("int4", "cuda:1", (6, 0), None),
        ("int8", "cuda:0", (7, 0), "has the compute capability 7.0, it takes "),
        ("int8", "cuda", (7, 0), "7.5; choose int4 or bf16 or fp32"),
        ("int4", "cuda", (5, 2), "6.0; choose bf16 or fp32"),
        ("int4", "mps", None, "not on mps; choose bf16 or fp32, or device=cud"),
        ("int8", "xpu:0", None, "not on xpu; choose bf16 or fp32, or device="),
    ],
)
def test_who_can_run_a_base(
    monkeypatch, base_precision, device, capability, message
):
    def asked(device):
        assert capability is not None
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
    told = quantized.problem(base_precision, device)
    assert told is None if message is None else message in told


def test_bitsandbytes_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for base_precision in QUANTIZED:
        told = quantized.problem(base_precision, "cpu")
        assert told.startswith("bitsandbytes cannot be used (")
        assert told.endswith("): pip install bitsandbytes")
    assert quantized.problem("bf16", "cpu") is None
