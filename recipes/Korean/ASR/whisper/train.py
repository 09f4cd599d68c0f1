#!/usr/bin/env python3
"""Fine-tunes Whisper for Korean, and scores it.

> python train.py hparams/train_large_v3.yaml --data_folder=/data/zeroth
> python train.py hparams/train_large_v3.yaml --data_folder=/data/zeroth --test_only
> torchrun --nproc_per_node=8 train.py hparams/train_large_v3.yaml --data_folder=/data/zeroth

The loop over epochs, its validations and checkpoints stand in local/loop.py;
each other thing that a run decides in the file of local/ that bears its name.
"""

import sys
from functools import partial

import torch
from hyperpyyaml import load_hyperpyyaml
from local import (
    audio,
    batching,
    dataio,
    decode,
    features,
    files,
    frozen,
    loop,
    loss,
    memory_table,
    metrics,
    model,
    new_rows,
    out_of_memory,
    packing,
    prepare,
    ranks,
    schedules,
    settings,
    sources,
    summary,
    text,
    text_batches,
    user_errors,
    vocabulary,
)

import speechbrain as sb
from speechbrain.utils.distributed import if_main_process, main_process_only

# Scales a summed loss to the size of a mean, so that fp16 gradients fit; the
# true number of tokens is divided out before the step.
TOKENS_NOMINAL = 256


