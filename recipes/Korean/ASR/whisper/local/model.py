"""The model: pretrained Whisper, and which of its weights are trained.

In: a model source, an adaptation mode; then waveforms and decoder tokens.
Out: encoder states and logits; its own files in a checkpoint.
"""

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file, save_file

from local import random_model
from speechbrain.integrations.huggingface.whisper import Whisper as WhisperLobe
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.distributed import run_on_main

ADAPTATIONS = ("full", "frozen_encoder")
RANDOM = "random:"
MAX_TOKENS = 448  # the decoder's positions, prefix and end token included
WEIGHTS_FILE = "model.safetensors"
KOREAN = 50264  # id of <|ko|>; the English-only models have it one lower


def load_tokenizer(whisper_hub):
    """The tokenizer of a model source, prefixed for Korean transcription.

    Arguments
    ---------
    whisper_hub : str
        A hub name, a local folder, or ``random:SIZE``.

    Returns
    -------
    transformers.WhisperTokenizer
        ``prefix_tokens`` is ``<|startoftranscript|><|ko|><|transcribe|>
        <|notimestamps|>``.

    Raises
    ------
    FileNotFoundError
        The source is not there, or holds no tokenizer.
    ValueError
        The source is English-only, or not a Whisper.
    """
    if whisper_hub.startswith(RANDOM):
        size = random_model.size_named(whisper_hub[len(RANDOM) :])
        tokenizer = random_model.build_tokenizer(size)
    else:
        from transformers import WhisperTokenizer

        tokenizer = WhisperTokenizer.from_pretrained(whisper_hub)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            # What Transformers makes of a source without any file.
            raise FileNotFoundError(
                f"whisper_hub='{whisper_hub}' has no tokenizer, or cannot be "
                "reached; give a hub name, a Hugging Face folder or random:SIZE"
            )
    if tokenizer.get_vocab().get("<|ko|>") != KOREAN:
        raise ValueError(
            f"whisper_hub='{whisper_hub}' is English-only or no Whisper; choose "
            "a multilingual Whisper such as openai/whisper-large-v3"
        )
    tokenizer.set_prefix_tokens(language="ko", task="transcribe")
    return tokenizer


def context_seconds(whisper_hub):
    """Seconds of audio that the model's encoder takes in (30 for OpenAI's)."""
    if whisper_hub.startswith(RANDOM):
        return random_model.size_named(whisper_hub[len(RANDOM) :]).context_s
    from transformers import WhisperConfig

    config = WhisperConfig.from_pretrained(whisper_hub)
    return config.max_source_positions // 50


