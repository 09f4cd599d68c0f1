"""What a name stands for, and the weights behind it."""

import json
import re
import shutil

import pytest
import torch
from conftest import SEED
from local import checkpoints, engines, model, sources, trained, vocabulary
from safetensors.torch import save_file
from transformers import AutoTokenizer, WhisperProcessor

HPARAMS = """\
best_metric: WER
eval_precision: bf16
test_beam_size: 3
max_new_tokens: 17
save_folder: elsewhere/save
"""


@pytest.fixture
def run(tmp_path, build, quickstart):
    """A run's folder of two checkpoints; the older has the lower WER."""
    folder = tmp_path / "results/train/1986"
    whisper = build()
    checkpointer = checkpoints.Checkpointer(
        folder / "save", {"whisper": whisper}, keep_last=2, best_metric="WER"
    )
    (folder / "hyperparams.yaml").write_text(HPARAMS, encoding="utf-8")
    for value, wer in ((0.25, 10.0), (0.5, 20.0)):
        with torch.no_grad():
            whisper.model.decoder.layer_norm.weight.fill_(value)
        checkpointer.save({"WER": wer, "CER": 30 - wer}, end_of_epoch=True)
    return folder


def value(whisper):
    """The mark by which a checkpoint is told."""
    (one,) = whisper.model.decoder.layer_norm.weight.unique().tolist()
    return one


def test_a_run_is_its_best_checkpoint(run, tmp_path):
    source = trained.resolve(str(run))
    assert source.kind == "checkpoint" and source.name == "train-1986"
    whisper = trained.load(source, "cpu", tmp_path / "random")
    assert value(whisper) == 0.25
    assert not whisper.training
    assert not list(run.glob("random*"))  # a run is only read


def test_a_checkpoint_can_be_named(run, tmp_path):
    newest = sorted((run / "save").glob("CKPT+*"))[-1]
    source = trained.resolve(str(newest))
    assert source.run == run
    assert value(trained.load(source, "cpu", tmp_path)) == 0.5


def test_a_checkpoint_apart_from_its_run(run, tmp_path):
    newest = sorted((run / "save").glob("CKPT+*"))[-1]
    shutil.copytree(newest, tmp_path / newest.name)
    source = trained.resolve(str(tmp_path / newest.name))
    assert source.run is None
    assert trained.run_settings(source) == {} and trained.curves(source) is None
    assert value(trained.load(source, "cpu", tmp_path)) == 0.5


def test_a_run_without_scores_is_its_newest_checkpoint(run, tmp_path):
    content = HPARAMS.replace("best_metric: WER", "best_metric: sWER")
    (run / "hyperparams.yaml").write_text(content, encoding="utf-8")
    source = trained.resolve(str(run))
    assert value(trained.load(source, "cpu", tmp_path)) == 0.5


def test_the_settings_of_a_run(run):
    assert trained.run_settings(trained.resolve(str(run))) == {
        "precision": "bf16",
        "beam_size": 3,
        "max_new_tokens": 17,
    }


def test_the_curves_of_a_run(run):
    assert trained.curves(trained.resolve(str(run))) is None
    (run / "curves.jsonl").touch()
    assert trained.curves(trained.resolve(str(run))) == run / "curves.jsonl"


def test_a_hugging_face_folder(quickstart, tmp_path):
    folder = shutil.copytree(quickstart, tmp_path / "exported")
    source = trained.resolve(str(folder))
    assert source.kind == "hub" and source.name == "exported"
    assert trained.run_settings(source) == {}
    told = {"precision": "fp32", "beam_size": 1, "torch": "2.11"}
    (folder / trained.PROVENANCE).write_text(json.dumps(told))
    told.pop("torch")
    assert trained.run_settings(source) == told
    trained.load(source, "cpu", tmp_path)


def test_a_folder_of_which_the_processor_was_saved(
    quickstart, tokenizer, tmp_path, monkeypatch
):
    """Transformers 5 writes the extractor's settings into another file."""
    folder = shutil.copytree(quickstart, tmp_path / "saved")
    (folder / "preprocessor_config.json").unlink()
    extractor = sources.load_extractor(quickstart)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *_, **options: tokenizer
    )
    whisper = trained.load(trained.resolve(str(folder)), "cpu", tmp_path)
    assert whisper.context_s == sources.context_seconds(quickstart)


def test_random_weights_are_built_where_asked(tmp_path):
    source = trained.resolve("random:quickstart")
    trained.load(source, "cpu", tmp_path)
    assert (tmp_path / f"quickstart_{trained.SEED}").is_dir()