class ASR(loop.Loop):
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
            (batch, targets, vocabulary)
        hypotheses : list of str or None
        """
        on_host = batch.sig.lengths
        batch = batch.to(self.device, non_blocking=True)
        tokens_bos, bos_lens = batch.tokens_bos
        mask = loss.lengths_to_mask(bos_lens, tokens_bos.shape[1])
        tokens_bos = tokens_bos.masked_fill(~mask, self.tokenizer.pad_token_id)
        n_targets = batch.tokens_eos.data.shape[1]
        if stage == sb.Stage.TRAIN:
            heard = self.heard(batch, on_host)
            _, logits = self.modules.whisper(tokens_bos, n_targets, **heard)
            return logits, None
        heard = features.heard(*batch.sig)
        # Ranks hold different numbers of clips: no collective call in here.
        if self.context == "true_length":
            longest = float(max(batch.duration)), self.context_s
            heard["n_samples"] = batching.context_samples(*longest)
        states, logits = self.whisper(tokens_bos, n_targets, **heard)
        return logits, self.decode(states, stage)

    def heard(self, batch, on_host):
        """What the decoder attends to in training."""
        if self.is_text:
            n_lines = len(batch.id)
            return text_batches.unheard(self.whisper, n_lines, self.device)
        signals, signal_lens = batch.sig  # samples, or the mels of shards
        with torch.autocast(signals.device.type, enabled=False):
            if self.hparams.augment:
                signals, _ = self.hparams.wav_augment(signals, signal_lens)
            signals = self.hparams.channel(signals, on_host)
        heard = features.heard(signals, signal_lens)
        if self.whisper.freeze_encoder:
            return self.frozen.hear(self.whisper, batch, heard, on_host)
        heard["n_samples"] = int(self.train_sampler.contexts[self.step - 1])
        return heard

    def decode(self, encoder_states, stage):
        """Encoder states to texts; greedy in validation."""
        beam_size = self.hparams.test_beam_size if stage == sb.Stage.TEST else 1
        n_most = self.hparams.max_new_tokens
        search = decode.search(beam_size)
        ids = search(self.whisper, encoder_states, n_most, self.suppressed)
        return [text.for_label(self.tokenizer.decode(row)) for row in ids]

    def compute_objectives(self, predictions, batch, stage):
        """Mean negative log-likelihood a token, in nats."""
        logits, hypotheses = predictions
        targets, lens = batch.tokens_eos
        mask = loss.lengths_to_mask(lens, targets.shape[1])
        failed = batch.failed.to(mask.device, non_blocking=True)
        mask &= ~failed[:, None]
        smoothing = self.hparams.label_smoothing
        if stage != sb.Stage.TRAIN:
            smoothing = 0.0
            self.records |= metrics.records(batch, hypotheses)
        nll, n_tokens = loss.nll_sum(logits, targets, mask, smoothing)
        counted = torch.stack([nll.detach(), n_tokens, failed.sum()])
        self.totals[:3] += counted
        if stage == sb.Stage.TRAIN and self.is_text:
            self.totals[3:] += counted[:2]
        self.nll = nll
        return nll / n_tokens.clamp(min=1)

    def fit_batch(self, batch):
        """One micro-batch, and the step that it completes."""
        with self.no_sync(not self.completes_a_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, sb.Stage.TRAIN)
                mean = self.compute_objectives(outputs, batch, sb.Stage.TRAIN)
            self.scaler.scale(self.nll / TOKENS_NOMINAL).backward()
        self.n_clips += int(self.train_sampler.n_clips[self.step - 1])
        if self.completes_a_step:
            self.optimizers_step()
        return mean.detach()

    def optimizers_step(self):
        """Rate, mean over the step's tokens, clipping, update."""
        self.optimizer_step += 1
        schedule, n = self.hparams.lr_schedule, self.optimizer_step
        self.rate = schedule.set(self.optimizer, n, self.n_steps)
        self.scaler.unscale_(self.optimizer)
        groups = self.optimizer.param_groups
        trained = [p for g in groups for p in g["params"] if p.grad is not None]
        # DDP has averaged over ranks: tokens a rank is the right divisor.
        totals = ranks.total(self.totals)  # as Monitor.step takes them
        tokens = (totals[1].float() / ranks.here()[1]).clamp(min=1)
        torch._foreach_mul_([p.grad for p in trained], TOKENS_NOMINAL / tokens)
        norm = torch.nn.utils.clip_grad_norm_(trained, self.max_grad_norm)
        figures = [totals, norm[None]]
        if self.scaler.is_enabled():
            # Of this step. The host would wait in get_scale().
            figures.append(self.scaler.scale(torch.ones_like(norm[None])))
        else:
            # Read by the fused kernel: a step that is not finite is no step.
            self.optimizer.found_inf = (~norm.isfinite()).float()
            self.optimizer.grad_scale = None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Under DDP gradients live in its buckets.
        self.optimizer.zero_grad(set_to_none=not self.distributed_launch)
        figures = torch.cat(figures)
        self.monitor.step(n, self.epoch, self.rate, figures, self.n_clips)
        self.totals = torch.zeros_like(self.totals)
        self.n_clips = 0

    def init_optimizers(self):
        """The token embeddings have a rate of their own, new ones another."""
        super().init_optimizers()
        rows = self.optimizer, self.whisper.model.decoder.embed_tokens.weight
        schedules.separate(*rows, self.hparams.embedding_lr_multiplier)
        multiplier = self.hparams.new_rows_lr_multiplier
        new_rows.own_rate(*rows, self.whisper.new_ids, multiplier)

    def tell_plan(self):
        """What the run will do, and its rates; a dry run ends here."""
        self.phases.done("checkpoint")
        if if_main_process():
            summary.tell(
                self.whisper,
                self.train_sampler,
                self.hparams.lr_schedule,
                self.hparams.output_folder,
                self.loaders[sb.Stage.VALID].dataset.data.values(),
                self.longest,
                self.tokenizer,
                precision=self.precision,
                checkpointing=self.hparams.gradient_checkpointing,
                optimizer=self.hparams.optimizer_name,
                device=self.device,
                n_epochs=self.hparams.number_of_epochs,
                n_steps=self.n_steps,
                n_done=self.optimizer_step,
                phases=self.phases,
            )
        if self.hparams.dry_run:
            sys.exit()

    def make_dataloader(self, dataset, stage, **loader_kwargs):
        """Ranks share the clips out: in validation and test, each to one."""
        rows = list(dataset.data.values())
        durations = [row["duration"] for row in rows]
        if stage == sb.Stage.TRAIN:
            is_frozen = self.whisper.freeze_encoder
            batches = self.train_sampler = self.batches_of(
                durations,
                self.hparams.batch_size,
                self.hparams.max_batch_length,
                "true_length" if is_frozen else self.hparams.encoder_context,
                self.context_s,
                self.hparams.seed,
                *ranks.here(),
            )
            self.checkpointer.add_recoverable("batches", batches)
            self.longest = [rows[i]["wrd"] for i in batches.batches[0]]
            self.n_steps = batches.n_steps(
                self.hparams.number_of_epochs, self.grad_accumulation_factor
            )
        else:
            batches = batching.in_order(
                durations,
                self.hparams.test_batch_size,
                self.context_s,
                self.context == "true_length",
                *ranks.here(),
            )
        loader_kwargs["batch_sampler"] = batches
        return super().make_dataloader(dataset, stage, **loader_kwargs)

    def on_stage_start(self, stage, epoch):
        """Empties the records."""
        self.records, self.n_clips = {}, 0
        self.totals = torch.zeros(5, device=self.device).double()
        if stage == sb.Stage.TRAIN:
            self.frozen.refresh()

    def on_stage_end(self, stage, stage_loss, epoch):
        """Scores; of a validation the checkpoint, of a test the files."""
        nats, tokens, *_ = ranks.total(self.totals).tolist()
        self.totals.zero_()  # the training goes on with it
        records = metrics.merged(ranks.gather(self.records))
        scores = metrics.score(records, nats / max(tokens, 1))
        if stage == sb.Stage.VALID:
            scores = {k: scores[k] for k in ("loss", *metrics.METRICS)}
            guard, shares = self.hparams.collapse, self.train_sampler.shares
            self.validated(scores, shares, guard, records)
            return
        name, folder = self.test_name, self.monitor.folder
        self.test_scores[name] = scores
        if if_main_process():
            metrics.write_scores(folder / "scores", name, records, scores)
            metrics.write_alignments(folder / f"wer_{name}.txt", records)
        self.hparams.train_logger.log_stats(
            stats_meta={"test set": name},
            test_stats={k: scores[k] for k in ("loss", *metrics.RATES)},
        )


