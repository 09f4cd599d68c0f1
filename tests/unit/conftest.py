"""What the unit tests share: small audio, and one small model a session.

In: nothing; no network.
Out: fixtures, and wav files made of noise.
"""

import contextlib
import copy

import numpy as np
import pytest
import soundfile
import torch
from local import audio, lora, model, random_model, sources
from torch.utils._python_dispatch import TorchDispatchMode

torch.set_num_threads(1)  # small tensors; others may use the cores
SEED = 3
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


@pytest.fixture(scope="session")
def _built(quickstart):
    return {
        adaptation: model.Whisper(
            quickstart, adaptation, False, False, "unused", SEED, lora=LORA
        )
        for adaptation in model.ADAPTATIONS
    }


@pytest.fixture
def build(_built):
    """A fresh Whisper with the session's weights; its tokenizer is shared."""

    def whisper(adaptation="full"):
        original = _built[adaptation]
        shared = {id(original.tokenizer): original.tokenizer}
        return copy.deepcopy(original, shared)

    return whisper
