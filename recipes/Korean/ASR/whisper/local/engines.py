"""Engines: models that write down what they hear, whoever runs their weights.

In: a trained.Source and how to decode; then waveforms, or a batch of clips.
Out: texts; of a batch also its loss, and the seconds that its texts took.
"""

import abc
import contextlib
import importlib.util
import json
import time
from pathlib import Path
from typing import List, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from local import (
    audio,
    decode,
    loss,
    model,
    saved_weights,
    sources,
    text,
    trained,
    vocabulary,
)
from speechbrain.utils.autocast import AMPConfig, TorchAutocast


class Scored(NamedTuple):
    """What an engine tells of a batch.

    Attributes
    ----------
    texts : list of str
        Of the clips, in their order.
    nll : float
        Nats: the labels' summed negative log-likelihood; failed clips count
        nothing. 0 from an engine that does not tell it.
    n_tokens : int
        Label tokens that it is a sum of.
    seconds : float
        From the waveforms to the texts, features included, loss not.
    """

    texts: List[str]
    nll: float
    n_tokens: int
    seconds: float


def load_tokenizer(source):
    """The tokenizer of a source, before any of its weights.

    Arguments
    ---------
    source : local.trained.Source

    Returns
    -------
    transformers.WhisperTokenizer

    Raises
    ------
    FileNotFoundError, OSError
        There is none, or the hub cannot be reached.
    ValueError
        Not a multilingual Whisper, or CTranslate2 is not installed.
    """
    hub = source.path
    if source.kind in ("checkpoint", "adapter"):
        hub = trained.base(source).path
    elif source.kind == "ctranslate2":
        if importlib.util.find_spec("ctranslate2") is None:
            raise ValueError(
                f"model '{source.path}' is CTranslate2's, which is not "
                "installed: pip install ctranslate2 (faster-whisper brings it)"
            )
    tokenizer = sources.load_tokenizer(hub)
    if source.kind != "checkpoint":
        return tokenizer
    new = saved_weights.new_tokens(source.path, trained.identity(source))
    return vocabulary.added_to(tokenizer, new)


def load(
    source,
    device,
    precision,
    beam_size,
    max_new_tokens,
    work_folder,
    batch_size=32,
):
    """An engine with its weights.

    Arguments
    ---------
    source : local.trained.Source
        Its name becomes the engine's.
    device : str
        "cpu", "cuda" or "cuda:N".
    precision : str
        "fp32", "bf16" or "fp16"; a CTranslate2 folder keeps its own.
    beam_size : int
        1: greedy.
    max_new_tokens : int
        Upper bound on a transcript, its end token included.
    work_folder : str or Path
        Where random:SIZE is built.
    batch_size : int
        Clips that ``transcribe`` takes at a time.

    Returns
    -------
    Engine

    Raises
    ------
    OSError, ValueError
        The weights are not there, are damaged, or do not fit.
    """
    decoding = beam_size, max_new_tokens, batch_size
    if source.kind == "ctranslate2":
        with trained.told_if_damaged(source):
            return CTranslate2Engine(source, device, *decoding)
    whisper = trained.load(source, device, work_folder)
    return WhisperEngine(source.name, whisper, device, precision, *decoding)


class Engine(abc.ABC):
    """What all engines have; each adds ``texts``.

    Attributes
    ----------
    name : str
        To show to people.
    context_s : float
        Seconds of audio that it hears at a time.
    tokenizer : transformers.WhisperTokenizer
    precision : str
        What it computes in.
    has_loss : bool
        Whether it tells the likelihood of labels.
    base : str
        Precision of the base beside its adapters; "" where it has none.
    """

    has_loss, base = False, ""

    def __init__(self, name, context_s, tokenizer, precision, batch_size):
        self.name, self.context_s = name, context_s
        self.tokenizer, self.precision = tokenizer, precision
        self.batch_size = batch_size

    @abc.abstractmethod
    def texts(self, wavs):
        """Texts of (batch, samples) waveforms, 16 kHz, behind them zeros."""

    def transcribe(self, wavs):
        """Texts of clips, each at the full context.

        Arguments
        ---------
        wavs : list of torch.Tensor
            (samples,) each, float32, 16 kHz.

        Returns
        -------
        list of str

        Raises
        ------
        ValueError
            A clip is longer than the context.
        """
        longest_s = max(map(len, wavs), default=0) / audio.SAMPLE_RATE
        if longest_s > self.context_s:
            raise ValueError(
                f"a clip of {longest_s:.1f} s exceeds the {self.context_s:g} s "
                f"that {self.name} hears at a time; cut it"
            )
        texts = []
        for first in range(0, len(wavs), self.batch_size):
            some = wavs[first : first + self.batch_size]
            texts += self.texts(pad_sequence(some, batch_first=True))
        return texts

    def score(self, batch):
        """Texts of a batch, and what they cost.

        Arguments
        ---------
        batch : speechbrain.dataio.batch.PaddedBatch
            With ``sig``; for the loss ``tokens_bos``, ``tokens_eos`` and
            ``failed``.

        Returns
        -------
        Scored
        """
        begin = time.perf_counter()
        texts = self.texts(batch.sig.data)
        return Scored(texts, 0.0, 0, time.perf_counter() - begin)

    @contextlib.contextmanager
    def hearing(self, language):
        """Within a ``with`` block, texts and labels are of that language.

        Arguments
        ---------
        language : str
            As in Whisper's tokens: "ko", "en".
        """
        korean = self.tokenizer.language
        self.tokenizer.set_prefix_tokens(language=language)
        try:
            yield
        finally:
            self.tokenizer.set_prefix_tokens(language=korean)

    def _written(self, rows):
        return [text.for_label(self.tokenizer.decode(row)) for row in rows]


