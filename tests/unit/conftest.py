"""What the unit tests share: small audio, and one small model a session.

In: nothing; no network.
Out: fixtures, and wav files made of noise.
"""

import contextlib
import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from local import audio, lora, model, random_model, settings, sources
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

import speechbrain as sb

torch.set_num_threads(1)  # small tensors; others may use the cores
SEED = 3
HPARAMS = Path(settings.__file__).parents[1] / "hparams"
QUICKSTART = HPARAMS / "quickstart.yaml"
LORA = lora.Lora(4, 8, 0.0, ["q_proj", "v_proj"], "both")


def noise(seconds, seed=0, loudness=0.1):
    """(n_samples,) at 16 kHz; a beat over noise, so that frames differ."""
    generator = torch.Generator().manual_seed(seed)
    n_samples = round(seconds * audio.SAMPLE_RATE)
    samples = torch.randn(n_samples, generator=generator)
    beat = torch.sin(torch.arange(n_samples) * (2 + seed) * 1e-3) ** 2
    return loudness * beat * samples


def write_audio(path, seconds=1.0, rate=16000, channels=1, seed=0, **options):
    """A file of noise in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(seed).normal(
        0, 0.1, (round(seconds * rate), channels)
    )
    soundfile.write(path, samples.clip(-1, 1), rate, **options)
    return path


def duration(path, start=None, stop=None):
    """Seconds of a clip, 0.0 where it holds no samples."""
    samples, rate = audio.decode(path, start, stop)
    return len(samples) / rate


PREFIX = [50258, 50264, 50359, 50363]
TOKENS = torch.tensor(
    [PREFIX + [1, 20, 300, 4000], PREFIX + [50000, 6, 50257, 50257]]
)
N_TARGETS = 5  # the last four tokens, and what follows the prefix


def clips(n_clips=2, seconds=3.0):
    return torch.stack([noise(seconds, seed=i) for i in range(n_clips)])


def forward(whisper, **options):
    """States and logits of two clips."""
    if "encoder_states" not in options:
        options = {"wav": clips(), **options}
    return whisper(TOKENS, N_TARGETS, **options)


HOST_READS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal")


class Calls(TorchDispatchMode):
    """Each operation that is run under it: its name, and what it gives."""

    def __init__(self):
        super().__init__()
        self.names, self.outputs = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.names.append(function.overloadpacket.__name__)
        outputs = output if isinstance(output, (tuple, list)) else [output]
        self.outputs += [o for o in outputs if isinstance(o, torch.Tensor)]
        return output


@contextlib.contextmanager
def host_reads():
    """A list of the operations at which a host waits for its device."""
    found = []
    with Calls() as calls:
        yield found
    assert calls.names
    found += [name for name in calls.names if name in HOST_READS]


def own(tmp_path, old, new):
    """The quickstart's file with one text changed."""
    content = QUICKSTART.read_text(encoding="utf-8")
    assert old in content
    path = tmp_path / "own.yaml"
    path.write_text(content.replace(old, new), encoding="utf-8")
    return path


def logged(monkeypatch, logger, level):
    """Texts that a module's logger is given from here on."""
    found = []
    monkeypatch.setattr(logger, level, lambda text, *a: found.append(text % a))
    return found


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory):
    """A Hugging Face folder of ``random:quickstart``."""
    folder = tmp_path_factory.mktemp("model") / "quickstart"
    return random_model.build_folder("quickstart", folder, SEED)


@pytest.fixture(scope="session")
def tokenizer():
    return sources.load_tokenizer("random:quickstart")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks a command line; its problems, one a line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()

    def check(*arguments, hparams=QUICKSTART, data_folder="corpus"):
        words = [str(hparams), *arguments]
        if data_folder:
            words.append(f"--data_folder={data_folder}")
        hparams_file, run_opts, overrides = sb.parse_arguments(words)
        try:
            settings.check(hparams_file, overrides, run_opts)
        except ValueError as error:
            head, *lines = str(error).split("\n  - ")
            assert head == f"{len(lines)} problem(s) in the settings:"
            return lines
        return []

    return check


@pytest.fixture(scope="session")
def _built(quickstart):
    """Loads a model at the first call; ``again`` always does."""
    tokenizer = functools.cache(AutoTokenizer.from_pretrained)
    kept = {}

    def again(adaptation, base_precision, low_rank):
        rest = base_precision, low_rank
        with pytest.MonkeyPatch.context() as patch:  # half a second each
            patch.setattr(AutoTokenizer, "from_pretrained", tokenizer)
            return model.Whisper(
                quickstart, adaptation, False, False, "unused", SEED, *rest
            )

    def built(*chosen):
        if str(chosen) not in kept:
            kept[str(chosen)] = again(*chosen)
        return kept[str(chosen)]

    built.again = again
    return built


@pytest.fixture
def build(_built):
    """A fresh Whisper with the session's weights; its tokenizer is shared."""

    def whisper(adaptation="full", base_precision="fp32", low_rank=LORA):
        original = _built(adaptation, base_precision, low_rank)
        shared = {id(original.tokenizer): original.tokenizer}
        return copy.deepcopy(original, shared)

    return whisper
