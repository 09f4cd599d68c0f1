"""What an evaluation is asked for: all that may be wrong, names, settings."""

import json

import pytest
from conftest import write_audio
from local import engines, evaluation_plan, manifest
from local.manifest import Utterance

OPTIONS = {
    "precision": None,
    "beam_size": None,
    "max_new_tokens": None,
    "batch_size": 32,
    "num_workers": 0,
    "probes": 30,
    "resamples": 1000,
    "audio": "embed",
}


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch, tokenizer):
    """The session's one for every source."""
    monkeypatch.setattr(engines, "load_tokenizer", lambda source: tokenizer)


@pytest.fixture
def corpus(tmp_path):
    """A folder of one clip, and its manifest in the folder named."""
    wav = write_audio(tmp_path / "corpus/a.wav")

    def make(name, text="네"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        clip = Utterance("a", str(wav), text, "test", duration=1.0)
        manifest.write(path, [clip], "ours", wav.parent)
        return str(path)

    return make


@pytest.fixture
def model_folder(tmp_path):
    """An empty model of a kind, where it is named."""

    def make(name, file="config.json", **provenance):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for each in (file, "model.safetensors", "preprocessor_config.json"):
            (folder / each).write_text("{}")
        if provenance:
            text = json.dumps(provenance)
            (folder / "provenance.json").write_text(text)
        return str(folder)

    return make


@pytest.fixture
def make(corpus, tmp_path):
    """A Plan, by default of one model and one manifest on a CPU."""

    def plan(models=("random:tiny",), manifests=None, english=None, **changes):
        options = {**OPTIONS, "device": "cpu", **changes}
        options.setdefault("data_folder", str(tmp_path / "corpus"))
        options.setdefault("out", tmp_path / "out")
        manifests = [corpus("test.csv")] if manifests is None else manifests
        return evaluation_plan.make(models, manifests, english, **options)

    return plan


def test_a_plan_writes_nothing(make, tmp_path):
    plan = make()
    assert [s.path for s in plan.sources] == ["random:tiny"]
    assert plan.sets["test"]["a"]["wav"] == str(tmp_path / "corpus/a.wav")
    assert plan.decoding == evaluation_plan.DECODING
    assert plan.device == "cpu" and not (tmp_path / "out").exists()


# Problems


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"models": []}, "none asked for: give --model M"),
        ({"manifests": []}, "none asked for: give --manifest X.csv"),
        ({"models": ["/no/such"]}, "'/no/such': no such folder; give a run's"),
        ({"models": ["random:huge"]}, "no size 'huge'; choose tiny, base"),
        ({"models": ["..=random:tiny"]}, "'..' is no name"),
        ({"models": ["a=random:tiny"] * 2}, "'a' and 'a' are one name"),
        ({"manifests": ["x.csv"]}, "manifest 'x.csv': no such file; python"),
        ({"english": "x.csv"}, "manifest 'x.csv': no such file; python"),
        ({"data_folder": "/none"}, "none of its audio is there, such as"),
        ({"batch_size": 0}, "batch_size=0: give a whole number of at least 1"),
        ({"precision": "fp8"}, "precision='fp8': choose fp32, bf16, fp16"),
        ({"precision": "fp16"}, "precision='fp16': not on a CPU; choose bf16"),
        ({"beam_size": 0}, "beam_size=0: give a whole number"),
        ({"max_new_tokens": 449}, "max_new_tokens=449: give a whole number"),
        ({"probes": -1}, "probes=-1: give a whole number of at least 0"),
        ({"resamples": 0}, "resamples=0: give a whole number of at least 1"),
        ({"num_workers": -1}, "num_workers=-1: give a whole number"),
        ({"audio": "loud"}, "audio='loud': choose embed, link, none"),
        ({"device": "tpu"}, "device='tpu': choose cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "GPUs here; choose cpu, cuda or cuda:N"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_problems(make, changes, told):
    with pytest.raises(ValueError, match="^1 problem") as error:
        make(**changes)
    assert told in str(error.value)


def test_a_default_is_no_problem(make):
    assert make(probes=0, audio="none", num_workers=2, beam_size=5)


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "the file has no header"),
        (b"a,b\n", "column ID, duration, spk_id, wav, wrd is missing"),
        (b"ID,duration,wav,spk_id,wrd\n", "has no clip that can be used"),
        ("ID,이름\n".encode("cp949"), "is no CSV in UTF-8"),
    ],
    ids=["empty", "columns", "no row", "cp949"],
)
def test_problems_of_a_manifest(make, tmp_path, content, told):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="1 problem") as error:
        make(manifests=[str(path)])
    assert told in str(error.value) and "bad.csv" in str(error.value)