def test_a_ctranslate2_folder(tmp_path):
    (tmp_path / "model.bin").touch()
    assert trained.resolve(str(tmp_path)).kind == "ctranslate2"


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("./none", FileNotFoundError, "no such folder; give a run's output"),
        ("results/a/b", FileNotFoundError, "no such folder; give a run's"),
        ("random:huge", ValueError, "tiny, base, small"),
        (".", ValueError, "holds no save/CKPT"),
    ],
)
def test_what_is_no_model(name, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        trained.resolve(name)


def test_a_folder_that_lacks_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weights.*no preprocessor_config"):
        trained.resolve(str(tmp_path))


@pytest.mark.parametrize(
    "content, message",
    [
        ("lr: 1\n", "does not tell best_metric, eval_precision, max_new_tok"),
        ("lr: [1\n", "hyperparams.yaml cannot be read"),
    ],
)
def test_the_run_of_another_recipe(run, content, message):
    (run / "hyperparams.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        trained.resolve(str(run))


def test_a_damaged_provenance_is_named(quickstart, tmp_path):
    folder = shutil.copytree(quickstart, tmp_path / "exported")
    for content in ("{", "3"):
        (folder / trained.PROVENANCE).write_text(content)
        with pytest.raises(ValueError, match="provenance.json is damaged"):
            trained.run_settings(trained.resolve(str(folder)))


def test_a_misspelt_folder_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    with pytest.raises(FileNotFoundError, match="no such folder; give"):
        trained.resolve("results/whispr")


def test_a_hub_name_that_is_not_there(monkeypatch):
    def unreachable(name):
        raise OSError(f"{name} is not a local folder\nand so on")

    monkeypatch.setattr(trained.sources, "context_seconds", unreachable)
    with pytest.raises(FileNotFoundError, match="'org/none': .*be reached"):
        trained.resolve("org/none")


def test_damaged_checkpoints(run):
    found = sorted((run / "save").glob("CKPT+*"))
    save_file({"a": torch.zeros(1)}, found[0] / "model.safetensors")
    with pytest.raises(
        ValueError, match=f"not whole.*{re.escape(found[1].name)}"
    ):
        trained.resolve(str(found[0]))
    assert trained.resolve(str(run)).path == str(found[1])
    (found[1] / "CKPT.yaml").write_text("")
    with pytest.raises(ValueError, match="none of its checkpoints is whole"):
        trained.resolve(str(run))


# New tokens


@pytest.fixture(scope="module")
def extended(quickstart, tokenizer, tmp_path_factory):
    """A checkpoint of a model with two new tokens, and the model."""
    pairs = [tokenizer.convert_ids_to_tokens([i, i + 1]) for i in (900, 1900)]
    new = vocabulary.NewTokens("extend", pairs, [51865, 51866])
    whisper = model.Whisper(
        quickstart, "full", False, False, "", SEED, new_tokens=new
    )
    with torch.no_grad():
        whisper.model.decoder.embed_tokens.weight[51866] = 7
    folder = tmp_path_factory.mktemp("extended")
    checkpointer = checkpoints.Checkpointer(folder, {"whisper": whisper})
    return checkpointer.save_checkpoint().path, whisper


def test_a_checkpoint_with_new_tokens(extended, tmp_path):
    path, wanted = extended
    source = trained.resolve(str(path))
    whisper = trained.load(source, "cpu", tmp_path)
    ours, theirs = (one.model.state_dict() for one in (whisper, wanted))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert whisper.config.vocab_size == whisper.model.config.vocab_size == 51867
    assert whisper.new_ids == [51865, 51866]
    vocab = whisper.tokenizer.get_vocab()
    assert vocab == engines.load_tokenizer(source).get_vocab()
    assert len(vocab) == 51867
    assert whisper.tokenizer.prefix_tokens[1] == sources.KOREAN


def test_checkpoints_of_other_new_tokens(run, extended, build):
    """None beside some, some beside none: nothing is changed."""
    path, whisper = extended
    bare = build()
    before = bare.model.decoder.embed_tokens.weight.clone()
    with pytest.raises(ValueError, match="'extend'. than those here .none."):
        bare.load(path / "whisper.ckpt", end_of_epoch=True)
    assert torch.equal(bare.model.decoder.embed_tokens.weight, before)
    old = sorted((run / "save").glob("CKPT+*"))[0] / "whisper.ckpt"
    assert "new_tokens" not in json.loads(old.read_text())
    with pytest.raises(ValueError, match="tokens .none. than those here .2 by"):
        whisper.load(old, end_of_epoch=True)


def test_damaged_new_tokens_are_told(extended, tmp_path):
    path = shutil.copytree(extended[0], tmp_path / extended[0].name)
    told = json.loads((path / "whisper.ckpt").read_text())
    told["new_tokens"]["ids"][0] = "1"
    source = trained.Source("checkpoint", str(path), "mine")
    (path / "whisper.ckpt").write_text(json.dumps(told))

    def read_weights(source):
        return trained.load(source, "cpu", tmp_path)

    for load in (engines.load_tokenizer, read_weights):
        with pytest.raises(ValueError, match="[+]00: the new tokens are dam"):
            load(source)
