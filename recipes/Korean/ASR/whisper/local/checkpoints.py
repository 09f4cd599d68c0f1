"""Checkpoints that are whole or not there, and hold no pickled code.

In: what a run hangs on; a folder, how many to keep, the score that decides.
Out: folders CKPT+…; which of them is the newest, and which the best.
"""

# A folder, made and removed under a temporary name:
#   CKPT.yaml              written last: scores, time, bytes of all other files
#   <name>.ckpt            of each recoverable: JSON or plain text
#   model.safetensors      beside whisper.ckpt: the trained weights
#   optimizer.safetensors  beside optimizer.ckpt: the tensors of its state

import errno
import logging
import math
import os
import shutil
import time
from pathlib import Path

import torch
import yaml

from local import files, optimizer_state
from speechbrain.utils import checkpoints
from speechbrain.utils.checkpoints import DEFAULT_SAVE_HOOKS, ckpt_recency
from speechbrain.utils.distributed import (
    ddp_barrier,
    ddp_broadcast,
    if_main_process,
    main_process_only,
)
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
TEMPORARY = "tmp+"  # before the name: not the prefix that is looked for
YAML_END = "...\n"  # without it the file was cut
NEEDED = {"unixtime", "end-of-epoch", "files"}
DAMAGE = (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Checkpointer(checkpoints.Checkpointer):
    """SpeechBrain's Checkpointer, for runs of days that may be killed.

    Beyond it: a checkpoint gets its name when it is complete and on the disk;
    a damaged one is passed over; one that says ``collapsed`` is the best only
    where all do; an optimizer's state is no pickle.

    Arguments
    ---------
    checkpoints_dir : str or Path
        Made if it is missing.
    recoverables : dict or None
        Name to object.
    keep_last : int
        Newest checkpoints that ``save`` keeps, 1 or more, beside the best.
    best_metric : str
        Key of a checkpoint's meta; lower is better.
    """

    def __init__(
        self, checkpoints_dir, recoverables=None, keep_last=1, best_metric="CER"
    ):
        assert keep_last >= 1, keep_last
        super().__init__(checkpoints_dir)
        self.keep_last, self.best_metric = keep_last, best_metric
        self.warned = set()
        self.add_recoverables(recoverables or {})

    def add_recoverable(
        self,
        name,
        obj,
        custom_load_hook=None,
        custom_save_hook=None,
        optional_load=False,
    ):
        """As the stock one, but for what that would pickle."""
        save = checkpoints.get_default_hook(obj, DEFAULT_SAVE_HOOKS)
        for kind, our_load, our_save in HOOKS:
            if isinstance(obj, kind):
                save = our_save
                custom_load_hook = custom_load_hook or our_load
        save = custom_save_hook or save
        assert save not in (None, checkpoints.torch_save), (name, type(obj))
        super().add_recoverable(
            name, obj, custom_load_hook, save, optional_load
        )

    def add_recoverables(self, recoverables):
        """Adds each object of a dict."""
        for name, obj in recoverables.items():
            self.add_recoverable(name, obj)

    def save(self, meta, end_of_epoch):
        """Saves, then removes all but the newest and the best; collective.

        Arguments
        ---------
        meta : dict
            Name to number or text: the scores, if there are any.
        end_of_epoch : bool

        Raises
        ------
        OSError
            It cannot be written; what was there before is untouched.
        """
        self.save_checkpoint(meta, end_of_epoch)
        ddp_barrier()  # nobody reads what is removed now
        if if_main_process():
            found = sorted(self.list_checkpoints(), key=ckpt_recency)
            kept = [*found[-self.keep_last :], self._best(found)]
            for one in found:
                if one not in kept:
                    _remove(one.path)
        ddp_barrier()

    def save_checkpoint(
        self, meta=None, end_of_epoch=True, name=None, verbosity=logging.INFO
    ):
        """As the stock one; leaves a whole checkpoint or none.

        Raises
        ------
        OSError
            It cannot be written; tells what is free and what is left.
        """
        path = None
        if if_main_process():
            path = self._new_checkpoint_dirpath()
            if name is not None:
                path = self._custom_checkpoint_dirpath(name)
        path = ddp_broadcast(path)
        temporary = path.with_name(TEMPORARY + path.name)
        try:
            _make(temporary)
            for key, obj in self.recoverables.items():
                file = temporary / f"{key}{checkpoints.PARAMFILE_EXT}"
                self.custom_save_hooks[key](obj, file)
            self._publish(temporary, path, meta or {}, end_of_epoch)
        except BaseException as error:
            if if_main_process():
                self._give_up(temporary, error)
            raise
        if not if_main_process():
            return None
        kind = "end-of-epoch" if end_of_epoch else "intra-epoch"
        logger.log(verbosity, "Saved an %s checkpoint in %s", kind, path)
        return _read(path)

    @main_process_only
    def _publish(self, temporary, path, meta, end_of_epoch):
        """Has all of it on the disk, and gives it its name."""
        sizes = {}
        for file in temporary.iterdir():
            files.sync(file)
            sizes[file.name] = file.stat().st_size
        now = time.time()
        newest = self.newest()
        if newest is not None:  # the clock may have gone back
            now = max(now, math.nextafter(newest.meta["unixtime"], math.inf))
        meta = {"unixtime": now, "end-of-epoch": end_of_epoch, **meta}
        meta["files"] = sizes
        text = yaml.safe_dump(meta, explicit_end=True)
        told = temporary / checkpoints.METAFNAME
        told.write_text(f"# yamllint disable\n{text}", encoding="utf-8")
        files.sync(told)
        files.sync(temporary)
        os.rename(temporary, path)
        files.sync(path.parent)

    def _give_up(self, temporary, error):
        """Removes what was written, and explains what the system reported."""
        shutil.rmtree(temporary, ignore_errors=True)
        number = files.error_number(error)
        if number is None:
            return
        newest = self.newest()
        last = newest and f"The last good one is {newest.path}"
        remedy = "Free space" if number in FULL else "Mend that"
        free = _gb(shutil.disk_usage(self.checkpoints_dir).free)
        raise OSError(
            number,
            f"cannot write a checkpoint of about {_gb(self._expected_bytes())} "
            f"to {self.checkpoints_dir}: {os.strerror(number)} ({free} are "
            f"free there). {last or 'There is no earlier one'}. {remedy}, then "
            "start the same command again",
        ) from error

    def _expected_bytes(self):
        """Of a checkpoint: as the newest; else parameters and their state."""
        newest = self.newest()
        if newest is not None:
            return sum(newest.meta["files"].values())
        tensors = []
        for obj in self.recoverables.values():
            if isinstance(obj, torch.optim.Optimizer):
                tensors += [
                    p
                    for p in optimizer_state.parameters(obj)
                    if p.requires_grad
                ]
                tensors += [
                    t for one in obj.state.values() for t in one.values()
                ]
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    def find_checkpoint(self, *arguments, **options):
        """As the stock one; the same on every rank, whatever its disk shows."""
        return ddp_broadcast(super().find_checkpoint(*arguments, **options))

    def list_checkpoints(self):
        """All whole checkpoints, by name; warns once of each damaged one.

        Returns
        -------
        list of speechbrain.utils.checkpoints.Checkpoint
        """
        found = []
        for path in sorted(self.checkpoints_dir.iterdir()):
            if path.name.startswith(checkpoints.CKPT_PREFIX) and path.is_dir():
                try:
                    found.append(_read(path))
                except DAMAGE as error:
                    self._warn(path, " ".join(str(error).split()))
        return found

    def _warn(self, path, reason):
        if if_main_process() and path not in self.warned:
            text = "half-written or damaged checkpoint %s: %s; skipped"
            logger.warning(text, path, reason)
        self.warned.add(path)

    def newest(self):
        """The checkpoint that was saved last, or None."""
        return max(self.list_checkpoints(), key=ckpt_recency, default=None)

    def best(self):
        """The checkpoint of the lowest metric, or None if none tells it.

        Of the sound ones, if there are any; the newest among equals.
        """
        return self._best(self.list_checkpoints())

    def _best(self, found):
        name = self.best_metric
        return min(
            (one for one in found if _is_number(one.meta.get(name))),
            key=lambda one: (
                one.meta.get("collapsed") is True,  # False, or of earlier
                one.meta[name],
                -ckpt_recency(one),
            ),
            default=None,
        )

    def clean(self):
        """Removes what killed runs have left; no other run may be there.

        Raises
        ------
        ValueError
            There are checkpoints, and all are damaged: to begin anew is for
            the user to decide.
        """
        if not if_main_process():
            return
        for path in sorted(self.checkpoints_dir.glob(f"{TEMPORARY}*")):
            try:
                shutil.rmtree(path)
                logger.warning("removed %s, which a killed run had left", path)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error)
        if not self.list_checkpoints() and self.warned:
            raise ValueError(
                f"save_folder='{self.checkpoints_dir}': none of its "
                f"{len(self.warned)} checkpoints is whole; bring one back, "
                "choose another output_folder, or remove them to begin anew"
            )