def dataio_prepare(hparams, tokenizer, label_fits, folder, kept, test_only):
    """Datasets of the manifests in a folder, and their pipelines.

    Returns train and valid, each None where only tests are run, and a
    dictionary of the test sets by name.
    """
    context_s = sources.context_seconds(hparams["whisper_hub"])
    timestamps = hparams["packing"] == "timestamps"

    # 1. A row is one clip, or a pack of clips that follow each other
    @sb.utils.data_pipeline.takes(*packing.Clip._fields)
    @sb.utils.data_pipeline.provides("clips")
    def one_clip(*fields):
        return [packing.Clip(*fields)]

    # 2. Audio: 16 kHz mono, or the states that a frozen encoder made of it
    def audio_pipeline(longest_s):
        @sb.utils.data_pipeline.takes("clips")
        @sb.utils.data_pipeline.provides("sig", "failed")
        def read(clips):
            yield from packing.read(clips, int(longest_s * audio.SAMPLE_RATE))

        return read

    @sb.utils.data_pipeline.takes("clips")
    @sb.utils.data_pipeline.provides(*frozen.PROVIDED)
    def audio_or_states(clips):
        yield from kept.read(clips, int(context_s * audio.SAMPLE_RATE))

    # 3. Text: token ids
    def text_pipeline(timestamps):
        @sb.utils.data_pipeline.takes("id", "clips", "wrd")
        @sb.utils.data_pipeline.provides("tokens_bos", "tokens_eos")
        def tokenize(identifier, clips, wrd):
            if timestamps:
                timed = packing.with_timestamps(identifier)
                yield from packing.token_ids(clips, tokenizer, timed)
            else:
                yield from dataio.token_ids(wrd, tokenizer)

        return tokenize

    # 4. Rows, and what a batch holds of them
    def dataset(rows, read, tokenize, clips=(one_clip,)):
        outputs = [*read.provides, *tokenize.provides]
        return sb.dataio.dataset.DynamicItemDataset(
            rows,
            dynamic_items=[*clips, read, tokenize],
            output_keys=["id", "wrd", "duration", "category", *outputs],
        )

    slowest = audio.slowest(hparams["augment"], hparams["speeds"])
    longest_s = context_s * slowest
    train_csv = folder / hparams["train_csv"]
    valid_csv = folder / hparams["valid_csv"]
    test_csvs = sorted(folder.glob(hparams["test_csv"]))
    # A test clip over the context is no reason to drop it: it counts as failed.
    sought = test_csvs or [folder / hparams["test_csv"]]
    wanted = dict.fromkeys(sought, float("inf"))
    shards = hparams["features_folder"]
    if not (test_only or shards):
        wanted |= {train_csv: longest_s, valid_csv: context_s}
    root = hparams["data_folder"]
    rows = dataio.load_splits(wanted, root, label_fits)

    heard, written = audio_pipeline(context_s), text_pipeline(False)
    tests = {p.stem: dataset(rows[p], heard, written) for p in test_csvs}
    if test_only:
        return None, None, tests
    n_most = hparams["valid_max_utterances"]
    if shards:
        hears = tokenizer, sources.load_extractor(hparams["whisper_hub"])
        train = features.load(shards, "train", train_csv, root, *hears)
        valid = features.load(shards, "valid", valid_csv, root, *hears)
        valid.rows = dataio.draw(valid.rows, n_most)
        both = [dataset(s.rows, s.read, s.tokenize, ()) for s in (train, valid)]
        return *both, tests
    valid = dataset(dataio.draw(rows[valid_csv], n_most), heard, written)
    heard = audio_or_states if kept.folder else audio_pipeline(longest_s)
    written = text_pipeline(timestamps)
    if hparams["packing"] == "none":
        return dataset(rows[train_csv], heard, written), valid, tests
    packs = packing.pack(rows[train_csv], longest_s, label_fits, timestamps)
    return dataset(packs, heard, written, clips=()), valid, tests


