"""What is planned for a step, against what PyTorch takes."""

import json

import pytest
import torch
from conftest import SEED, noise
from local import frozen, lora, loss, memory, optimizers, quantized
from torch.profiler import ProfilerActivity, profile
from transformers import WhisperModel

N_PREFIX = 4
# adaptation, checkpointing, precision, clips, seconds, tokens
RUNS = [
    ("full", False, "fp32", 3, 2.24, 50),
    ("full", False, "bf16", 2, 5.0, 90),
    ("full", True, "fp32", 2, 5.0, 90),
    ("full", True, "bf16", 3, 2.24, 50),
    ("frozen_encoder", False, "fp32", 2, 1.92, 90),
    ("frozen_encoder", False, "bf16", 3, 4.8, 50),
    ("frozen_encoder", True, "bf16", 3, 1.92, 90),
]
QV = lora.Lora(4, 8, 0.05, ["q_proj", "v_proj"], "both")
ALL = lora.Lora(8, 8, 0.0, "all-linear", "both")
LAST = lora.Lora(8, 8, 0.1, r".*\.layers\.1\.(fc1|.*out_proj)", "both")
# the above; base, adapters: with dropout or not, of one half, of one layer
ADAPTERS = [
    ("lora", False, "fp32", 9, 4.8, 20, "fp32", QV),
    ("lora", False, "bf16", 9, 4.8, 20, "fp32", ALL),
    ("lora", False, "bf16", 9, 4.8, 20, "bf16", QV._replace(part="decoder")),
    ("lora", True, "bf16", 9, 4.8, 20, "int8", QV),
    ("lora", False, "fp32", 9, 4.8, 20, "int8", ALL._replace(part="encoder")),
    ("lora", False, "bf16", 9, 4.8, 20, "int4", LAST),
]

OTHERS = [RUNS[1], *(ADAPTERS[i] for i in (1, 2, 4, 5))]


@pytest.fixture
def made(build, quickstart):
    """A Whisper in training, as a run's settings make it."""

    def whisper(adaptation, checkpointing, base="fp32", adapters=None):
        found = build(adaptation)
        if adapters:  # as model.Whisper does, which takes longer
            options = quantized.loading_options(base, "cpu")
            found.model = WhisperModel.from_pretrained(quickstart, **options)
            quantized.prepare(found.model, base)
            names = lora.inject(found.model, adapters, SEED)
            heard = [n for n in names if n.startswith("encoder.")]
            found.freeze_encoder, found.lora = not heard, adapters
            found.identity["base_precision"] = base
        if checkpointing:
            found.model.gradient_checkpointing_enable({"use_reentrant": False})
        return found.train()

    return whisper


def mode_of(whisper, checkpointing, precision, **changed):
    settings = {
        "precision": precision,
        "base_precision": whisper.identity.get("base_precision", "fp32"),
        "gradient_checkpointing": checkpointing,
        "optimizer": "adamw",
        "device": "cpu",
        **changed,
    }
    adaptation = whisper.identity["adaptation"]
    return memory.mode_of(whisper.config, adaptation, whisper.lora, **settings)


def planned(
    whisper, checkpointing, precision, n_clips, seconds, n_tokens, **others
):
    mode = mode_of(whisper, checkpointing, precision)._replace(**others)
    batch = memory.Batch(n_clips, round(seconds * 16000), n_tokens)
    return memory.plan(whisper.config, mode, batch)


def autocast(precision):
    on = precision != "fp32"
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def hear(whisper, n_clips, seconds):
    """Encoder states and their mask, as training makes them."""
    wavs = torch.stack([noise(seconds, seed) for seed in range(n_clips)])
    if whisper.freeze_encoder:
        lengths = [wavs.shape[1]] * n_clips
        heard = frozen._padded(frozen._encode(whisper, lengths, wavs))
        return tuple(heard.values())
    return whisper.encode(wavs, wavs.shape[1]), None


def labels(n_clips, n_tokens):
    """Decoder input, and targets behind the prefix."""
    tokens = torch.arange(n_clips * n_tokens).view(n_clips, n_tokens)
    return tokens, tokens[:, : n_tokens - N_PREFIX + 1]


