#!/usr/bin/env python3
"""Fine-tunes Whisper for Korean, and scores it.

> python train.py hparams/train_large_v3.yaml --data_folder=/data/zeroth
> python train.py hparams/train_large_v3.yaml --data_folder=/data/zeroth --test_only
> torchrun --nproc_per_node=8 train.py hparams/train_large_v3.yaml --data_folder=/data/zeroth

What is frozen is decided in local/model.py, the loss in local/loss.py, what a
score counts in local/text.py and local/metrics.py, how text is decoded in
local/decode.py, what is left out of a corpus in local/prepare.py.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from hyperpyyaml import load_hyperpyyaml
from local import (
    audio,
    dataio,
    decode,
    loss,
    metrics,
    model,
    prepare,
    settings,
    text,
)

import speechbrain as sb
from speechbrain.utils.distributed import if_main_process, run_on_main
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)

# Scales a summed loss to the size of a mean, so that fp16 gradients fit; the
# true number of tokens is divided out before the step.
TOKENS_NOMINAL = 256


class ASR(sb.Brain):
    """Trains by the mean over all tokens of a step, scores by text.

    One step is ``grad_accumulation_factor`` micro-batches on every rank, or
    what is left of them at the end of an epoch. Gradients of the summed loss
    are collected and divided by the step's number of tokens, so that two
    ranks, or two micro-batches, are one batch of twice the size.
    """

    def compute_forward(self, batch, stage):
        """Logits, and in validation and test the texts.

        Returns
        -------
        logits : torch.Tensor
            (batch, 1 + tokens, vocabulary)
        hypotheses : list of str or None
        """
        batch = batch.to(self.device)
        wavs, wav_lens = batch.sig
        tokens_bos, bos_lens = batch.tokens_bos
        mask = loss.lengths_to_mask(bos_lens, tokens_bos.shape[1])
        tokens_bos = tokens_bos.masked_fill(~mask, self.tokenizer.pad_token_id)
        if stage == sb.Stage.TRAIN:
            if self.hparams.augment:
                wavs, _ = self.hparams.wav_augment(wavs, wav_lens)
            _, logits = self.modules.whisper(wavs, tokens_bos)
            return logits, None
        # Ranks hold different numbers of clips: no collective call in here.
        encoder_states, logits = self.whisper(wavs, tokens_bos)
        return logits, self.decode(encoder_states, stage)

    def decode(self, encoder_states, stage):
        """Encoder states to texts; greedy in validation."""
        search = decode.greedy
        if stage == sb.Stage.TEST and self.hparams.test_beam_size > 1:
            beam_size = self.hparams.test_beam_size
            search = partial(decode.beam, beam_size=beam_size)
        ids = search(
            self.whisper,
            encoder_states,
            self.hparams.max_new_tokens,
            self.suppressed,
        )
        return [text.for_label(self.tokenizer.decode(row)) for row in ids]

    def compute_objectives(self, predictions, batch, stage):
        """Mean negative log-likelihood a token, in nats."""
        logits, hypotheses = predictions
        targets, lens = batch.tokens_eos
        mask = loss.lengths_to_mask(lens, targets.shape[1])
        mask &= ~batch.failed.to(mask.device)[:, None]
        training = stage == sb.Stage.TRAIN
        nll, n_tokens = loss.nll_sum(
            logits,
            targets,
            mask,
            self.hparams.label_smoothing if training else 0.0,
        )
        self.nll, self.n_tokens = nll, n_tokens
        if not training:
            self.totals += torch.tensor(
                [nll.item(), n_tokens.item()], dtype=torch.double
            )
            self.remember(batch, hypotheses)
        return nll / n_tokens.clamp(min=1)

    def remember(self, batch, hypotheses):
        """Keeps what the scores need of each clip."""
        for i, hypothesis in enumerate(hypotheses):
            failed = bool(batch.failed[i])
            self.records[batch.id[i]] = metrics.Record(
                id=batch.id[i],
                reference=batch.wrd[i],
                hypothesis="" if failed else hypothesis,
                duration=float(batch.duration[i]),
                category=batch.category[i],
                failed=failed,
            )

    def fit_batch(self, batch):
        """One micro-batch; a tail of them still makes a step."""
        should_step = (
            self.step % self.grad_accumulation_factor == 0
            or self.step == self.n_micro_batches
        )
        with self.no_sync(not should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, sb.Stage.TRAIN)
                mean = self.compute_objectives(outputs, batch, sb.Stage.TRAIN)
            self.scaler.scale(self.nll / TOKENS_NOMINAL).backward()
        self.step_tokens += self.n_tokens
        if should_step:
            self.optimizers_step()
        return mean.detach().cpu()

    def optimizers_step(self):
        """Rate, mean over the step's tokens, clipping, update."""
        self.hparams.noam_annealing(self.optimizer)
        self.scaler.unscale_(self.optimizer)
        parameters = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        # DDP has averaged over ranks: tokens a rank is the right divisor.
        _, n_ranks = self.rank_of_ranks()
        tokens = self.step_tokens / n_ranks
        if n_ranks > 1:
            torch.distributed.all_reduce(tokens)
        torch._foreach_mul_(
            [p.grad for p in parameters], TOKENS_NOMINAL / tokens.clamp(min=1)
        )
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        if not self.scaler.is_enabled():
            # Read by the fused kernel: a step that is not finite is no step.
            self.optimizer.found_inf = (~norm.isfinite()).float()
            self.optimizer.grad_scale = None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_tokens.zero_()
        self.optimizer_step += 1

    def on_fit_start(self):
        """Recovers the newest checkpoint, if there is one."""
        super().on_fit_start()
        self.step_tokens = torch.zeros((), device=self.device)

    def make_dataloader(self, dataset, stage, **loader_kwargs):
        """Ranks share the clips out: in validation and test, each to one."""
        if stage == sb.Stage.TRAIN:
            loader_kwargs["sampler"] = dataio.EpochSampler(
                len(dataset), self.hparams.seed, *self.rank_of_ranks()
            )
        else:
            loader_kwargs["sampler"] = dataio.shard(
                len(dataset), *self.rank_of_ranks()
            )
        loader = super().make_dataloader(dataset, stage, **loader_kwargs)
        if stage == sb.Stage.TRAIN:
            self.n_micro_batches = len(loader)
            if self.debug:
                self.n_micro_batches = min(len(loader), self.debug_batches)
        return loader

    def _train_loader_specifics(self, dataset, loader_kwargs):
        # The stock hook would shard the sampler again, and forget to tell it
        # the epoch where there is one process.
        self.train_sampler = loader_kwargs["sampler"]
        return loader_kwargs

    def rank_of_ranks(self):
        """(This process, number of processes)."""
        if self.distributed_launch:
            return self.rank, torch.distributed.get_world_size()
        return 0, 1

    def on_stage_start(self, stage, epoch):
        """Empties the records."""
        self.records = {}
        self.totals = torch.zeros(2, dtype=torch.double)  # nats, tokens

    def on_stage_end(self, stage, stage_loss, epoch):
        """Logs, keeps the best and the newest checkpoint, writes scores."""
        if stage == sb.Stage.TRAIN:
            self.train_stats = {"loss": stage_loss}
            return
        records, mean_loss = self.gather()
        if stage == sb.Stage.VALID:
            scores = metrics.score(records, mean_loss)
            self.hparams.train_logger.log_stats(
                stats_meta={
                    "epoch": epoch,
                    "steps": self.optimizer_step,
                    "lr": self.optimizer.param_groups[0]["lr"],
                },
                train_stats=self.train_stats,
                valid_stats={k: scores[k] for k in ("loss", "CER", "WER")},
            )
            self.checkpointer.save_and_keep_only(
                meta={m: scores[m] for m in metrics.METRICS},
                min_keys=[self.hparams.best_metric],
            )
        else:
            self.report(records, mean_loss)

    def gather(self):
        """Records of all ranks in the order of their IDs, and the mean loss."""
        _, n_ranks = self.rank_of_ranks()
        parts = [(self.records, self.totals)] * n_ranks
        if n_ranks > 1:
            torch.distributed.all_gather_object(parts, parts[0])
        records = {k: v for part, _ in parts for k, v in part.items()}
        nats, tokens = sum(totals for _, totals in parts).tolist()
        return [records[k] for k in sorted(records)], nats / max(tokens, 1)

    def report(self, records, mean_loss):
        """Scores and files of one test set."""
        name = self.test_name
        scores = self.test_scores[name] = metrics.score(records, mean_loss)
        if if_main_process():
            folder = Path(self.hparams.output_folder)
            metrics.write_scores(folder / "scores", name, records, scores)
            metrics.write_alignments(folder / f"wer_{name}.txt", records)
        self.hparams.train_logger.log_stats(
            stats_meta={"test set": name},
            test_stats={k: scores[k] for k in ("loss", *metrics.RATES)},
        )

    def test(self, test_sets, loader_kwargs, suffix=""):
        """Scores every test set with the best checkpoint there is."""
        for name, data in test_sets.items():
            self.test_name = f"{name}{suffix}"
            self.evaluate(
                data,
                min_key=self.hparams.best_metric,
                test_loader_kwargs=dict(loader_kwargs),
            )