def main():
    """Settings, corpus, model, training, test."""
    phases = summary.Phases()
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    with user_errors.told("train.py"):
        overrides = settings.check(hparams_file, overrides, run_opts)
        values = settings.values(hparams_file, overrides)
        device = settings.device(run_opts)
        if values["plan_memory"]:
            asked = {name: values[name] for name in memory_table.SETTINGS}
            table = memory_table.told(**asked, device=device)
            return main_process_only(print)(table)
        sb.utils.distributed.ddp_init_group(run_opts)
        with open(hparams_file, encoding="utf-8") as file:
            hparams = load_hyperpyyaml(file, overrides)
        out = hparams["output_folder"]
        if if_main_process():
            held = files.lock(out)  # noqa: F841
        checkpointer = hparams["checkpointer"]
        checkpointer.clean()
    sb.create_experiment_directory(
        experiment_directory=out,
        hyperparams_to_save=hparams_file,
        overrides=overrides,
    )
    if run_opts["test_only"] and checkpointer.best() is None:
        sys.exit(f"train.py: no checkpoint tells its {hparams['best_metric']}")
    with user_errors.told("train.py"):
        tokenizer = sources.load_tokenizer(hparams["whisper_hub"])
        fits = partial(dataio.label_fits, max_tokens=model.MAX_TOKENS)
        phases.done("settings")
        folder = prepare.for_run(
            hparams["manifest_folder"],
            out,
            hparams["prepare"],
            label_fits=partial(fits, tokenizer=tokenizer),
            max_duration_s=sources.context_seconds(hparams["whisper_hub"]),
            slowest_speed=audio.slowest(hparams["augment"], hparams["speeds"]),
        )
        new = hparams["vocabulary"](tokenizer, folder, run_opts["test_only"])
        tokenizer = vocabulary.added_to(tokenizer, new)
        label_fits = partial(fits, tokenizer=tokenizer)
        kept = frozen.FrozenEncoder(hparams["encoder_cache_folder"])
        train, valid, tests = dataio_prepare(
            hparams, tokenizer, label_fits, folder, kept, run_opts["test_only"]
        )
        splits = {**tests, "train": train, "valid": valid}
        settings.require_same_data(out, hparams["save_folder"], splits)
        if train is not None:
            weights = batching.weights(train.data.values(), hparams["corpora"])
            train, batches_of = hparams["with_text"](
                splits, weights, tokenizer, label_fits
            )
    phases.done("corpus")

    whisper = hparams["whisper"](device=device, new_tokens=new)
    checkpointer.add_recoverable("whisper", whisper)
    brain = ASR(
        seed=hparams["seed"],
        valid_interval_steps=hparams["valid_interval_steps"],
        early_stopping=hparams["early_stopping"],
        monitor=hparams["monitor"],
        of_memory={k: hparams[k] for k in out_of_memory.SETTINGS},
        test_loader_kwargs=hparams["test_loader_kwargs"],
        modules={"whisper": whisper},
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=checkpointer,
    )
    brain.whisper, brain.tokenizer, brain.frozen = whisper, tokenizer, kept
    brain.context_s, brain.phases = whisper.context_s, phases
    brain.suppressed = decode.suppressed_tokens(
        tokenizer, whisper.config.vocab_size, whisper.suppressed_by_source
    )
    if train is not None:
        brain.batches_of = batches_of
        kept.open(whisper, brain.precision, train.data, out)
    phases.done("model")

    untouched = not checkpointer.find_checkpoint() and not brain.test_only
    if hparams["score_before_training"] and untouched:
        brain.test(tests, ["full"], suffix=".untouched")
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs=hparams["train_loader_kwargs"],
        valid_loader_kwargs=hparams["test_loader_kwargs"],
    )
    brain.test(tests, ["full", "true_length"])
    if if_main_process():
        print(f"\n{metrics.table(brain.test_scores)}\n")
        print(f"checkpoint  {checkpointer.best().path}")
        print(f"scores      {out}/scores\nlog         {out}/train_log.txt")


if __name__ == "__main__":
    main()
