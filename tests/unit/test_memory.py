"""What is planned, against what PyTorch takes; what a full device is told."""

import json
import os

import pytest
import torch
from conftest import noise
from local import frozen, loss, memory, random_model
from torch.profiler import ProfilerActivity, profile

VOCABULARY = 51865
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


@pytest.fixture
def made(build):
    """A Whisper in training, as a run's settings make it."""

    def whisper(adaptation, checkpointing):
        found = build(adaptation)
        if checkpointing:
            found.model.gradient_checkpointing_enable({"use_reentrant": False})
        return found.train()

    return whisper


def counts(whisper):
    """(trained, frozen) weights."""
    trained = sum(t.numel() for t in whisper.trained_state().values())
    return trained, sum(p.numel() for p in whisper.parameters()) - trained


def planned(whisper, checkpointing, precision, n_clips, seconds, n_tokens):
    return memory.plan(
        whisper.config,
        *counts(whisper),
        whisper.freeze_encoder,
        precision,
        checkpointing,
        n_clips,
        round(seconds * 16000),
        n_tokens,
    )


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
        whisper.config, memory.BYTES[precision], n_clips * n_tokens
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


@pytest.mark.parametrize("run", [RUNS[i] for i in (0, 1, 3, 5)], ids=str)
def test_the_peak_of_a_step(made, tmp_path, run):
    adaptation, checkpointing, *shape = run
    whisper = made(adaptation, checkpointing)
    trained = [p for p in whisper.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    step(whisper, optimizer, *shape)  # moments are made
    moments = sum(
        t.nbytes for s in optimizer.state.values() for t in s.values()
    )
    weights = sum(p.nbytes for p in whisper.parameters())
    most = peak_bytes(
        lambda: step(whisper, optimizer, *shape), tmp_path / "trace"
    )
    plan = planned(whisper, checkpointing, *shape)
    assert plan["weights"] == weights
    assert plan["optimizer"] == pytest.approx(moments, rel=1e-3)
    assert plan["gradients"] == sum(p.nbytes for p in trained)
    assert plan["total"] == pytest.approx(weights + moments + most, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_passes_through_a_frozen_layer(made, tmp_path, precision):
    whisper = made("frozen_encoder", False)
    layer, hidden = whisper.model.encoder.layers[0], torch.randn(8, 250, 144)
    with torch.no_grad(), autocast(precision):
        most = peak_bytes(lambda: layer(hidden, None), tmp_path / "trace")
    plan = planned(whisper, False, precision, 8, 1.28, 20)
    expected = hidden.nbytes + most
    assert plan["encoder activations"] == pytest.approx(expected, rel=0.1)


class Tokenizer:
    """As many tokens as large-v3's, of which a configuration asks nothing."""

    def __len__(self):
        return 51866

    def convert_tokens_to_ids(self, token):
        return 50257


def large(n_clips=1, seconds=30, **changed):
    """The plan of large-v3, fully trained in bf16."""
    config = random_model._config(
        random_model.size_named("large-v3"), Tokenizer()
    )
    options = {
        "n_trained": 1_541_570_560,
        "n_frozen": 1_920_000,
        "freeze_encoder": False,
        "precision": "bf16",
        "gradient_checkpointing": False,
        "n_tokens": 40,
        **changed,
    }
    return memory.plan(
        config,
        n_clips=n_clips,
        context_samples=round(seconds * 16000),
        **options,
    )


def activations(plan):
    parts = ("encoder activations", "decoder activations", "logits")
    return sum(plan[part] for part in parts)


@pytest.mark.parametrize("seconds, gib", [(30, 2.84), (8, 0.81)])
def test_large_v3_keeps_as_much_as_was_measured(seconds, gib):
    """Saved tensors at true size, without attention's copy by frame."""
    clip = activations(large(2, seconds)) - activations(large(1, seconds))
    assert clip / 2**30 == pytest.approx(gib, rel=0.1)


def test_large_v3_in_a_table():
    plan = large()
    assert plan["weights"] / 1e9 == pytest.approx(6.17, abs=0.01)
    assert plan["autocast weights"] / 1e9 == pytest.approx(3.08, abs=0.01)
    assert sum(plan.values()) - plan["total"] >= plan["total"]


@pytest.mark.parametrize(
    "less",
    [
        {"gradient_checkpointing": True},
        {"freeze_encoder": True, "n_trained": 906e6, "n_frozen": 637e6},
        {"n_clips": 19},
        {"seconds": 6.08},
        {"n_tokens": 60},
        {"n_trained": 10e6, "n_frozen": 1534e6},
    ],
    ids=str,
)
def test_what_lowers_a_plan(less):
    usual = {"n_clips": 20, "seconds": 8, "n_tokens": 80}
    assert large(**{**usual, **less})["total"] < large(**usual)["total"]


def test_fp16_takes_as_much_as_bf16_and_less_than_fp32():
    assert large(precision="fp16") == large()
    plan = large(20, precision="fp32")
    assert plan["autocast weights"] == 0
    assert plan["total"] > large(20)["total"]
    with pytest.raises(KeyError):
        large(precision="int8")


def test_an_odd_number_of_samples_is_a_frame_more():
    assert large(seconds=4.001) == large(seconds=4.02)


def test_a_frozen_encoder_is_heard_a_second_longer_up_to_its_context():
    def heard(seconds):
        plan = large(seconds=seconds, freeze_encoder=True)
        return plan["decoder activations"]

    second = heard(8) - heard(7)
    assert heard(29) == heard(30) == pytest.approx(heard(8) + 21 * second)
    trained = large(seconds=9)["decoder activations"]
    assert heard(8) == trained
    passing = large(seconds=8, freeze_encoder=True)["encoder activations"]
    assert passing == large(freeze_encoder=True)["encoder activations"] > 0


@pytest.mark.parametrize(
    "n_bytes, expected",
    [
        (0, "1 MB"),
        (2e6, "2 MB"),
        (154.4e6, "154 MB"),
        (999.4e6, "999 MB"),
        (999.6e6, "1.0 GB"),
        (1.26e9, "1.3 GB"),
        (139.8e9, "139.8 GB"),
    ],
)
def test_readable(n_bytes, expected):
    assert memory.readable(n_bytes) == expected


def test_a_limit_counts_as_the_device(monkeypatch, tmp_path):
    memory_of_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.device_bytes("cpu") <= memory_of_host
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("123456789\n")
    limits = [str(tmp_path / name) for name in ("none", "max", "limit")]
    monkeypatch.setattr(memory, "CGROUPS", limits[:2])
    assert memory.device_bytes("cpu") == memory_of_host
    monkeypatch.setattr(memory, "CGROUPS", limits)
    assert memory.device_bytes("cpu") == 123456789
    assert memory.device_bytes("meta") is None
