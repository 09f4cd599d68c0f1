"""What is trained, proved: by name, in each mode, and nothing beside it."""

import pytest
import torch
from conftest import LORA, N_TARGETS, TOKENS, clips, forward
from local import loss, optimizers

LAYERS = range(2)  # of each part of random:quickstart
WIDTH = 144
QV = ["q_proj", "v_proj"]
LINEAR = ["fc1", "fc2", "k_proj", "out_proj", *QV]
ATTENTIONS = {"encoder": ["self_attn"], "decoder": ["self_attn"]}
ATTENTIONS["decoder"] += ["encoder_attn"]
SINUSOIDS = "encoder.embed_positions.weight"


def adapters(parts, names):
    """Written out by the rule: parts x layers x projections x two."""
    layers = [
        f"{part}.layers.{n}.{place}{name}"
        for part in parts
        for n in LAYERS
        for name in names
        for place in (
            [""]
            if name.startswith("fc")
            else [f"{attention}." for attention in ATTENTIONS[part]]
        )
    ]
    return {f"{name}.lora_{x}.default.weight" for name in layers for x in "AB"}


def lora(
    base_precision="fp32",
    part="both",
    names=QV,
    given=None,
    checkpointing=False,
    optimizer="adamw",
):
    parts = ["encoder", "decoder"] if part == "both" else [part]
    low_rank = LORA._replace(part=part, target_modules=given or names)
    chosen = "lora", base_precision, low_rank
    return chosen, adapters(parts, names), checkpointing, optimizer


CASES = {
    "fp32": lora(),
    "encoder": lora(part="encoder"),
    "decoder": lora(part="decoder"),
    "decoder_int8": lora("int8", "decoder"),
    "bf16": lora("bf16"),
    "int8": lora("int8"),
    "int4": lora("int4"),
    "all_linear": lora(names=LINEAR, given="all-linear"),
    "all_linear_int4": lora("int4", names=LINEAR, given="all-linear"),
    "checkpointing": lora(checkpointing=True),
    "checkpointing_int4": lora("int4", checkpointing=True),
    "adamw_8bit": lora("int8", optimizer="adamw_8bit"),
}


def gradients(whisper):
    """Name to gradient, after a backward pass as in training."""
    whisper.zero_grad(set_to_none=True)
    targets = TOKENS[:, -N_TARGETS:]
    with torch.autocast("cpu", torch.bfloat16):
        logits = forward(whisper.train())[1]
    mask = torch.ones_like(targets, dtype=torch.bool)
    nll, n_tokens = loss.nll_sum(logits, targets, mask)
    (nll / n_tokens).backward()
    named = whisper.model.named_parameters()
    return {n: p.grad for n, p in named if p.grad is not None}


def content(whisper):
    """Every tensor of the model, quantised ones and their scales among them."""
    state = whisper.model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def changed(before, after):
    assert before.keys() == after.keys()
    return {k for k in before if not torch.equal(before[k], after[k])}


def optimizer_of(whisper, expected, name):
    """Without weight decay, so that a step shows gradients alone."""
    made = optimizers.build(whisper.parameters(), name, 1e-2, 0.0)
    named = dict(whisper.model.named_parameters())
    held = {id(p) for group in made.param_groups for p in group["params"]}
    assert held == {id(named[name]) for name in expected}
    return made


@pytest.mark.parametrize("case", CASES)
def test_adapters_alone_are_trained(build, case):
    """In the first step B alone moves, for A's gradient is that of B's zero."""
    chosen, expected, checkpointing, optimizer = CASES[case]
    whisper = build(*chosen)
    if checkpointing:
        whisper.model.gradient_checkpointing_enable({"use_reentrant": False})
    made = optimizer_of(whisper, expected, optimizer)
    named = dict(whisper.model.named_parameters())
    assert {n for n, p in named.items() if p.requires_grad} == expected
    for moving in ("lora_B", "lora_"):
        got = gradients(whisper)
        assert got.keys() == expected
        wanted = {name for name in expected if moving in name}
        assert {name for name, grad in got.items() if grad.any()} == wanted
        before = content(whisper)
        made.step()
        assert changed(before, content(whisper)) == wanted


def of_the_source(build):
    return set(build("full").model.state_dict()) - {SINUSOIDS}


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
@pytest.mark.parametrize("adaptation", ["full", "frozen_encoder"])
def test_all_weights_or_the_decoders_are_trained(build, adaptation, optimizer):
    if adaptation == "full" and optimizer == "adamw_8bit":
        pytest.skip("the decoder's are shown")
    expected = of_the_source(build)
    assert len(expected) == 4 + 2 + 2 * 15 + 2 + 2 + 2 * 24
    if adaptation == "frozen_encoder":
        expected = {n for n in expected if n.startswith("decoder.")}
    whisper = build(adaptation)
    made = optimizer_of(whisper, expected, optimizer)
    got = gradients(whisper)
    assert got.keys() == expected
    assert all(gradient.any() for gradient in got.values())
    before = content(whisper)
    made.step()
    assert changed(before, content(whisper)) == expected


@pytest.mark.parametrize(
    "part, n_layers", [("both", 12), ("encoder", 4), ("decoder", 8)]
)
def test_how_many_weights_are_trained(build, part, n_layers):
    whisper = build("lora", "fp32", LORA._replace(part=part))
    trained = whisper.trained_state().values()
    n_weights = n_layers * LORA.rank * 2 * WIDTH
    assert sum(tensor.numel() for tensor in trained) == n_weights


@pytest.mark.parametrize(
    "chosen, trains",
    [
        (("full",), True),
        (("frozen_encoder",), False),
        (CASES["fp32"][0], True),
        (CASES["encoder"][0], True),
        (CASES["decoder"][0], False),
        (CASES["decoder_int8"][0], False),
    ],
)
def test_an_encoder_of_which_nothing_is_trained_is_frozen(
    build, chosen, trains
):
    """It stays in evaluation mode, hears its full context, has no graph."""
    whisper = build(*chosen).train()
    assert whisper.freeze_encoder is not trains
    assert whisper.model.decoder.training
    modes = {module.training for module in whisper.model.encoder.modules()}
    assert modes == {trains}
    with torch.autocast("cpu", torch.bfloat16):
        states = whisper.encode(clips(seconds=1.0), 16000)
        assert states.requires_grad is trains
        full = whisper.encode(clips(seconds=1.0))[:, : states.shape[1]]
    assert torch.equal(states, full) is not trains
    whisper.eval()
    assert not any(module.training for module in whisper.modules())