class WhisperEngine(Engine):
    """Our own Whisper: checkpoints, and all that Transformers reads.

    Its texts and loss are those of ``train.py --test_only``.

    Arguments
    ---------
    name : str
    whisper : local.model.Whisper
        In evaluation mode.
    device, precision, beam_size, max_new_tokens, batch_size
        As for ``load``.
    """

    has_loss = True

    def __init__(
        self,
        name,
        whisper,
        device,
        precision,
        beam_size,
        max_new_tokens,
        batch_size,
    ):
        tokenizer = whisper.tokenizer
        super().__init__(
            name, whisper.context_s, tokenizer, precision, batch_size
        )
        if precision == "fp32":
            whisper.float()  # a base in bf16, of which nothing is lost
        self.whisper, self.device = whisper, device
        if whisper.lora:
            self.base = whisper.identity["base_precision"]
        self.autocast = TorchAutocast(
            device_type=torch.device(device).type,
            dtype=AMPConfig.from_name(precision).dtype,
        )
        suppressed = decode.suppressed_tokens(
            tokenizer, whisper.config.vocab_size, whisper.suppressed_by_source
        )
        self.search = decode.search(beam_size)
        self.limits = max_new_tokens, suppressed

    @torch.no_grad()
    def texts(self, wavs):
        """As for ``Engine``."""
        with self.autocast:
            return self._read(self.whisper.encode(wavs.to(self.device)))

    @torch.no_grad()
    def score(self, batch):
        """As for ``Engine``, with the loss."""
        with self.autocast:
            begin = time.perf_counter()
            states = self.whisper.encode(batch.sig.data.to(self.device))
            texts = self._read(states)  # waits for the device
            seconds = time.perf_counter() - begin
            nll, n_tokens = self._nll(batch.to(self.device), states)
        return Scored(texts, float(nll), int(n_tokens), seconds)

    def _read(self, states):
        return self._written(self.search(self.whisper, states, *self.limits))

    def _nll(self, batch, states):
        """The labels' summed NLL under teacher forcing, and their tokens."""
        tokens_bos, bos_lens = batch.tokens_bos
        targets, lens = batch.tokens_eos
        n_targets = targets.shape[1]
        given = loss.lengths_to_mask(bos_lens, tokens_bos.shape[1])
        tokens_bos = tokens_bos.masked_fill(~given, self.tokenizer.pad_token_id)
        mask = loss.lengths_to_mask(lens, n_targets)
        mask &= ~batch.failed.to(self.device)[:, None]
        _, logits = self.whisper(tokens_bos, n_targets, encoder_states=states)
        return loss.nll_sum(logits, targets, mask)


class CTranslate2Engine(Engine):
    """A folder that faster-whisper reads, run by CTranslate2 itself.

    faster-whisper pads the features of a short clip with zeros; here they are
    those of silence up to the full context, as the model was trained on and
    as every other engine has them. One window a clip, without timestamps,
    previous text, voice detection or sampling.

    Arguments
    ---------
    source : local.trained.Source
    device, beam_size, max_new_tokens, batch_size
        As for ``load``.
    """

    def __init__(self, source, device, beam_size, max_new_tokens, batch_size):
        import ctranslate2
        from transformers import WhisperFeatureExtractor

        folder, device = Path(source.path), torch.device(device)
        self.model = ctranslate2.models.Whisper(
            source.path, device=device.type, device_index=device.index or 0
        )
        # Older folders have none; theirs is 30 s.
        self.feature_extractor = WhisperFeatureExtractor(self.model.n_mels)
        if (folder / "preprocessor_config.json").is_file():
            of_folder = WhisperFeatureExtractor.from_pretrained(folder)
            self.feature_extractor = of_folder
        super().__init__(
            source.name,
            self.feature_extractor.chunk_length,
            load_tokenizer(source),
            self.model.compute_type,
            batch_size,
        )
        config = json.loads((folder / "config.json").read_text("utf-8"))
        n_prefix = len(self.tokenizer.prefix_tokens)
        n_most = min(max_new_tokens, model.MAX_TOKENS - n_prefix)
        self.options = {
            "beam_size": beam_size,
            # It takes half of this, or this less all but one of the prefix.
            "max_length": max(2 * n_most, n_most + n_prefix - 1),
            "suppress_blank": False,  # nothing said: nothing written
            "suppress_tokens": decode.suppressed_tokens(
                self.tokenizer,
                _n_vocabulary(folder),
                config.get("suppress_ids"),
            ),
        }

    def texts(self, wavs):
        """As for ``Engine``."""
        from ctranslate2 import StorageView

        features = self.feature_extractor(
            list(wavs.numpy()),
            sampling_rate=audio.SAMPLE_RATE,
            return_tensors="np",
        )["input_features"]  # (batch, mels, frames)
        found = self.model.generate(
            StorageView.from_array(features),
            [self.tokenizer.prefix_tokens] * len(wavs),
            **self.options,
        )
        return self._written([one.sequences_ids[0] for one in found])


def _n_vocabulary(folder):
    """Entries of a CTranslate2 folder's vocabulary: a list, or lines."""
    path = next(folder.glob("vocabulary.*"))
    written = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return len(json.loads(written))
    return written.count("\n")