@main_process_only
def _make(folder):
    shutil.rmtree(folder, ignore_errors=True)  # what ``_remove`` could not
    os.makedirs(folder)


def _remove(path):
    """The name that is looked for goes first: no rest will stand under it."""
    doomed = path.with_name(TEMPORARY + path.name)
    try:
        os.rename(path, doomed)
        shutil.rmtree(doomed)
        logger.info("Deleted checkpoint in %s", path)
    except OSError as error:  # no reason to end a run
        logger.warning("%s cannot be removed: %s", path, error)


def _read(folder):
    """The checkpoint in a folder; one of DAMAGE tells why it is none."""
    name = checkpoints.METAFNAME
    text = (folder / name).read_text(encoding="utf-8")
    meta = yaml.safe_load(text)
    whole = text.endswith(YAML_END) and NEEDED <= meta.keys()
    if not whole or not _is_number(meta["unixtime"]):
        raise ValueError(f"{name} is not whole")
    paramfiles = {}
    for name, n_bytes in dict(meta["files"]).items():
        path = folder / name
        n_there = path.stat().st_size
        if n_there != n_bytes:
            raise ValueError(f"{name} has {n_there} bytes, not {n_bytes}")
        if path.suffix == checkpoints.PARAMFILE_EXT:
            paramfiles[path.stem] = path
    return checkpoints.Checkpoint(folder, meta, paramfiles)


def _is_number(value):
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def _gb(n_bytes):
    if n_bytes < 1e9:
        return f"{n_bytes / 1e6:.1f} MB"
    return f"{n_bytes / 1e9:.1f} GB"


@main_process_only
def save_scaler(scaler, path):
    """Writes a gradient scaler's numbers."""
    files.save_state(scaler.state_dict(), Path(path))


def load_scaler(scaler, path, end_of_epoch):
    """Reads what ``save_scaler`` wrote; ValueError: it is damaged."""
    del end_of_epoch
    scaler.load_state_dict(files.load_state(Path(path)))


HOOKS = (
    (torch.optim.Optimizer, optimizer_state.load, optimizer_state.save),
    (torch.amp.GradScaler, load_scaler, save_scaler),
)
