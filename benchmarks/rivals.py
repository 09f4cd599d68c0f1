"""The other trainers: Transformers' Seq2SeqTrainer, SpeechBrain's Whisper.

In: settings and clips.
Out: arms; each call of one takes the same clips and tells how long it took.

SpeechBrain's arms do what its CommonVoice recipe does (its lobe, its loss, its
Brain's own steps), with the encoder trained as here.
"""

from itertools import islice

import torch
import transformers
from arms import Stopwatch, in_batches
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

import speechbrain as sb
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.decoders.seq2seq import S2SWhisperGreedySearcher
from speechbrain.integrations.huggingface.whisper import Whisper
from speechbrain.nnet.activations import Softmax
from speechbrain.nnet.losses import nll_loss

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-5, 0.01, 2.0


class Trainer:
    """Transformers' own loop; its features are made before the clock starts.

    A user's loader makes them in the background, if there are enough cores;
    here they cost nothing, and stay in memory.
    """

    def __init__(self, settings, clips, checkpointing):
        transformers.set_seed(settings.seed)
        processor = WhisperProcessor.from_pretrained(
            settings.model_folder, language="ko", task="transcribe"
        )
        self.collator = Collator(processor.tokenizer.pad_token_id)
        self.model = WhisperForConditionalGeneration.from_pretrained(
            settings.model_folder, dtype=torch.float32
        )
        self.settings, self.checkpointing = settings, checkpointing
        items = [_features(clip, processor) for clip in clips]
        self.trainer = self._trainer(items)
        self.clock = EpochClock(settings.device)
        self.trainer.add_callback(self.clock)

    def _trainer(self, items):
        settings = self.settings
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(settings.folder / "hf"),
            per_device_train_batch_size=settings.micro_batch,
            gradient_accumulation_steps=settings.accumulation,
            num_train_epochs=1,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
            bf16=settings.precision == "bf16",
            use_cpu=settings.device == "cpu",
            gradient_checkpointing=self.checkpointing,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=settings.seed,
        )
        return Seq2SeqTrainer(
            model=self.model,
            args=arguments,
            train_dataset=items,
            data_collator=self.collator,
        )

    def warm_up(self):
        """One step."""
        self.trainer.args.max_steps = 1
        self.trainer.train()
        self.trainer.args.max_steps = -1  # as many as an epoch has

    def __call__(self):
        """One epoch, timed from its first batch to its last update."""
        loss = self.trainer.train().training_loss
        return {"seconds": self.clock.seconds, "loss": loss}


class Collator:
    """Stacks features; pads labels with what the loss leaves out."""

    def __init__(self, pad_token_id):
        self.pad_token_id = pad_token_id

    def __call__(self, items):
        labels = [item["labels"] for item in items]
        return {
            "input_features": torch.stack([i["input_features"] for i in items]),
            "labels": torch.nn.utils.rnn.pad_sequence(
                labels, batch_first=True, padding_value=-100
            ),
        }


class EpochClock(transformers.TrainerCallback):
    """Times what lies between the first batch and the last update."""

    def __init__(self, device):
        self.stopwatch = Stopwatch(device)

    def on_train_begin(self, *args, **kwargs):
        self.stopwatch.start()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            self.seconds = self.stopwatch.seconds()


def _features(clip, processor):
    mel = processor.feature_extractor(
        clip.samples, sampling_rate=16000, return_tensors="pt"
    )
    # The model itself puts <|startoftranscript|> in front of the labels.
    labels = processor.tokenizer(clip.text).input_ids[1:]
    return {
        "input_features": mel.input_features[0],
        "labels": torch.tensor(labels),
    }


