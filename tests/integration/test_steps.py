"""The optimizer's steps, in this process: rates, clipping, guards, tails."""

from pathlib import Path

import pytest
import torch
import train
from hyperpyyaml import load_hyperpyyaml
from local import frozen
from local.model import Whisper
from torch.utils._python_dispatch import TorchDispatchMode

import speechbrain as sb
from speechbrain.dataio.batch import PaddedBatch

HPARAMS = Path(train.__file__).with_name("hparams") / "quickstart.yaml"
LR, WARMUP = 1e-3, 3
aten = torch.ops.aten
# What Python asks a device for, at which it waits for all that was queued.
HOST_WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.equal,
    aten.is_nonzero,
}


class Plan:
    """Of the batches of an epoch: contexts, and a clip each."""

    def __init__(self, n_micro_batches):
        self.contexts = [5120] * n_micro_batches
        self.n_clips = [1] * n_micro_batches

    def __len__(self):
        return len(self.contexts)


class HostWaits(TorchDispatchMode):
    """Keeps the calls at which the host would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in HOST_WAITS:
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def make_brain(tmp_path, corpus, hub):
    """A Brain as the YAML makes it, with settings of one's own."""

    def make(precision="fp32", **options):
        overrides = {
            "data_folder": str(corpus),
            "output_folder": str(tmp_path),
            "whisper_hub": hub,
            "lr": LR,
            "warmup_steps": WARMUP,
            "precision": precision,
            **options,
        }
        with open(HPARAMS, encoding="utf-8") as file:
            hparams = load_hyperpyyaml(file, overrides)
        whisper = hparams["whisper"]()
        brain = train.ASR(
            seed=1,
            valid_interval_steps=0,
            early_stopping=hparams["early_stopping"],
            monitor=hparams["monitor"],
            of_memory={},
            test_loader_kwargs={},
            modules={"whisper": whisper},
            opt_class=hparams["opt_class"],
            hparams=hparams,
            run_opts={"device": "cpu", "precision": precision},
        )
        brain.whisper, brain.tokenizer = whisper, whisper.tokenizer
        brain.frozen = frozen.FrozenEncoder("")
        brain.train_sampler, brain.n_steps = Plan(100), 100
        sb.Brain.on_fit_start(brain)
        brain.monitor.begin(0, 100, 3, show=False)
        brain.on_stage_start(sb.Stage.TRAIN, 1)
        brain.modules.train()
        return brain

    return make


def clip(brain, seed, n_samples=8000, n_tokens=5, failed=False):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(300, 40000, (n_tokens,), generator=generator).tolist()
    tokenizer = brain.tokenizer
    return {
        "id": str(seed),
        "sig": torch.randn(n_samples, generator=generator) / 10,
        "failed": failed,
        "tokens_bos": torch.tensor([*tokenizer.prefix_tokens, *ids]),
        "tokens_eos": torch.tensor([*ids, tokenizer.eos_token_id]),
    }


def batch(brain, *seeds, **options):
    return PaddedBatch([clip(brain, seed, **options) for seed in seeds])


def step(brain, *batches):
    for one in batches:
        brain.step += 1
        brain.fit_batch(one)


def weights(brain):
    return {k: v.clone() for k, v in brain.whisper.trained_state().items()}