def test_problems_come_together(make):
    with pytest.raises(ValueError, match="^5 problem") as error:
        make(
            models=["/no/such", "random:huge"],
            manifests=["x.csv"],
            batch_size=0,
            audio="loud",
        )
    assert str(error.value).count("\n  - ") == 5


@pytest.mark.parametrize(
    "out, told",
    [
        ("corpus/scores", "is inside the corpus folder"),
        ("corpus", "is inside the corpus folder"),
        ("mine/scores", "is inside the model"),
        ("test.csv", "is a file; choose a folder"),
    ],
)
def test_folders_into_which_nothing_is_written(
    make, model_folder, corpus, tmp_path, out, told
):
    with pytest.raises(ValueError, match="1 problem") as error:
        make([model_folder("mine")], [corpus("test.csv")], out=tmp_path / out)
    assert told in str(error.value)


# What a run was trained from


@pytest.fixture
def adapter(tmp_path, model_folder):
    """A PEFT adapter of a base in a folder; nothing in them can be loaded."""
    base = model_folder("pretrained", precision="fp32", beam_size=7)
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").touch()
    (folder / "provenance.json").write_text('{"beam_size": 2}')
    return folder


def test_the_base_comes_first_and_has_no_say(make, adapter, tmp_path):
    plan = make([f"a={adapter}", "random:tiny"], base=True)
    names = [source.name for source in plan.sources]
    assert names == ["base", "a", "random-tiny"]
    base, mine, _ = plan.sources
    assert base.path == str(tmp_path / "pretrained") and base.kind == "hub"
    assert mine.path == str(adapter) and plan.decoding["beam_size"] == 2
    assert plan.decoding["precision"] == "bf16"


def test_the_base_of_an_exported_copy(make, model_folder):
    base = model_folder("pretrained")
    copy = model_folder("copy", whisper_hub=base, adaptation="full")
    plan = make([copy], base=True)
    assert [source.path for source in plan.sources] == [base, copy]


@pytest.mark.parametrize(
    "models, told",
    [
        (["random:tiny"], "--base: model 'random:tiny' tells of no base; name"),
        (["base={adapter}"], "'base' and 'base' are one name"),
        (["/no/such"], "'/no/such': no such folder; give a run's"),
        ([], "none asked for: give --model M"),
    ],
)
def test_problems_of_a_base(make, adapter, models, told):
    models = [model.format(adapter=adapter) for model in models]
    with pytest.raises(ValueError, match="^1 problem") as error:
        make(models, base=True)
    assert told in str(error.value)


def test_a_base_that_is_gone_is_told_once(make, adapter, tmp_path, monkeypatch):
    (tmp_path / "pretrained").rename(tmp_path / "moved")
    monkeypatch.setattr(engines, "load_tokenizer", evaluation_plan.trained.base)
    told = "^1 problem.*\n.*was trained from '.*pretrained', without which"
    with pytest.raises(ValueError, match=told):
        make([str(adapter)], base=True)


def test_what_a_model_needs_is_told_with_the_rest(make, adapter, monkeypatch):
    monkeypatch.setattr(
        evaluation_plan.trained.lora, "problem", lambda: "pip install peft"
    )
    with pytest.raises(ValueError, match="^2 problem") as error:
        make([str(adapter)], ["x.csv"])
    assert f"'{adapter}' is LoRA: pip install peft" in str(error.value)