def dataio_prepare(hparams, tokenizer, manifest_folder, test_only):
    """Datasets and their pipelines.

    Returns
    -------
    train, valid : DynamicItemDataset
        None where only tests are run.
    tests : dict
        Name of a test set to its DynamicItemDataset.
    """
    context_s = model.context_seconds(hparams["whisper_hub"])
    label_fits = partial(
        dataio.label_fits, tokenizer=tokenizer, max_tokens=model.MAX_TOKENS
    )

    # 1. Audio: 16 kHz mono
    def audio_pipeline(longest_s):
        @sb.utils.data_pipeline.takes("wav", "start", "stop")
        @sb.utils.data_pipeline.provides("sig", "failed")
        def read(wav, start, stop):
            max_samples = int(longest_s * audio.SAMPLE_RATE)
            yield from dataio.read_or_silence(wav, start, stop, max_samples)

        return read

    # 2. Text: token ids
    @sb.utils.data_pipeline.takes("wrd")
    @sb.utils.data_pipeline.provides("tokens_bos", "tokens_eos")
    def text_pipeline(wrd):
        yield from dataio.token_ids(text.for_label(wrd), tokenizer)

    # 3. Rows, and what a batch holds of them
    problems = []

    def load(csv_path, longest_s, max_duration_s):
        try:
            rows = dataio.load_split(
                csv_path, hparams["data_folder"], max_duration_s, label_fits
            )
        except (FileNotFoundError, ValueError) as error:
            problems.append(str(error))
            return None
        return sb.dataio.dataset.DynamicItemDataset(
            rows,
            dynamic_items=[audio_pipeline(longest_s), text_pipeline],
            output_keys=["id", "sig", "failed", "tokens_bos", "tokens_eos"]
            + ["wrd", "duration", "category"],
        )

    train = valid = None
    if not test_only:
        longest_s = context_s * slowest_speed(hparams)
        train_csv = manifest_folder / hparams["train_csv"]
        valid_csv = manifest_folder / hparams["valid_csv"]
        train = load(train_csv, longest_s, longest_s)
        valid = load(valid_csv, context_s, context_s)
    # A test clip over the context is no reason to drop it: it counts as failed.
    tests = {
        path.stem: load(path, context_s, float("inf"))
        for path in sorted(manifest_folder.glob(hparams["test_csv"]))
    }
    if not tests:
        problems.append(f"no {hparams['test_csv']} in {manifest_folder}")
    if problems:
        hint = "no data for a run (a test alone needs --test_only):"
        raise ValueError("\n  - ".join([hint, *problems]))
    return train, valid, tests


