"""The loop around a step: validations, checkpoints, early ends, exact resume.

In: a Brain's own step and scores; when to validate, to save, to stop.
Out: the same weights whether or not the run was killed, or validated.
"""

import json
import socket
import sys
from pathlib import Path

from tqdm import tqdm

import speechbrain as sb
from local import audio, interrupts, out_of_memory, ranks
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.distributed import ddp_broadcast
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
# Percent: more than any rate and any min_delta between two of them.
FAR = 1e6
POSITION = ("step", "optimizer_step", "validated_step", "rate", "since_sound")


@register_checkpoint_hooks
class Loop(sb.Brain):
    """SpeechBrain's Brain, for runs of days that may be killed.

    Beyond it: randomness follows from the micro-batch alone; validations
    inside an epoch; checkpoints between optimizer steps, of all that the next
    step hangs on; early stopping; an end after collapse; SIGTERM saves and
    exits.

    ``step`` counts the micro-batches of an epoch, ``optimizer_step`` the
    steps of the run, ``validated_step`` is where the last validation was,
    ``since_sound`` tells those that have collapsed since the last sound one.
    A checkpoint may lie between a step and its validation, which then comes
    first when the run goes on.

    Arguments
    ---------
    seed : int
    valid_interval_steps : int
        Steps between validations, beside the one at each epoch's end; 0:
        that one alone.
    early_stopping : local.early_stopping.EarlyStopping
    monitor : local.monitor.Monitor
        Both in the checkpointer's recoverables.
    of_memory : dict
        Names of ``out_of_memory.SETTINGS`` to their values.
    test_loader_kwargs : dict
        Of the test sets' DataLoader.
    **options
        Of ``speechbrain.Brain``.
    """

    def __init__(
        self,
        seed,
        valid_interval_steps,
        early_stopping,
        monitor,
        of_memory,
        test_loader_kwargs,
        **options,
    ):
        super().__init__(**options)
        self.test_loader_kwargs = test_loader_kwargs
        if self.optimizer_step_limit is not None:  # it comes as a text
            self.optimizer_step_limit = int(self.optimizer_step_limit)
        self.of_memory = of_memory
        self.seed, self.valid_interval_steps = seed, valid_interval_steps
        self.early_stopping, self.monitor = early_stopping, monitor
        self.interrupts = interrupts.Interrupts(self.ckpt_interval_minutes)
        if self.debug and not self.debug_persistently:
            monitor.folder = Path(self.checkpointer.checkpoints_dir)
        self.epoch, self.n_steps, self.rate = 0, 0, 0.0
        self.loaders = {}
        self.context, self.context_s = "full", 0.0  # the model's, set later
        self.test_scores = {}
        self.validated_step = self.saved_step = 0
        self.since_sound = []

    def make_dataloader(self, dataset, stage, **loader_kwargs):
        """As the stock one; workers leave SIGTERM to the trainer."""
        if stage != sb.Stage.TEST:
            loader_kwargs["worker_init_fn"] = interrupts.ignore
        loader = super().make_dataloader(dataset, stage, **loader_kwargs)
        self.loaders[stage] = loader
        return loader

    def fit(self, *arguments, **options):
        """As the stock one; hears SIGTERM to its end."""
        with self.interrupts:
            try:
                super().fit(*arguments, **options)
                if any(ranks.gather(self.interrupts.asked)):
                    self.leave()
            finally:
                self.monitor.end()
                self._end_workers()

    def _end_workers(self):
        # At exit they would be sent the signal that they do not hear.
        for loader in self.loaders.values():
            iterator = getattr(loader, "_speechbrain_iterator", None)
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()

    def _train_loader_specifics(self, dataset, loader_kwargs):
        return loader_kwargs  # the stock hook would share the clips out again

    def _wrap_distributed(self):
        # Without the stock hook's second copy of the gradients.
        if self.distributed_launch:
            for name, module in self.modules.items():
                base = module.identity.get("base_sha256")
                ranks.require_same("the SHA-256 of whisper_hub", base)
                self.modules[name] = ranks.wrap(module, self.device)

    def on_fit_start(self):
        """Recovers the newest checkpoint, and takes the log back to it."""
        self.require_one_choice()
        super().on_fit_start()
        self.tell_plan()
        show = sb.utils.distributed.if_main_process()
        show &= not self.noprogressbar
        self.monitor.begin(
            self.optimizer_step, self.n_steps, self.nonfinite_patience, show
        )

    def require_one_choice(self):
        """Stops where ranks do not find the same newest checkpoint to load.

        Hosts without a shared disk each need a copy of it; a rank that lacks
        it would begin anew, or fail while the others wait.

        Raises
        ------
        ValueError
            On every rank; names what each host has.
        """
        chosen = self.checkpointer.find_checkpoint()  # the first rank's
        own = [one.path for one in self.checkpointer.list_checkpoints()]
        has_it = chosen.path in own if chosen else not own
        newest = self.checkpointer.newest()
        found = newest.path if newest else "none"
        told = ranks.gather((has_it, socket.gethostname(), str(found)))
        different = {
            f"rank {rank} on {host} has {found}"
            for rank, (has_it, host, found) in enumerate(told)
            if not has_it
        }
        if different:
            _, host, found = told[0]
            raise ValueError(
                f"the newest checkpoint of rank 0 on {host}: {found}; but "
                f"{', '.join(sorted(different))}. Copy rank 0's save_folder "
                "to every host, or remove those of the others to begin anew"
            )

    def tell_plan(self):
        """Before the first step; for a subclass to say what will be done."""

    def on_evaluate_start(self, max_key=None, min_key=None):
        """Loads the weights of the best checkpoint, and nothing else.

        The first rank's disk alone must hold them.
        """
        best = ddp_broadcast(self.checkpointer.best())
        if best is not None:
            if best.meta.get("collapsed") is True:
                logger.warning("%s has collapsed, as all others", best.path)
            for name in self.modules:
                module = self.checkpointer.recoverables[name]
                ranks.on_first(module.load, best.paramfiles[name], True)
                ranks.from_first(module.trained_state().values())

    @property
    def n_micro_batches(self):
        """Of an epoch."""
        n = len(self.train_sampler)
        return min(n, self.debug_batches) if self.debug else n

    @property
    def is_text(self):
        """Whether the micro-batch at hand is text without audio."""
        return self.train_sampler.n_clips[self.step - 1] == 0

    @property
    def completes_a_step(self):
        """Whether the micro-batch at hand is the last of a step."""
        is_last = self.step == self.n_micro_batches
        return is_last or self.step % self.grad_accumulation_factor == 0

    @property
    def _optimizer_step_limit_exceeded(self):
        # What the stock loop over the epochs asks for.
        limit = super()._optimizer_step_limit_exceeded
        return limit or self.early_stopping.should_stop

    def _fit_train(self, train_set, epoch, enable):
        """One epoch, or what a checkpoint left of it."""
        self.epoch = epoch
        self.train_sampler.set_epoch(epoch)
        self.on_stage_start(sb.Stage.TRAIN, epoch)
        self.modules.train()
        self.zero_grad()
        # Before a validation that is due: its checkpoint tells where this is.
        batches = iter(train_set)
        self.between_steps()
        if self.ended():
            return
        for batch in self.monitor.timed(batches):
            self.step += 1
            ranks.seed(self.seed, epoch, self.step)
            with self.explained(batch):
                self.fit_batch(batch)
            is_last = self.debug and self.step == self.debug_batches
            if self.completes_a_step:
                with self.monitor.aside():
                    self.between_steps()
            if is_last or self.ended():
                return

    def ended(self):
        """Whether the run has ended before its last epoch; says why."""
        stopping = self.early_stopping
        if stopping.should_stop:
            logger.info(
                "training ended at step %d: %s was not lower by more than %s "
                "in %d validations",
                self.validated_step,
                stopping.metric,
                stopping.min_delta,
                stopping.n_worse,
            )
        return self._optimizer_step_limit_exceeded

    def explained(self, batch):
        """Out of memory: names the batch, and what to lower."""
        n_samples = self.train_sampler.contexts[self.step - 1]
        return out_of_memory.explained(
            batch, n_samples / audio.SAMPLE_RATE, self.of_memory, self.device
        )

    def evaluate_batch(self, batch, stage):
        """As the stock one; out of memory is told as in training."""
        settings = {"test_batch_size": len(batch.id)}
        longest = batch, self.context_s, settings, self.device
        with out_of_memory.explained(*longest):
            return super().evaluate_batch(batch, stage)

    def between_steps(self):
        """Validation, checkpoint or end, as step, clock or signal ask."""
        n = self.optimizer_step
        if n and self.valid_interval_steps:
            if n % self.valid_interval_steps == 0:
                self._fit_valid(self.loaders[sb.Stage.VALID], self.epoch, True)
        save, end = self.interrupts.after(n)
        if self.ckpt_interval_steps:
            save |= n % self.ckpt_interval_steps == 0
        if (save or end) and n > self.saved_step:
            self.save()
        if end:
            self.leave()

    def _fit_valid(self, valid_set, epoch, enable):
        """A validation, unless this step had its own; then the epoch's end."""
        if self.validated_step < self.optimizer_step:
            self.on_stage_start(sb.Stage.VALID, epoch)
            self.modules.eval()
            quiet = self.monitor.bar.disable
            bar = tqdm(valid_set, "validation", leave=False, disable=quiet)
            for n, batch in enumerate(bar):
                stop = self.debug and n == self.debug_batches
                if stop or self.interrupts.asked:
                    break
                self.evaluate_batch(batch, sb.Stage.VALID)
            if any(ranks.gather(self.interrupts.asked)):
                if self.saved_step < self.optimizer_step:
                    self.save()
                self.leave()
            self.on_stage_end(sb.Stage.VALID, None, epoch)
            self.modules.train()
        if self.step == self.n_micro_batches:
            self.step = 0

    def validated(self, scores, shares, guard, records):
        """Judges a validation, tells it, and keeps its checkpoint.

        Arguments
        ---------
        scores : dict
            Name to number, of the validation.
        shares : dict
            Name to number, of the epoch's batches.
        guard : local.collapse.Guard
        records : list of metrics.Record
            Of all ranks, so that all judge alike.

        Raises
        ------
        ValueError
            The model has collapsed, too often in a row.
        """
        n = self.validated_step = self.optimizer_step
        scores = scores | guard.judged(records, scores["WER"])
        is_sound = not scores["collapsed"]
        here = {"step": n, **scores}
        self.since_sound = [] if is_sound else [*self.since_sound, here]
        # As the checkpointer: sound ones first, whatever they score.
        metric = scores[self.early_stopping.metric]
        self.early_stopping.heard(metric if is_sound else metric + FAR)
        self.monitor.validated(n, self.epoch, self.rate, scores, shares)
        self.save(self.step == self.n_micro_batches, **scores)
        guard.require_sound(self.since_sound)

    def test(self, test_sets, contexts, suffix=""):
        """Scores every test set at each of some contexts.

        Arguments
        ---------
        test_sets : dict
            Name to dataset.
        contexts : list of str
            Of "full" and "true_length".
        suffix : str
            Of the names of scores.
        """
        for name, data in test_sets.items():
            for self.context in contexts:
                self.test_name = f"{name}{suffix}"
                if self.context != "full":
                    self.test_name += f".{self.context}"
                options = dict(self.test_loader_kwargs)  # it changes them
                self.evaluate(data, test_loader_kwargs=options)
        self.context = "full"

    def save(self, end_of_epoch=False, **meta):
        """Keeps a checkpoint; its meta tells where it was made."""
        self.saved_step = self.optimizer_step
        where = {"steps": self.optimizer_step, "epoch": self.epoch}
        self.checkpointer.save({**where, **meta}, end_of_epoch)
        self.interrupts.saved()

    def leave(self):
        """Ends the process on the scheduler's word."""
        logger.warning(
            "SIGTERM: saved at step %d; the same command goes on from there",
            self.optimizer_step,
        )
        sys.exit(interrupts.EXIT_CODE)

    @mark_as_saver
    def _save(self, path):
        position = {name: getattr(self, name) for name in POSITION}
        Path(path).write_text(json.dumps(position), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path, end_of_epoch):
        position = json.loads(Path(path).read_text(encoding="utf-8"))
        vars(self).update(position, saved_step=position["optimizer_step"])
        if end_of_epoch:
            self.step = 0