# Names


@pytest.mark.parametrize(
    "folders, names",
    [
        (["a/b"], ["b"]),
        (["a/x", "b/x", "c/y"], ["a-x", "b-x", "y"]),
        (["a/x/1", "b/x/1"], ["a-x-1", "b-x-1"]),
        (["CKPT+2026-11-21+15-49-34+00"], ["CKPT+2026-11-21+15-49-34+00"]),
    ],
)
def test_names_of_models(make, model_folder, folders, names):
    plan = make([model_folder(folder) for folder in folders])
    assert [source.name for source in plan.sources] == names


def test_names_given(make, model_folder):
    folder = model_folder("lr=1/x")
    given = [f"미세 조정={folder}", "x=random:tiny", folder, "random:tiny"]
    plan = make(given)
    names = [source.name for source in plan.sources]
    assert names == ["미세 조정", "x", "lr=1-x", "random-tiny"]


def test_names_of_test_sets(make, corpus):
    paths = "a/test.csv", "b/test.csv", "clean.csv"
    plan = make(
        manifests=[corpus(path) for path in paths],
        english=corpus("c/test.csv"),
    )
    assert list(plan.sets) == ["a-test", "b-test", "clean", "english_test"]
    assert plan.english == "english_test"


def test_a_name_makes_no_test_set_english(make, corpus):
    plan = make(manifests=[corpus("english_test.csv")])
    assert list(plan.sets) == ["english_test"] and plan.english is None


# How to decode


@pytest.mark.parametrize(
    "given, told, expected",
    [
        ({}, [], ("bf16", 1, 444)),
        ({}, [{}, {"precision": "fp32", "beam_size": 3}], ("fp32", 3, 444)),
        (
            {"beam_size": 1},
            [{"beam_size": 5}, {"beam_size": 3, "max_new_tokens": 60}],
            ("bf16", 1, 60),
        ),
        ({}, [{"precision": "fp32"}, {"precision": "bf16"}], ("fp32", 1, 444)),
    ],
)
def test_settings_of_the_first_model_that_tells_them(
    make, model_folder, given, told, expected
):
    """A flag before all, then the models in their order."""
    models = [model_folder(f"m{i}", **one) for i, one in enumerate(told)]
    plan = make(models or ["random:tiny"], **given)
    assert tuple(plan.decoding.values()) == expected
    assert list(plan.decoding) == ["precision", "beam_size", "max_new_tokens"]


def test_labels_over_the_decoders_length_are_scored(make, corpus):
    plan = make(manifests=[corpus("long.csv", "뷁" * 448)])
    assert len(plan.sets["long"]) == 1


def test_audio_lies_where_it_was_prepared(make, corpus, tmp_path):
    path = corpus("told.csv")
    with pytest.raises(ValueError, match="none of its audio is there"):
        make(manifests=[path], data_folder="")
    told = {"settings": {"data_folder": str(tmp_path / "corpus")}}
    (tmp_path / "prepare_report.json").write_text(json.dumps(told, indent=1))
    assert len(make(manifests=[path], data_folder="").sets["told"]) == 1


def test_a_folder_is_no_manifest(make, tmp_path):
    with pytest.raises(ValueError, match="is a folder; name a CSV in it"):
        make(manifests=[str(tmp_path)])


def test_a_dot_within_a_manifests_name_stays(make, corpus):
    plan = make(manifests=[corpus("test.csv"), corpus("test.noisy.csv")])
    assert list(plan.sets) == ["test", "test.noisy"]


def test_torchrun_gives_each_process_its_gpu(monkeypatch):
    monkeypatch.setattr(evaluation_plan.torch.cuda, "device_count", lambda: 4)
    assert evaluation_plan._device("cuda:2") == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert evaluation_plan._device("cuda") == "cuda:3"
    assert evaluation_plan._device("cpu") == "cpu"
