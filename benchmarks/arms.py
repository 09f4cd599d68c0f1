"""One arm in a process of its own, which takes the same clips round by round.

In: settings, as JSON on the command line; one line on stdin for each round.
Out: one line of JSON on stdout for each round, after a first one that says
that the arm is built and warm.
"""

import contextlib
import gc
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import clips as clips_module
import torch

RECIPE = Path(__file__).resolve().parents[1] / "recipes/Korean/ASR/whisper"
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """What is the same for every arm."""

    model: str  # random:SIZE
    precision: str  # fp32 | bf16
    device: str  # cpu | cuda
    n_clips: int
    clips_per_step: int  # of an optimizer step
    micro_batch: int  # clips of 30 s that are computed at once
    decode_batch: int
    max_new_tokens: int
    workers: int
    seed: int
    work_folder: str

    @property
    def folder(self):
        """Where an arm may write."""
        return Path(self.work_folder)

    @property
    def model_folder(self):
        """The Hugging Face folder that every arm reads its weights from."""
        name = self.model.removeprefix("random:")
        return str(self.folder / f"{name}_{self.seed}")

    @property
    def ending_folder(self):
        """The same model, whose texts end where the labels do."""
        return str(self.folder / "ending")

    @property
    def clips_folder(self):
        """The manifests, and the FLAC files beside them."""
        return self.folder / "clips"

    @property
    def accumulation(self):
        """Micro-batches of an optimizer step, where all clips weigh 30 s."""
        return self.clips_per_step // self.micro_batch

    def autocast(self):
        """A context for what no trainer puts into one itself."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, torch.bfloat16)


class Stopwatch:
    """Seconds since ``start``; a GPU's queue is emptied first."""

    def __init__(self, device):
        self.device = device

    def start(self):
        """From now on."""
        self.began = 0.0
        self.began = self.seconds()

    def seconds(self):
        """Until now."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self.began


def in_batches(clips, settings, by_length):
    """Waveforms (batch, samples), padded with silence, for decoding."""
    batch_size = settings.decode_batch
    if by_length:
        clips = sorted(clips, key=lambda clip: -clip.duration)
    waveforms = [torch.from_numpy(clip.samples) for clip in clips]
    return [
        torch.nn.utils.rnn.pad_sequence(
            waveforms[start : start + batch_size], batch_first=True
        ).to(settings.device)
        for start in range(0, len(clips), batch_size)
    ]


def build(name, settings):
    """An arm by its name: a callable whose calls are rounds."""
    clips = clips_module.make(settings.n_clips, settings.seed)
    if name in ("hf", "hf_checkpointing"):
        import rivals

        return rivals.Trainer(settings, clips, name == "hf_checkpointing")
    if name == "speechbrain":
        import rivals

        return rivals.SpeechBrainTrainer(settings, clips)
    if name.startswith("decode_speechbrain"):
        import rivals

        by_length = name.endswith("_by_length")
        return rivals.SpeechBrainDecoder(settings, clips, by_length)
    import ours

    return ours.build(name, settings, clips)


def peak_memory_mib(device):
    """Most memory so far: of the GPU, or of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def serve(name, settings):
    """Answers one line for each line that it reads; see the module."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    arm = build(name, settings)
    arm.warm_up()
    answers.write("{}\n")
    for _ in sys.stdin:
        gc.collect()
        answer = arm() | {"peak_mib": peak_memory_mib(settings.device)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    serve(sys.argv[1], Settings(**json.loads(sys.argv[2])))