class SpeechBrainTrainer:
    """SpeechBrain's Brain around its lobe, on waveforms in memory."""

    def __init__(self, settings, clips):
        sb.utils.seed_everything(settings.seed)
        lobe = _lobe(settings, settings.model_folder)
        self.brain = StockBrain(
            modules={"whisper": lobe},
            opt_class=lambda parameters: torch.optim.AdamW(
                parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
            ),
            hparams={"log_softmax": Softmax(apply_log=True)},
            run_opts={
                "device": settings.device,
                "precision": settings.precision,
                "grad_accumulation_factor": settings.accumulation,
                "max_grad_norm": MAX_GRAD_NORM,
            },
        )
        self.brain.pad = lobe.tokenizer.pad_token_id
        self.brain.on_fit_start()
        clips = sorted(clips, key=lambda clip: clip.duration)  # its default
        items = {clip.id: _stock_item(clip, lobe.tokenizer) for clip in clips}
        keys = ["id", "sig", "tokens_bos", "tokens_eos"]
        self.loader = self.brain.make_dataloader(
            DynamicItemDataset(items, output_keys=keys),
            sb.Stage.TRAIN,
            batch_size=settings.micro_batch,
        )
        self.stopwatch = Stopwatch(settings.device)

    def warm_up(self):
        """One step."""
        step = islice(self.loader, self.brain.grad_accumulation_factor)
        self.brain._fit_train(step, epoch=1, enable=False)

    def __call__(self):
        """One epoch of Brain's own loop."""
        self.stopwatch.start()
        self.brain._fit_train(self.loader, epoch=1, enable=False)
        return {"seconds": self.stopwatch.seconds(), "loss": self.brain.loss}


class StockBrain(sb.Brain):
    """What SpeechBrain's recipe computes for a training batch."""

    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        waveforms, _ = batch.sig
        tokens, lengths = batch.tokens_bos
        positions = torch.arange(tokens.shape[1], device=self.device)
        n_tokens = (lengths * tokens.shape[1]).round()
        padding = positions >= n_tokens[:, None]
        tokens = tokens.masked_fill(padding, self.pad)
        _, logits, _ = self.modules.whisper(waveforms, tokens)
        return self.hparams.log_softmax(logits)

    def compute_objectives(self, predictions, batch, stage):
        targets, lengths = batch.to(self.device).tokens_eos
        return nll_loss(predictions, targets, length=lengths)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.loss = float(stage_loss)


class SpeechBrainDecoder:
    """SpeechBrain's greedy search, which is its recipe's validation.

    It tells the list of tokens that it suppresses to the other side, which
    takes the same; both may choose the end at the first step.
    """

    def __init__(self, settings, clips, by_length):
        folder = settings.ending_folder
        self.lobe = _lobe(settings, folder).to(settings.device).eval()
        frames = self.lobe.config.max_source_positions
        self.search = S2SWhisperGreedySearcher(
            self.lobe,
            suppress_blank=False,
            min_decode_ratio=0.0,
            max_decode_ratio=(settings.max_new_tokens + 0.5) / frames,
        )
        self.settings, self.stopwatch = settings, Stopwatch(settings.device)
        with torch.no_grad(), settings.autocast():
            self.states = [
                self.lobe.forward_encoder(self.lobe._get_mel(waveforms))
                for waveforms in in_batches(clips, settings, by_length)
            ]

    def warm_up(self):
        """One round."""
        self()

    @torch.no_grad()
    def __call__(self):
        """Decodes every clip; texts as lists of token ids."""
        texts = []
        self.stopwatch.start()
        for states in self.states:
            with self.settings.autocast():
                ids, *_ = self.search(states, torch.ones(len(states)))
            texts += ids
        return {
            "seconds": self.stopwatch.seconds(),
            "texts": [[int(token) for token in text] for text in texts],
        }


def _lobe(settings, folder):
    return Whisper(
        folder,
        save_path=str(settings.folder / "lobe"),
        language="ko",
    )


def _stock_item(clip, tokenizer):
    tokens = tokenizer.encode(clip.text)  # prefix, text, end
    return {
        "sig": torch.from_numpy(clip.samples),
        "tokens_bos": torch.tensor(tokens[:-1]),
        "tokens_eos": torch.tensor(tokens[1:]),
        "duration": clip.duration,
    }
