"""The life of a LoRA run: stopped, killed, scored again, shared out, refused.

On a base of any precision, with either optimizer, a run that goes on is the
run that never stopped, to the bit. Of rank 32: with a lower one all moments
of adamw_8bit would have 32 bits.
"""

import json
import shutil
from pathlib import Path

import killing
import pytest
import torch
from killing import Moment
from local import feature_shards
from outputs import checkpoints, curves, scores
from safetensors.torch import load_file

SETTINGS = {
    "adaptation": "lora",
    "lora_dropout": 0.05,
    "lora_rank": 32,
    "batch_size": 4,
    "max_batch_length": 20,
    "grad_accumulation_factor": 2,
    "encoder_context": "mixed",
    "augment": True,
    "schedule": "cosine",
    "warmup_steps": 0.2,
    "lr": 0.01,
    "valid_csv": "test.csv",  # five clips, not one
    "valid_interval_steps": 3,
    "log_interval_steps": 1,
}
INT8 = {"base_precision": "int8", "optimizer_name": "adamw_8bit"}
INT4 = {"base_precision": "int4", "optimizer_name": "adamw"}
FP32 = {"base_precision": "fp32", "optimizer_name": "adamw"}
BF16 = {"base_precision": "bf16", "precision": "bf16", "eval_precision": "bf16"}
OTHERS = [
    INT4,
    {**FP32, "schedule": "noam", "warmup_steps": 2},
    {**FP32, "optimizer_name": "adamw_8bit", "encoder_context": "true_length"},
    {**INT4, "optimizer_name": "adamw_8bit", "encoder_context": "full"},
    {**INT8, "optimizer_name": "adamw", "schedule": "linear"},
    {**BF16, "optimizer_name": "adamw", "schedule": "constant"},
]
SCRIPT = Path(__file__).with_name("distributed_runs.py")
# Without chance, and at full context: else a clip's hangs on its batch.
ONE_BATCH = {
    "adaptation": "lora",
    "lora_rank": 32,
    "lora_dropout": 0.0,
    "number_of_epochs": 2,
    "max_batch_length": 0,
    "encoder_context": "full",
    "lr": 0.003,
    "warmup_steps": 4,
}
ON_RANKS = {"fp32": FP32, "int8": INT8, "int4": INT4}
LONG = {"number_of_epochs": 3, "ckpt_interval_steps": 2, "keep_last": 2}
STOP = 4  # a step behind the only checkpoint
FILES = {
    "CKPT.yaml",
    "adapter_config.json",
    "adapter_model.safetensors",
    "batches.ckpt",
    "brain.ckpt",
    "dataloader-TRAIN.ckpt",
    "early_stopping.ckpt",
    "epoch_counter.ckpt",
    "monitor.ckpt",
    "optimizer.ckpt",
    "optimizer.safetensors",
    "whisper.ckpt",
}


def named(settings):
    return "-".join(map(str, settings.values()))


def differences(folder, other):
    """What two finished runs do not share, to the bit, but for timings."""
    ours, theirs = dict(results(folder)), dict(results(other))
    names = ours.keys() | theirs.keys()
    return sorted(n for n in names if ours.get(n) != theirs.get(n))


def results(folder):
    """(name, content) of curves, newest and best checkpoint, scores."""
    for row in killing.curve(folder):
        told = {k: v for k, v in row.items() if k not in killing.TIMINGS}
        kind = "validation" if "valid" in row else "step"
        yield f"{kind} {row['step']}", told
    for find in (killing.newest, killing.best):
        told = killing.meta(find(folder))
        told = {k: told[k] for k in told.keys() - {"unixtime", "files"}}
        yield f"{find.__name__} CKPT.yaml", told
        for path in find(folder).glob("*.safetensors"):
            yield f"{find.__name__} {path.name}", path.read_bytes()
    for path in (folder / "scores").glob("*.json*"):
        yield path.name, path.read_bytes()


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def stop_and_go_on(here, folder, settings):
    """Power fails behind a checkpoint, and a second start ends the run."""
    first = here(folder, stop_after_step=STOP, **{**SETTINGS, **settings})
    resumed = here(folder, **{**SETTINGS, **settings})
    assert first.optimizer_step == STOP < resumed.optimizer_step
    assert 0 < len(resumed.seen) < 2 * STOP


@pytest.fixture(scope="module")
def whole(here, tmp_path_factory):
    """A run that nothing stopped, and its settings."""
    settings = {**SETTINGS, **INT8}
    return here(tmp_path_factory.mktemp("whole"), **settings), settings


@pytest.fixture
def copied(whole, tmp_path):
    """The output of such a run, to do with it as one likes."""
    brain, settings = whole
    folder = shutil.copytree(brain.output_folder, tmp_path / "copied")
    return folder, settings