def slowest_speed(hparams):
    """What speed perturbation may lengthen a training clip by, inverted."""
    return min(100, *hparams["speeds"]) / 100 if hparams["augment"] else 1.0


def prepare_manifests(hparams, tokenizer):
    """The folder of the manifests: the user's own, or the prepared corpus."""
    if hparams["manifest_folder"]:
        return Path(hparams["manifest_folder"])
    folder = Path(hparams["output_folder"]) / "manifests"
    run_on_main(
        prepare.prepare,
        kwargs={
            "corpus": hparams["corpus"],
            "data_folder": hparams["data_folder"],
            "out": folder,
            "label_fits": partial(
                dataio.label_fits,
                tokenizer=tokenizer,
                max_tokens=model.MAX_TOKENS,
            ),
            "max_duration_s": model.context_seconds(hparams["whisper_hub"]),
            "slowest_speed": slowest_speed(hparams),
            "text_form": hparams["text_form"],
            "columns": hparams["columns"],
            "keep_no_speech": hparams["keep_no_speech"],
            "heldout_share": hparams["heldout_share"],
        },
    )
    if if_main_process():
        report = folder / prepare.REPORT
        shutil.copy(report, hparams["output_folder"])
        logger.info("%s\n%s", report, prepare.summary(report))
    return folder