def assert_same_step(one, two):
    """The first step of Adam is the sign of the gradient times the rate, so
    that a few signs may differ where a gradient is all rounding."""
    for name in one:
        differ = (one[name] - two[name]).abs() > 1e-6
        assert differ.float().mean() < 0.01, name


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_the_rate_of_step_n_is_set_before_step_n(make_brain):
    brain = make_brain()
    rates = []
    update = brain.optimizer.step

    def record(*arguments, **options):
        rates.append(brain.optimizer.param_groups[0]["lr"])
        return update(*arguments, **options)

    brain.optimizer.step = record
    for n in range(6):
        step(brain, batch(brain, n))
    expected = [LR * min(n / WARMUP, (WARMUP / n) ** 0.5) for n in range(1, 7)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_the_embeddings_have_a_rate_of_their_own(make_brain):
    brain = make_brain(embedding_lr_multiplier=0.25)
    before = weights(brain)
    step(brain, batch(brain, 1))
    own = brain.whisper.model.decoder.embed_tokens.weight
    rates = {
        any(p is own for p in group["params"]): group["lr"]
        for group in brain.optimizer.param_groups
    }
    assert rates[True] == 0.25 * rates[False] > 0
    # Adam's first step is the rate, and the decay of what is there.
    for name, tensor in weights(brain).items():
        rate = rates[name == "decoder.embed_tokens.weight"]
        moved = (tensor - before[name] * (1 - rate * 0.01)).abs().max()
        assert moved == pytest.approx(rate, rel=0.02), name


def test_the_gradient_norm_is_clipped_over_every_group(make_brain):
    brain = make_brain()
    brain.max_grad_norm = 1e-3
    groups = brain.optimizer.param_groups
    assert len(groups) == 2
    parameters = [p for group in groups for p in group["params"]]
    norms = []
    update = brain.optimizer.step

    def record(*arguments, **options):
        gradients = [p.grad.norm() for p in parameters if p.grad is not None]
        norms.append(torch.stack(gradients).norm().item())
        return update(*arguments, **options)

    brain.optimizer.step = record
    step(brain, batch(brain, 1))
    assert norms == pytest.approx([1e-3], rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    make_brain, value
):
    brain = make_brain()
    step(brain, batch(brain, 1))
    before = weights(brain)
    poisoned = brain.whisper.model.decoder.layer_norm.bias
    hook = poisoned.register_hook(lambda grad: torch.full_like(grad, value))
    step(brain, batch(brain, 2))
    assert same(before, weights(brain))
    hook.remove()
    step(brain, batch(brain, 3))
    after = weights(brain)
    assert not same(before, after)
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_a_tail_of_micro_batches_still_makes_a_step(make_brain):
    brain = make_brain(grad_accumulation_factor=4)
    brain.train_sampler = Plan(6)
    start = weights(brain)
    step(brain, *(batch(brain, n) for n in range(5)))
    assert brain.optimizer_step == 1
    middle = weights(brain)
    assert not same(start, middle)
    step(brain, batch(brain, 5))
    assert brain.optimizer_step == 2
    assert not same(middle, weights(brain))


def test_micro_batches_of_any_size_are_one_batch(make_brain):
    """The mean is over tokens: clips of other lengths weigh what they hold."""
    whole, parts = make_brain(), make_brain(grad_accumulation_factor=2)
    long, short = dict(n_tokens=20), dict(n_tokens=2)
    items = [clip(whole, 1, **long), clip(whole, 2, **short)]
    step(whole, PaddedBatch(items))
    step(parts, batch(parts, 1, **long), batch(parts, 2, **short))
    one, two = weights(whole), weights(parts)
    assert_same_step(one, two)


def test_a_failed_clip_counts_nothing(make_brain):
    with_it, without = make_brain(), make_brain()
    good, bad = clip(with_it, 1), clip(with_it, 2, failed=True)
    step(with_it, PaddedBatch([good, bad]))
    step(without, PaddedBatch([good]))
    one, two = weights(with_it), weights(without)
    assert_same_step(one, two)


def test_augmented_batches_train_and_plain_ones_are_untouched(make_brain):
    brain = make_brain(augment=True, speeds=[95])
    lengths = []
    encode = Whisper.encode

    def record(self, wav, *rest):
        lengths.append(wav.shape[-1])
        return encode(self, wav, *rest)

    brain.whisper.encode = record.__get__(brain.whisper)
    step(brain, batch(brain, 1))
    brain.hparams.augment = False
    step(brain, batch(brain, 1))
    assert lengths[0] == pytest.approx(8000 / 0.95, rel=1e-3)
    assert lengths[1] == 8000


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_host_waits_for_no_micro_batch_and_no_step(make_brain, precision):
    brain = make_brain(precision, grad_accumulation_factor=2)
    batches = [batch(brain, 2 * n, 2 * n + 1) for n in range(4)]
    with HostWaits() as waits:
        torch.ones(1).item()
        assert len(waits.found) == 1
        step(brain, *batches)
    assert brain.optimizer_step == 2
    assert len(waits.found) == 1, waits.found


def test_the_longest_training_clip_fits_after_the_slowest_speed():
    perturb = sb.augment.time_domain.SpeedPerturb(16000, speeds=[95])
    slowed = perturb(torch.zeros(1, int(30 * 0.95 * 16000)))
    assert slowed.shape[-1] <= 30 * 16000