def test_goes_on_as_if_nothing_had_been(whole, here, tmp_path):
    brain, settings = whole
    stop_and_go_on(here, tmp_path, settings)
    assert differences(tmp_path, brain.output_folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHERS, ids=named)
def test_others_go_on_too(settings, here, tmp_path):
    settings = {**SETTINGS, **settings}
    here(tmp_path / "whole", **settings)
    stop_and_go_on(here, tmp_path / "stopped", settings)
    assert differences(tmp_path / "stopped", tmp_path / "whole") == []


def test_a_checkpoint_is_under_a_twentieth_of_a_full_one(whole):
    """Which has the weights and two moments of each, in fp32."""
    brain, _ = whole
    kept = checkpoints(brain.output_folder)
    assert kept
    base = Path(brain.whisper.source, "model.safetensors")
    for path in kept:
        assert {file.name for file in path.iterdir()} == FILES
        saved = sum(file.stat().st_size for file in path.iterdir())
        assert saved < 0.05 * 3 * base.stat().st_size


def test_scored_again_it_scores_the_same(copied, here, hub, tmp_path):
    """Where its base has moved to, too: the digest tells that it is the one."""
    folder, settings = copied
    paths = sorted((folder / "scores").glob("*.json*"))
    before = [path.read_bytes() for path in paths]
    assert len(before) == 4
    for path in paths:
        path.unlink()
    moved = shutil.copytree(hub, tmp_path / "moved")
    here(folder, "--test_only", whisper_hub=moved, **settings)
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.slow
def test_recomputing_activations_draws_the_same_dropout(whole, here, tmp_path):
    brain, settings = whole
    again = here(tmp_path, gradient_checkpointing=True, **settings)
    assert_same(again.trained, brain.trained)


