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

from local import (
    features,
    lora as adapters,
    new_rows as rows,
    quantized,
    random_model,
    saved_weights,
    sources,
    vocabulary,
)
from speechbrain.integrations.huggingface.whisper import Whisper as WhisperLobe
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.distributed import run_on_main

ADAPTATIONS = ("full", "frozen_encoder", "lora")
CONTEXTS = ("true_length", "full", "mixed")  # what a trained encoder may see
MAX_TOKENS = 448  # the decoder's positions, prefix and end token included
SAMPLES_PER_FRAME = 320  # of the encoder: 20 ms at 16 kHz
TRIM_FRAMES = 50  # kept behind a clip's end where full context is trimmed
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name


@register_checkpoint_hooks
class Whisper(WhisperLobe):
    """SpeechBrain's Whisper lobe, mended for training.

    Beyond the lobe: the encoder takes audio of any length up to its context;
    the dynamic range of a log-mel is taken per clip, in fp32; trained weights
    are fp32 whatever the source stores; the encoder's sinusoids stay fixed, as
    in OpenAI's model; no key-value cache is built in training; a frozen
    encoder runs without a graph; gradient checkpointing can be on; low-rank
    adapters may be trained beside a frozen base of less precision.

    Arguments
    ---------
    whisper_hub : str
        A hub name, a local folder, or ``random:SIZE``.
    adaptation : str
        "full"; "frozen_encoder" (only the decoder is trained); "lora" (only
        adapters are; where none is in the encoder, that is frozen).
    gradient_checkpointing : bool
        Recompute activations in the backward pass to save memory.
    compile_layers : bool
        Compile each layer for training (TorchInductor, shapes dynamic); the
        first step then takes a minute or more.
    random_folder : str
        Where ``random:SIZE`` is built, in a folder for each size and seed,
        and found again by the next start.
    seed : int
        For ``random:SIZE``, the adapters' first weights, new rows.
    base_precision : str
        Of the frozen base of adapters: one of ``quantized.BASE_PRECISIONS``.
    lora : local.lora.Lora or None
        Of adaptation "lora".
    device : str
        Where a quantised base is loaded to.
    new_tokens : local.vocabulary.NewTokens or None
        Not beside adapters.
    new_rows : str
        How their rows start: one of ``local.new_rows.STARTS``.

    Attributes
    ----------
    freeze_encoder : bool
        Whether nothing of the encoder is trained.
    identity : dict
        What a checkpoint's weights belong to.
    new_ids : list of int
        Of the new tokens.
    """

    def __init__(
        self,
        whisper_hub,
        adaptation,
        gradient_checkpointing,
        compile_layers,
        random_folder,
        seed,
        base_precision="fp32",
        lora=None,
        device="cpu",
        new_tokens=None,
        new_rows="mean",
    ):
        source = whisper_hub
        if whisper_hub.startswith(sources.RANDOM):
            size = whisper_hub[len(sources.RANDOM) :]
            source = str(Path(random_folder) / f"{size}_{seed}")
            run_on_main(random_model.build_folder, args=[size, source, seed])
        self.loading = quantized.loading_options(base_precision, device)
        super().__init__(
            source,
            save_path=HF_HUB_CACHE,  # one download serves every run
            freeze_encoder=adaptation == "frozen_encoder",
            language="ko",
        )
        self.identity = {"whisper_hub": whisper_hub, "adaptation": adaptation}
        if whisper_hub.startswith(sources.RANDOM):
            self.identity["seed"] = seed
        # The hub stores fp16; updates of 1e-5 need fp32.
        quantized.prepare(self.model, base_precision)
        self.new_ids = self._add(new_tokens, new_rows, seed)
        self.lora = lora if adaptation == "lora" else None
        if self.lora:
            self.adapted = adapters.inject(self.model, lora, seed)
            self.freeze_encoder = not any(
                name.startswith("encoder.") for name in self.adapted
            )
            self.identity["base_precision"] = base_precision
            self.identity |= adapters.as_settings(lora)
        if adaptation != "full":
            self.identity["base_sha256"] = sources.sha256(source)
        self.model.encoder.embed_positions.requires_grad_(False)
        self.context_samples = self.feature_extractor.n_samples
        self.context_s = self.context_samples / self.sampling_rate
        self.n_prefix = len(self.tokenizer.prefix_tokens)
        self.source = source
        self.suppressed_by_source = sources.suppressed(source)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if compile_layers:
            whole = self.model
            for layer in (*whole.encoder.layers, *whole.decoder.layers):
                layer.compile(dynamic=True)

    def _add(self, new_tokens, new_rows, seed):
        if new_tokens is None:
            return []
        before = self.tokenizer
        self.tokenizer = vocabulary.added_to(before, new_tokens)
        parts = vocabulary.old_parts(before, new_tokens)
        rows.start(self.model, new_tokens, parts, new_rows, seed)
        self.config.vocab_size = self.model.config.vocab_size
        self.identity["new_tokens"] = new_tokens._asdict()
        return sorted(parts)

    def _from_pretrained(self, source, **options):
        # The lobe hands no options on.
        self.quantization_config = self.loading.get("quantization_config")
        placed = {k: v for k, v in self.loading.items() if k == "device_map"}
        super()._from_pretrained(source, **options, **placed)

    def forward(
        self,
        decoder_input_ids,
        n_targets,
        wav=None,
        n_samples=None,
        encoder_states=None,
        encoder_mask=None,
        mel=None,
    ):
        """Encoder and decoder under teacher forcing.

        Arguments
        ---------
        decoder_input_ids : torch.Tensor
            (batch, prefix + tokens).
        n_targets : int
            Positions to predict, the last ones: what precedes them is given.
        wav : torch.Tensor or None
            (batch, samples), 16 kHz; None where ``encoder_states`` are given.
        n_samples, mel : int or None, torch.Tensor or None
            As for ``encode``.
        encoder_states, encoder_mask : torch.Tensor or None
            (batch, frames, width) and (batch, frames), True where real.

        Returns
        -------
        encoder_states : torch.Tensor
            (batch, frames, width), 50 frames a second.
        logits : torch.Tensor
            (batch, n_targets, vocabulary): what follows each input token.
        """
        if encoder_states is None:
            encoder_states = self.encode(wav, n_samples, mel)
        hidden = self.decode(decoder_input_ids, encoder_states, encoder_mask)
        return encoder_states, self.logits(hidden[:, -n_targets:])

    def encode(self, wav=None, n_samples=None, mel=None):
        """Encoder states of waveforms, padded with silence to one length.

        A frozen encoder always sees its full context, which is all it was
        trained on; its states are then trimmed to the length asked for and
        one second more.

        Arguments
        ---------
        wav : torch.Tensor or None
            (batch, samples), 16 kHz, not longer than the context.
        n_samples : int or None
            Length to pad to, raised to that of ``wav``; None: the full
            context, 30 s for OpenAI's models.
        mel : torch.Tensor or None
            (batch, frames, mels), 100 frames a second, instead of ``wav``;
            padded as ``features.repeat_last`` does.

        Returns
        -------
        torch.Tensor
            (batch, frames, width), 50 frames a second.

        Raises
        ------
        ValueError
            The audio is longer than the context: cutting it would leave
            labels without their sound.
        """
        full = self.context_samples
        if mel is None:
            n_least = wav.shape[-1]
        else:
            n_least = features.least_samples(mel.shape[1])
        if n_least > full:
            raise ValueError(
                f"{n_least} samples exceed the model's context of {full}"
            )
        if n_samples is None:
            n_samples = full
        n_samples = min(max(n_samples, n_least), full)
        heard = full if self.freeze_encoder else n_samples
        if mel is None:
            states = self.encode_padded(wav, heard)
        else:
            states = self.encode_mel(features.at_length(mel, heard))
        # Nothing is trimmed of a context that was asked for.
        return states[:, : self.n_frames(n_samples) + TRIM_FRAMES]

    def encode_padded(self, wav, n_samples):
        """Encoder states at a context of ``n_samples``."""
        wav = F.pad(wav, (0, n_samples - wav.shape[-1]))
        return self.encode_mel(self.log_mel_spectrogram(wav))

    def encode_mel(self, mel):
        """Encoder states of (batch, mels, frames); positions are sliced.

        Equal to Transformers' encoder, to rounding, at the full context, the
        only one that it takes.
        """
        encoder = self.model.encoder
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not self.freeze_encoder
        ):
            hidden = F.gelu(encoder.conv1(mel))
            hidden = F.gelu(encoder.conv2(hidden)).transpose(1, 2)
            # Transformers goes on with the strides of the convolution.
            hidden = hidden.contiguous()
            hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
            hidden = F.dropout(hidden, encoder.dropout, encoder.training)
            for layer in self._callable(encoder.layers):
                hidden = layer(hidden, None)
            return encoder.layer_norm(hidden)  # (batch, frames, width)

    def n_frames(self, n_samples):
        """Encoder frames of so many samples, rounded up."""
        return -(-n_samples // SAMPLES_PER_FRAME)

    def decode(self, decoder_input_ids, encoder_states, encoder_mask=None):
        """Hidden states of the decoder, without a key-value cache.

        Transformers' own loop asks the device whether sequences are packed,
        at which the host waits; this one gives the same bits.

        Arguments
        ---------
        decoder_input_ids : torch.Tensor
            (batch, tokens)
        encoder_states : torch.Tensor
            (batch, frames, width)
        encoder_mask : torch.Tensor or None
            (batch, frames), True where real.

        Returns
        -------
        torch.Tensor
            (batch, tokens, width)
        """
        decoder = self.model.decoder
        n_tokens = decoder_input_ids.shape[1]
        hidden = decoder.embed_tokens(decoder_input_ids)
        hidden = hidden + decoder.embed_positions.weight[:n_tokens]
        hidden = F.dropout(hidden, decoder.dropout, decoder.training)
        if encoder_mask is not None:
            encoder_mask = encoder_mask[:, None, None, :]
        for layer in self._callable(decoder.layers):
            hidden = layer(
                hidden,
                None,  # causal
                encoder_states,
                encoder_attention_mask=encoder_mask,
                use_cache=False,
            )
        return decoder.layer_norm(hidden)

    def _callable(self, layers):
        # What is compiled is compiled for training: scores do not hang on it.
        return layers if self.training else [layer.forward for layer in layers]

    def logits(self, hidden):
        """(…, width) decoder states to (…, vocabulary) logits; tied weights."""
        return F.linear(hidden, self.model.decoder.embed_tokens.weight)

    def log_mel_spectrogram(self, audio):
        """Log-mels, (batch, mels, frames), of (batch, samples).

        The lobe takes the loudest cell of the batch for that of the clip, so
        that a clip's features hang on its neighbours.
        """
        return features.log_mel(audio, self._mel_filters)

    def train(self, mode=True):
        """A frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.freeze_encoder:
            self.model.encoder.eval()
        return self

    def trained_state(self):
        """Name to tensor of what is trained; the rest comes from the source."""
        name_in_file = adapters.name_in_file if self.lora else str
        return {
            name_in_file(name): parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def merge(self):
        """Adds the adapters to their base, for good.

        Raises
        ------
        ValueError
            The base is quantised.
        """
        base = self.identity["base_precision"]
        if base in quantized.QUANTIZED:
            raise ValueError(
                f"base_precision='{base}' takes no adapters into its weights; "
                "load it with base_precision='fp32'"
            )
        adapters.merge(self.model)
        self.lora = None

    @mark_as_saver
    def save(self, path):
        """Writes the trained weights, and beside them whose they are.

        Of adapters, the folder becomes one that ``PeftModel.from_pretrained``
        loads beside a WhisperForConditionalGeneration.
        """
        path = Path(path)
        state = {k: v.cpu() for k, v in self.trained_state().items()}
        save_file(state, self._weights_file(path), metadata={"format": "pt"})
        if self.lora:
            adapters.write_config(
                path.parent, self.lora, self.adapted, self.source
            )
        path.write_text(json.dumps(self.identity), encoding="utf-8")
        shutil.copymode(path, self._weights_file(path))  # not for us alone

    @mark_as_loader
    def load(self, path, end_of_epoch):
        """Reads what ``save`` wrote into the weights, in place.

        Raises
        ------
        ValueError
            They are others than these, or were trained beside other ones.
        """
        del end_of_epoch
        saved = load_file(self._weights_file(Path(path)))
        own = self.trained_state()
        identity = json.loads(Path(path).read_text(encoding="utf-8"))
        saved_weights.require_own(path, saved, own, identity, self.identity)
        for name, tensor in own.items():
            tensor.copy_(saved[name])

    def _weights_file(self, path):
        return path.with_name(ADAPTER_FILE if self.lora else WEIGHTS_FILE)