class Saved:
    """Bytes that autograd keeps: of tensors, and of the copies of weights."""

    def __init__(self, whisper):
        self.of_weights = {
            shape
            for p in whisper.parameters()
            for shape in (tuple(p.shape), tuple(p.shape[::-1]))
        }
        self.known = [
            *(p.untyped_storage() for p in whisper.parameters()),
            *(b.untyped_storage() for b in whisper.buffers()),
        ]
        self.seen = {s.data_ptr() for s in self.known}
        self.casts = 0

    def during(self, function, *args):
        """What a function returns, and the bytes that it leaves."""
        found = []

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.seen:
                self.seen.add(storage.data_ptr())
                self.known.append(storage)  # else its address is used again
                if tuple(tensor.shape) in self.of_weights:
                    self.casts += storage.nbytes()
                else:
                    found.append(storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            answer = function(*args)
        return answer, sum(found)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_what_the_forward_pass_keeps(made, run):
    adaptation, checkpointing, precision, n_clips, seconds, n_tokens = run
    whisper = made(adaptation, checkpointing)
    plan = planned(whisper, *run[1:])
    tokens, targets = labels(n_clips, n_tokens)
    saved = Saved(whisper)
    with autocast(precision):
        (states, mask), in_encoder = saved.during(
            hear, whisper, n_clips, seconds
        )
        hidden, in_decoder = saved.during(whisper.decode, tokens, states, mask)
        logits, before = saved.during(
            whisper.logits, hidden[:, -targets.shape[1] :]
        )
        mask_of_targets = torch.ones_like(targets).bool()
        _, in_loss = saved.during(
            loss.nll_sum, logits, targets, mask_of_targets, 0.1
        )
        if checkpointing:  # what one layer keeps when it is computed again
            whisper.eval()
            if not whisper.freeze_encoder:
                layer = whisper.model.encoder.layers[0]
                in_encoder += saved.during(layer, states.detach(), None)[1]
            layer = whisper.model.decoder.layers[0]
            arguments = hidden.detach(), None, states.detach()
            in_decoder += saved.during(layer, *arguments)[1]
    if whisper.freeze_encoder:
        assert in_encoder == 0
    else:
        assert plan["encoder activations"] == pytest.approx(
            in_encoder, rel=0.06
        )
    assert plan["decoder activations"] == pytest.approx(
        in_decoder + before, rel=0.06
    )
    chunks = memory._loss_chunks(
        whisper.config, memory.BYTES[precision], targets.numel()
    )
    assert plan["logits"] - chunks == pytest.approx(in_loss, rel=0.1)
    if not checkpointing:
        assert plan["autocast weights"] == pytest.approx(saved.casts, rel=0.02)


def step(whisper, optimizer, precision, n_clips, seconds, n_tokens):
    """Two micro-batches and the update, as in train.py."""
    tokens, targets = labels(n_clips, n_tokens)
    mask = torch.ones_like(targets).bool()
    for _ in range(2):
        with autocast(precision):
            states, heard = hear(whisper, n_clips, seconds)
            n_targets = targets.shape[1]
            _, logits = whisper(
                tokens, n_targets, encoder_states=states, encoder_mask=heard
            )
            del states
            nll, _ = loss.nll_sum(logits, targets, mask, 0.1)
        nll.backward()
        del logits
    parameters = [p for p in whisper.parameters() if p.grad is not None]
    torch._foreach_mul_([p.grad for p in parameters], torch.tensor(0.5))
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def peak_bytes(function, file):
    """Most that PyTorch's allocator has given out during a function."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        function()
    p.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    events = [e for e in events if e["name"] == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


def stored(whisper):
    """Bytes of the weights, with what bitsandbytes keeps beside them."""
    from bitsandbytes import nn

    tensors = list(whisper.parameters())
    for layer in whisper.modules():
        if isinstance(layer, nn.Linear4bit):
            state = layer.weight.quant_state
            tensors += [state.absmax, state.code, state.offset]
            tensors += [state.state2.absmax, state.state2.code]
        elif isinstance(layer, nn.Linear8bitLt):
            tensors.append(layer.state.SCB)
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize(
    "run",
    [
        *(RUNS[i] for i in (3, 5)),
        *(ADAPTERS[i] for i in (0, 3)),
        *(pytest.param(run, marks=pytest.mark.slow) for run in OTHERS),
    ],
    ids=str,
)
def test_the_peak_of_a_step(made, tmp_path, run):
    adaptation, checkpointing, *shape = run[:6]
    whisper = made(adaptation, checkpointing, *run[6:])
    trained = [p for p in whisper.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    step(whisper, optimizer, shape[0], 1, 0.64, 8)  # moments are made
    moments = sum(
        t.nbytes for s in optimizer.state.values() for t in s.values()
    )
    most = peak_bytes(
        lambda: step(whisper, optimizer, *shape), tmp_path / "trace"
    )
    plan = planned(whisper, checkpointing, *shape)
    weights = stored(whisper)
    assert plan["weights"] == pytest.approx(weights, rel=5e-4)
    assert plan["optimizer"] == pytest.approx(moments, rel=5e-3)
    assert plan["gradients"] == sum(p.nbytes for p in trained)
    assert plan["total"] == pytest.approx(weights + moments + most, rel=0.07)


def test_the_peak_of_an_8_bit_step_on_a_cpu(made, tmp_path):
    whisper, shape = made("full", False), ("bf16", 1, 1.92, 20)
    optimizer = optimizers.build(whisper.parameters(), "adamw_8bit", 1e-5, 0.0)
    step(whisper, optimizer, *shape)
    most = peak_bytes(
        lambda: step(whisper, optimizer, *shape), tmp_path / "trace"
    )
    plan = planned(whisper, False, *shape, optimizer="adamw_8bit")
    known = plan["weights"] + plan["optimizer"]
    assert plan["total"] == pytest.approx(known + most, rel=0.07)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_passes_through_a_frozen_layer(made, tmp_path, precision):
    whisper = made("frozen_encoder", False)
    layer, hidden = whisper.model.encoder.layers[0], torch.randn(8, 250, 144)
    with torch.no_grad(), autocast(precision):
        most = peak_bytes(lambda: layer(hidden, None), tmp_path / "trace")
    plan = planned(whisper, False, precision, 8, 1.28, 20)
    expected = hidden.nbytes + most
    assert plan["encoder activations"] == pytest.approx(expected, rel=0.1)