def print_results(brain, output_folder):
    """A table of the scores, and where things are."""
    best = brain.checkpointer.find_checkpoint(min_key=brain.hparams.best_metric)
    rates = ["CER", "CER_no_space", "WER", "sWER"]
    counts = ["n_utterances", "n_failed"]
    print("\n" + "".join(f"{n:>15}" for n in ["test set", *rates, *counts]))
    for name, scores in brain.test_scores.items():
        cells = [f"{scores[n]:.2f}" for n in rates]
        cells += [str(scores[n]) for n in counts]
        print("".join(f"{cell:>15}" for cell in [name, *cells]))
    print(f"\nscores      {output_folder}/scores")
    print(f"checkpoint  {best.path}")
    print(f"log         {output_folder}/train_log.txt")


def main():
    """Settings, corpus, model, training, test."""
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    try:
        settings.check(hparams_file, overrides, run_opts)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"train.py: {error}")
    sb.utils.distributed.ddp_init_group(run_opts)
    with open(hparams_file, encoding="utf-8") as file:
        hparams = load_hyperpyyaml(file, overrides)
    sb.create_experiment_directory(
        experiment_directory=hparams["output_folder"],
        hyperparams_to_save=hparams_file,
        overrides=overrides,
    )

    best = hparams["checkpointer"].find_checkpoint(
        min_key=hparams["best_metric"]
    )
    if run_opts["test_only"] and best is None:
        sys.exit(f"train.py: no checkpoint tells its {hparams['best_metric']}")

    tokenizer = model.load_tokenizer(hparams["whisper_hub"])
    manifest_folder = prepare_manifests(hparams, tokenizer)
    train, valid, tests = dataio_prepare(
        hparams, tokenizer, manifest_folder, run_opts["test_only"]
    )

    if train is not None:
        folders = hparams["output_folder"], hparams["save_folder"]
        run_on_main(settings.require_same_data, args=[*folders, train.data])

    whisper = hparams["whisper"]()
    hparams["checkpointer"].add_recoverable("whisper", whisper)
    brain = ASR(
        modules={"whisper": whisper},
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=hparams["checkpointer"],
    )
    brain.whisper, brain.tokenizer = whisper, tokenizer
    brain.test_scores = {}
    brain.suppressed = decode.suppressed_tokens(
        tokenizer, whisper.config.vocab_size, whisper.suppressed_by_source
    )

    untouched = not hparams["checkpointer"].list_checkpoints()
    if hparams["score_before_training"] and untouched and not brain.test_only:
        brain.test(tests, hparams["test_loader_kwargs"], suffix=".untouched")
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs=hparams["train_loader_kwargs"],
        valid_loader_kwargs=hparams["test_loader_kwargs"],
    )
    brain.test(tests, hparams["test_loader_kwargs"])
    if if_main_process():
        print_results(brain, hparams["output_folder"])


if __name__ == "__main__":
    main()