REFUSED = {
    "lora_rank": (4, "lora_rank=32, this run has 4"),
    "lora_alpha": (8, "lora_alpha=64, this run has 8"),
    "lora_part": ("decoder", "lora_part='both', this run has 'decoder'"),
    "lora_target_modules": ("[q_proj]", r"this run has \['q_proj'\]"),
    "base_precision": ("fp32", "this run has 'fp32'"),
    "adaptation": ("frozen_encoder", "this run has 'frozen_encoder'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_cannot_go_on_with(name, whole, here):
    brain, settings = whole
    value, told = REFUSED[name]
    changed = {**settings, "encoder_context": "full", name: value}
    if name == "adaptation":
        changed["base_precision"] = "fp32"
    before = sorted(brain.output_folder.rglob("*"))
    with pytest.raises(SystemExit, match=f"{told}.*or another output"):
        here(brain.output_folder, **changed)
    assert sorted(brain.output_folder.rglob("*")) == before


def test_another_optimizer_is_refused(copied, here):
    folder, settings = copied
    settings = {**settings, "optimizer_name": "adamw", "number_of_epochs": 2}
    told = "optimizer_name='adamw_8bit', this run has 'adamw'"
    with pytest.raises(SystemExit, match=told):
        here(folder, **settings)


def test_other_base_weights_are_refused(copied, here):
    """Under the same name."""
    folder, settings = copied
    for path in checkpoints(folder):
        saved = json.loads((path / "whisper.ckpt").read_text("utf-8"))
        saved["base_sha256"] = saved["base_sha256"][::-1]
        (path / "whisper.ckpt").write_text(json.dumps(saved), "utf-8")
    told = "trained beside other weights than those of whisper_hub="
    with pytest.raises(ValueError, match=told):
        here(folder, "--test_only", **settings)


def cut_weights(path):
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def lose_config(path):
    (path / "adapter_config.json").unlink()


@pytest.mark.parametrize("damage", [cut_weights, lose_config])
def test_a_damaged_adapter_is_told(damage, copied, here):
    folder, settings = copied
    for path in checkpoints(folder):
        damage(path)
    with pytest.raises(SystemExit, match="none of its 1 checkpoints is whole"):
        here(folder, **settings)


@pytest.fixture(scope="module")
def command(small, hub):
    """The command of a run that may be killed, long enough for it."""

    def make(folder, launcher=(), **settings):
        settings = {**SETTINGS, **LONG, "whisper_hub": hub, **settings}
        return [*killing.python(*launcher), *small(folder, **settings)]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("base", [FP32, INT8, INT4], ids=named)
def test_killed_and_terminated(base, command, recipe, tmp_path):
    """SIGKILL where a checkpoint is written, and in a validation; SIGTERM."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    killing.run_to_the_end(command(whole, **base), recipe, whole)
    ends = {row["epoch"]: row["step"] for row in killing.curve(whole)}
    due = {s["step"] for s in curves(whole)[1]}
    last, at = max(ends.values()), (command(killed, **base), recipe, killed)
    for moment in (Moment("checkpoint", 2), Moment("validation", 4)):
        start = killing.start(*at, moment, due)
        assert start.reached, start.printed[-4000:]
    term = killing.start(*at, Moment("line", 8), due, gently=True)
    assert term.code == 143 and 8 <= term.step < last, term.printed[-4000:]
    killing.run_to_the_end(*at)
    assert differences(killed, whole) == []


@pytest.mark.slow
def test_stops_early_and_begins_as_the_base(here, tmp_path):
    """Adapters that have learnt nothing change no score."""
    still = {"lr": 1e-12, "schedule": "constant", "number_of_epochs": 9}
    settings = {**SETTINGS, **FP32, **still, "early_stopping_patience": 2}
    brain = here(tmp_path / "lora", score_before_training=True, **settings)
    assert brain.optimizer_step == 6  # the third validation
    base = here(tmp_path / "base", score_before_training=True, batch_size=34)
    ours, theirs = brain.output_folder, base.output_folder
    untouched = scores(ours, "test.untouched")
    assert scores(ours) == untouched == scores(theirs, "test.untouched")


@pytest.mark.slow
@pytest.mark.parametrize("base", [FP32, INT8], ids=named)
def test_shards_give_the_losses_of_audio(base, here, corpus, hub, tmp_path):
    settings = {**SETTINGS, **base, "augment": False}
    audio = here(tmp_path / "audio", **settings)
    shards = tmp_path / "shards"
    manifests = f"{audio.output_folder}/manifests"
    feature_shards.make(manifests, shards, hub, data_folder=str(corpus))
    settings["valid_csv"] = "valid.csv"
    brain = here(tmp_path / "shards_run", features_folder=shards, **settings)
    assert brain.seen == audio.seen
    told, expected = (curves(b.output_folder)[0] for b in (brain, audio))
    for row, other in zip(told, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("base", [FP32, INT8], ids=named)
def test_a_decoder_hears_what_is_kept(base, here, tmp_path):
    """Adapters in the decoder alone: its encoder is frozen, and may be kept."""
    frozen = {"lora_part": "decoder", "augment": False, "max_batch_length": 0}
    frozen |= {"encoder_context": "full", "number_of_epochs": 2}
    settings = {**SETTINGS, **base, **frozen}
    cache = tmp_path / "cache"
    plain = here(tmp_path / "plain", **settings)
    kept = here(tmp_path / "kept", encoder_cache_folder=cache, **settings)
    assert {n for _, _, n in plain.encoded} == {plain.whisper.context_samples}
    assert {epoch for epoch, _, _ in kept.encoded} == {1}
    assert_same(kept.trained, plain.trained)
    assert differences(tmp_path / "kept", tmp_path / "plain") == []
    other = INT8 if base == FP32 else FP32
    settings |= {**other, "number_of_epochs": 1}
    here(tmp_path / "other", encoder_cache_folder=cache, **settings)
    assert len(list(cache.iterdir())) == 2


@pytest.fixture(scope="module")
def two(run, small, hub, tmp_path_factory):
    """What distributed_runs.py leaves of runs on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    arguments = {
        name: small(
            folder / name,
            whisper_hub=hub,
            distributed_backend="gloo",
            **{**ONE_BATCH, **base, "batch_size": 4},
        )
        for name, base in ON_RANKS.items()
    }
    (folder / "runs.json").write_text(json.dumps(arguments), encoding="utf-8")
    run(folder, script=SCRIPT, launcher=killing.TORCHRUN)
    return folder


def assert_close(ours, theirs, share):
    """The distance of all weights, as a share of their size."""
    both = [
        torch.cat([one[k].flatten() for k in ours]) for one in (ours, theirs)
    ]
    assert (both[0] - both[1]).norm() < share * both[1].norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks_are_one_with_twice_the_batch(name, two, here, tmp_path):
    """And so are micro-batches of an eighth each."""
    settings = {**ONE_BATCH, **ON_RANKS[name]}
    # Rounding moves a moment of 8 bits by a whole level, if any.
    share = 1e-4 if settings["optimizer_name"] == "adamw" else 5e-3
    one = here(tmp_path / "one", **settings)
    first, second = (load_file(two / f"{name}.{n}.safetensors") for n in (0, 1))
    assert_same(first, second)
    assert_close(first, one.trained, share)
    told = scores(one.output_folder), scores(two / name)
    losses = [flat.pop("loss") for flat in told]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert told[0] == told[1]
    smaller = {"batch_size": 1, "grad_accumulation_factor": 8}
    parts = here(tmp_path / "parts", **{**settings, **smaller})
    assert parts.optimizer_step == one.optimizer_step
    assert_close(parts.trained, one.trained, share)