@register_checkpoint_hooks
class Whisper(WhisperLobe):
    """SpeechBrain's Whisper lobe, mended for training.

    Beyond the lobe: the dynamic range of a log-mel is taken per clip, in
    fp32; the weights are fp32 whatever the source stores; the encoder's
    sinusoids stay fixed, as in OpenAI's model; no key-value cache is built in
    training; a frozen encoder runs without a graph; gradient checkpointing
    can be on; the Korean prefix is left out of the logits.

    Arguments
    ---------
    whisper_hub : str
        A hub name, a local folder, or ``random:SIZE``.
    adaptation : str
        "full", or "frozen_encoder" (only the decoder is trained).
    gradient_checkpointing : bool
        Recompute activations in the backward pass to save memory.
    random_folder : str
        Where ``random:SIZE`` is built, in a folder for each size and seed,
        and found again by the next start.
    seed : int
        For ``random:SIZE``.
    """

    def __init__(
        self,
        whisper_hub,
        adaptation,
        gradient_checkpointing,
        random_folder,
        seed,
    ):
        source = whisper_hub
        if whisper_hub.startswith(RANDOM):
            size = whisper_hub[len(RANDOM) :]
            source = str(Path(random_folder) / f"{size}_{seed}")
            run_on_main(random_model.build_folder, args=[size, source, seed])
        super().__init__(
            source,
            save_path=HF_HUB_CACHE,  # one download serves every run
            freeze_encoder=adaptation == "frozen_encoder",
            language="ko",
        )
        self.identity = {"whisper_hub": whisper_hub, "adaptation": adaptation}
        if whisper_hub.startswith(RANDOM):
            self.identity["seed"] = seed
        self.model.float()  # the hub stores fp16; updates of 1e-5 need fp32
        self.model.encoder.embed_positions.requires_grad_(False)
        self.context_samples = self.feature_extractor.n_samples
        self.n_prefix = len(self.tokenizer.prefix_tokens)
        self.suppressed_by_source = _suppressed(source)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, wav, decoder_input_ids):
        """Encoder and decoder under teacher forcing.

        Arguments
        ---------
        wav : torch.Tensor
            (batch, samples), 16 kHz; padded with silence to the context.
        decoder_input_ids : torch.Tensor
            (batch, prefix + tokens).

        Returns
        -------
        encoder_states : torch.Tensor
            (batch, frames, width), 50 frames a second.
        logits : torch.Tensor
            (batch, 1 + tokens, vocabulary): from the last prefix token on,
            what follows each input token.
        """
        encoder_states = self.encode(wav)
        hidden = self.model.decoder(
            input_ids=decoder_input_ids,
            encoder_hidden_states=encoder_states,
            use_cache=False,
        ).last_hidden_state[:, self.n_prefix - 1 :]
        return encoder_states, self.logits(hidden)

    def encode(self, wav):
        """Encoder states of waveforms at the model's full context.

        Arguments
        ---------
        wav : torch.Tensor
            (batch, samples), 16 kHz, not longer than the context.

        Returns
        -------
        torch.Tensor
            (batch, frames, width)

        Raises
        ------
        ValueError
            The audio is longer than the context: cutting it would leave
            labels without their sound.
        """
        if wav.shape[-1] > self.context_samples:
            raise ValueError(
                f"{wav.shape[-1]} samples exceed the model's context of "
                f"{self.context_samples}"
            )
        wav = F.pad(wav, (0, self.context_samples - wav.shape[-1]))
        mel = self.log_mel_spectrogram(wav)
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not self.freeze_encoder
        ):
            return self.forward_encoder(mel)

    def logits(self, hidden):
        """(…, width) decoder states to (…, vocabulary) logits; tied weights."""
        return F.linear(hidden, self.model.decoder.embed_tokens.weight)

    def log_mel_spectrogram(self, audio):
        """Log-mel features as OpenAI computes them for one clip.

        The floor lies 8 (80 dB) under the loudest cell of the same clip: the
        lobe takes the loudest of the batch, so that a clip's features hang on
        its neighbours.

        Arguments
        ---------
        audio : torch.Tensor
            (batch, samples), 16 kHz.

        Returns
        -------
        torch.Tensor
            (batch, mels, frames), 100 frames a second, fp32.
        """
        with torch.autocast(audio.device.type, enabled=False):
            audio = audio.float()
            window = torch.hann_window(self._n_fft, device=audio.device)
            stft = torch.stft(
                audio,
                self._n_fft,
                self._hop_length,
                window=window,
                return_complex=True,
            )
            power = stft[..., :-1].abs() ** 2
            log_spec = (self._mel_filters @ power).clamp(min=1e-10).log10()
            loudest = log_spec.amax(dim=(1, 2), keepdim=True)
            return (torch.maximum(log_spec, loudest - 8.0) + 4.0) / 4.0

    def train(self, mode=True):
        """A frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.freeze_encoder:
            self.model.encoder.eval()
        return self

    def trained_state(self):
        """Name to tensor of what is trained; the rest comes from the source."""
        return {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @mark_as_saver
    def save(self, path):
        """Writes the trained weights, and beside them whose they are."""
        path = Path(path)
        state = {k: v.cpu() for k, v in self.trained_state().items()}
        save_file(state, path.with_name(WEIGHTS_FILE))
        path.write_text(json.dumps(self.identity), encoding="utf-8")
        shutil.copymode(path, path.with_name(WEIGHTS_FILE))  # not for us alone

    @mark_as_loader
    def load(self, path, end_of_epoch):
        """Reads what ``save`` wrote into the weights, in place."""
        del end_of_epoch
        saved = load_file(Path(path).with_name(WEIGHTS_FILE))
        own = self.trained_state()
        if saved.keys() != own.keys():
            raise ValueError(
                f"{path} holds other weights than adaptation="
                f"'{self.identity['adaptation']}' trains: "
                f"{sorted(saved.keys() ^ own.keys())[:3]} …"
            )
        for name, tensor in own.items():
            if saved[name].shape != tensor.shape:  # copy_ would broadcast
                raise ValueError(
                    f"{path} holds another size: {name} has the shape "
                    f"{tuple(saved[name].shape)}, not {tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def _suppressed(source):
    """The ids that a source's own generation config suppresses."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source).suppress_tokens
    except OSError:  # a folder without one
        return None
