"""Runs with new tokens and with text without audio, of two corpora as one."""

import csv
import json
from collections import Counter

import pytest
import soundfile
import torch
from killing import TIMINGS
from local import dataio
from outputs import checkpoints, curves, scores
from transformers import WhisperTokenizer

TEXTS = ["저는 어제 시장에서 사과를 샀습니다", "누나는 편지를 썼습니다"]
NEW = {
    "new_tokens": "replace",
    "n_new_tokens": 30,
    "new_rows": "normal",
    "new_rows_lr_multiplier": 3.0,
}
SETTINGS = {
    **NEW,
    "asr_ratio": 0.5,
    "batch_size": 4,
    "max_batch_length": 20,
    "grad_accumulation_factor": 2,
    "encoder_context": "mixed",
    "augment": True,
    "lr": 0.001,
    "warmup_steps": 2,
    "valid_interval_steps": 3,
    "log_interval_steps": 1,
    "number_of_epochs": 2,
}
N_ROWS = 51865  # of the quickstart's model
STOP = 5  # a step behind the checkpoint of a validation, in epoch 1


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    lines = [f"{text} {n}" for n in range(40) for text in TEXTS]
    path.write_text("\n".join([*lines, "", "\n"]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def straight(here, text_file, tmp_path_factory):
    """A run that never stopped."""
    folder = tmp_path_factory.mktemp("straight")
    return here(folder, text_file=text_file, **SETTINGS)


def told(brain):
    """Every line of a run's curves, but for timings."""
    return [
        {k: v for k, v in row.items() if k not in TIMINGS}
        for rows in curves(brain.output_folder)
        for row in rows
    ]


def is_text(ids):
    return all(name.startswith("line-") for name in ids)


def test_a_run_that_stopped_goes_on_to_the_same_bits(
    straight, here, text_file, tmp_path
):
    options = {"text_file": text_file, **SETTINGS}
    first = here(tmp_path, stop_after_step=STOP, **options)
    resumed = here(tmp_path, **options)
    assert first.optimizer_step == STOP < resumed.optimizer_step
    assert 0 < len(resumed.seen) < len(straight.seen)
    assert straight.seen[-len(resumed.seen) :] == resumed.seen
    assert told(resumed) == told(straight)
    for name, tensor in straight.trained.items():
        assert torch.equal(resumed.trained[name], tensor), name
    folders = straight.output_folder, resumed.output_folder
    assert scores(folders[0]) == scores(folders[1])


def test_half_of_the_batches_are_text_and_told_apart(straight):
    for epoch in (1, 2):
        kinds = [is_text(ids) for e, ids in straight.seen if e == epoch]
        assert sum(kinds) == len(kinds) / 2 > 0
    steps, validations = curves(straight.output_folder)
    both = [row for row in steps if {"asr_loss", "text_loss"} <= row.keys()]
    assert both and all(
        min(row["asr_loss"], row["text_loss"])
        < row["loss"]
        < max(row["asr_loss"], row["text_loss"])
        for row in both
    )
    for kind in ("asr_loss", "text_loss"):
        of_kind = [row[kind] for row in steps if kind in row]
        assert of_kind[-1] < of_kind[0]
    assert "text_loss" not in validations[0]["valid"]


def test_checkpoint_and_tokenizer_tell_the_new_tokens(straight):
    folder = straight.output_folder
    new = json.loads((folder / "tokenizer/new_tokens.json").read_text("utf-8"))
    assert 0 < len(new["ids"]) == len(straight.whisper.new_ids) <= 30
    saved = json.loads((checkpoints(folder)[-1] / "whisper.ckpt").read_text())
    assert saved["new_tokens"]["ids"] == new["ids"]
    alone = WhisperTokenizer.from_pretrained(folder / "tokenizer")
    own, said = straight.tokenizer, straight.longest
    for text in [*TEXTS, *said]:
        assert dataio.encode(text, alone) == dataio.encode(text, own)
    ids = {i for text in said for i in dataio.encode(text, own)}
    assert ids & {*new["ids"]}
    n_rows = straight.whisper.model.decoder.embed_tokens.weight.shape[0]
    assert n_rows == straight.whisper.config.vocab_size == N_ROWS


def test_other_new_tokens_are_refused_beside_checkpoints(
    straight, here, text_file
):
    other = {**SETTINGS, "n_new_tokens": 20, "text_file": text_file}
    with pytest.raises(SystemExit, match=r"n_new_tokens \(then 30, now 20\)"):
        here(straight.output_folder, **other)


def test_the_test_alone_scores_the_same(straight, here, text_file):
    folder = straight.output_folder
    expected = scores(folder)
    (folder / "scores/test.json").unlink()
    here(folder, "--test_only", text_file=text_file, **SETTINGS)
    assert scores(folder) == expected


def test_off_they_leave_nothing(here, tmp_path):
    brain = here(tmp_path, "--optimizer_step_limit=2", log_interval_steps=1)
    assert brain.optimizer_step == 2
    assert not (tmp_path / "tokenizer").exists()
    assert not any("text_loss" in row for row in told(brain))
    (saved,) = checkpoints(tmp_path)
    assert "new_tokens" not in json.loads((saved / "whisper.ckpt").read_text())


@pytest.fixture(scope="module")
def two_corpora(corpus, tmp_path_factory):
    """The spoken corpus as a FLEURS and a Common Voice."""
    root = tmp_path_factory.mktemp("two_corpora")
    with open(corpus / "manifest.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    fleurs, voice = root / "fleurs", root / "common_voice"
    (voice / "clips").mkdir(parents=True)
    names = {"train": "train", "valid": "dev", "test": "test"}
    for split, name in names.items():
        (fleurs / name).mkdir(parents=True)
        clips = [row for row in rows if row["split"] == split]
        half = len(clips) // 2
        lines = ["client_id\tpath\tsentence_id\tsentence\tup_votes"]
        for n, row in enumerate(clips):
            samples, rate = soundfile.read(corpus / row["path"])
            if n < half:
                path = fleurs / name / f"{name}{n}.wav"
            else:
                path = voice / "clips" / f"common_voice_ko_{split}{n}.mp3"
                lines.append(f"a\t{path.name}\ts{n}\t{row['text']}\t2")
            soundfile.write(path, samples, rate)
        table = "".join(
            f"{n}\t{name}{n}.wav\t{row['text']}\tlow\tl o w\t16000\tMALE\n"
            for n, row in enumerate(clips[:half])
        )
        (fleurs / f"{name}.tsv").write_text(table, encoding="utf-8")
        (voice / f"{name}.tsv").write_text("\n".join(lines), encoding="utf-8")
    return root


def test_fleurs_and_common_voice_as_one_cached_beside_text(
    two_corpora, here, text_file, tmp_path
):
    """Text and new tokens beside a frozen encoder whose states are kept."""
    listed = [
        {"corpus": "fleurs", "folder": "fleurs"},
        {"corpus": "common_voice", "folder": "common_voice"},
    ]
    brain = here(
        tmp_path / "run",
        data_folder=two_corpora,
        corpora=json.dumps(listed),
        adaptation="frozen_encoder",
        encoder_cache_folder=tmp_path / "cache",
        text_file=text_file,
        asr_ratio=0.5,
        number_of_epochs=2,
        max_batch_length=0,
        new_tokens="extend",
        n_new_tokens=30,
        num_workers=1,
    )
    for epoch in (1, 2):
        batches = [ids for e, ids in brain.seen if e == epoch]
        clips = [ids for ids in batches if not is_text(ids)]
        assert len(batches) == 2 * len(clips)
        counts = Counter(name[:2] for ids in clips for name in ids)
        # Without a dev.tsv of its own, FLEURS gives a clip for validation.
        assert counts == {"fl": 16, "co": 17}
        assert any(len({n[0] for n in ids}) == 2 for ids in clips)  # mixed
    # Each clip is encoded once.
    assert sum(n for _, n, _ in brain.encoded) == 33
    assert {epoch for epoch, _, _ in brain.encoded} == {1}
    n_new = len(brain.whisper.new_ids)
    assert brain.whisper.config.vocab_size == N_ROWS + n_new > N_ROWS
