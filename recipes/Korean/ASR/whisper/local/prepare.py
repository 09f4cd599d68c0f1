"""Corpora to manifests, with a report of what was left out and why.

In: a corpus folder, which is only read.
Out: train.csv, valid.csv, test*.csv and prepare_report.json.

    python -m local.prepare CORPUS FOLDER --out DIR
"""

import argparse
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path

from ruamel.yaml import YAML

from local import (
    clip_store,
    corpora as readers,
    leakage,
    manifest,
    manifest_folder,
    measured,
    mixture,
    prepare_report,
    ranks,
    user_errors,
)
from local.mixture import problems_of_corpora
from local.prepare_report import NAME as REPORT
from speechbrain.utils.distributed import if_main_process, run_on_main
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
VERSION = 4  # raise it when the same corpus would give other files
UNDECODABLE = "\ufffd"


def prepare(
    corpus,
    data_folder,
    out,
    label_fits,
    max_duration_s=30.0,
    slowest_speed=1.0,
    text_form="spelling",
    columns=None,
    keep_no_speech=True,
    heldout_share=0.02,
    corpora=(),
    keeps_store=False,
):
    """Writes the manifests of a corpus, unless they are there already.

    Every clip is decoded once, in threads, so that a broken file is found
    here and not after a week of training. Clips wait on disk, not in memory:
    about 700 bytes each while it lasts.

    Arguments
    ---------
    corpus : str
        A name in ``local.corpora.CORPORA``.
    data_folder : str or Path
        The corpus as its publisher packs it.
    out : str or Path
        Folder of the manifests.
    label_fits : callable
        Text to whether the decoder can hold it.
    max_duration_s : float
        The model's context, seconds.
    slowest_speed : float
        Of speed perturbation: a training clip grows by 1 / slowest_speed.
    text_form : str
        "spelling" or "pronunciation", where a corpus has both.
    columns : dict or None
        Our column names to those of the corpus.
    keep_no_speech : bool
        Keep clips with an empty text, as clips without speech.
    heldout_share : float
        Share of the distinct texts held out for a split that the corpus
        lacks; no held-out text is left in train.
    corpora : list of dict
        Several corpora instead, as for ``prepare_all``; ``corpus`` does not
        count then.
    keeps_store : bool
        Leave the clips there as a ``ClipStore``, too.

    Raises
    ------
    ValueError, FileNotFoundError
        Unknown corpus, missing folder or column, manifests into the corpus
        folder itself, or no clip left.
    OSError
        The disk is full; earlier manifests are whole.
    """
    settings = {
        "max_duration_s": max_duration_s,
        "slowest_speed": slowest_speed,
        "text_form": text_form,
        "columns": columns or {},
        "keep_no_speech": keep_no_speech,
        "heldout_share": heldout_share,
    }
    if corpora:
        prepare_all(corpora, data_folder, out, label_fits, **settings)
        return
    data_folder, out = manifest_folder.resolved(data_folder), Path(out)
    manifest_folder.require_apart(data_folder, out)
    transcripts = readers.transcripts(corpus, data_folder, columns)
    settings.update(
        version=VERSION,
        corpus=corpus,
        data_folder=str(data_folder),
        transcripts=manifest_folder.fingerprint(transcripts),
    )
    if not manifest_folder.finished(out, settings, keeps_store):
        _prepare(settings, data_folder, out, label_fits, keeps_store)


def _prepare(settings, data_folder, out, label_fits, keeps_store):
    manifest_folder.require_own(out)
    with manifest_folder.claimed(out), manifest_folder.staged(out) as stage:
        path = stage / clip_store.NAME
        with closing(clip_store.ClipStore(path)) as store:
            _fill(store, settings, data_folder, out, label_fits)
            held_out = store.hold_out_missing(settings["heldout_share"])
            prepare_report.require_clips(store, held_out, data_folder)
            _write(stage, store, held_out, settings, data_folder)
        if not keeps_store:
            path.unlink()


def prepare_all(corpora, data_folder, out, label_fits, **choices):
    """Writes the manifests of several corpora as of one.

    Each is prepared in a folder of its name, so that a change of one corpus
    is work for that one alone. Train and valid are put together; each test
    stays by itself, as ``test_<name>.csv``. IDs begin with the name.

    Arguments
    ---------
    corpora : list of dict
        ``corpus`` and ``folder`` of each, and where it is wanted ``name``
        (else the corpus'), ``columns``, ``text_form``, and ``weight``, which
        training reads.
    data_folder : str or Path
        What a relative folder lies below.
    out : str or Path
        Folder of the manifests.
    label_fits, **choices
        As for ``prepare``; ``columns`` and ``text_form`` are those of a
        corpus that has none of its own.

    Raises
    ------
    ValueError, FileNotFoundError, OSError
        As ``prepare``; and a list that ``problems_of_corpora`` tells of.
    """
    data_folder, out = manifest_folder.resolved(data_folder), Path(out)
    choices = {"columns": None, "text_form": "spelling", **choices}
    given = {key: choices[key] for key in ("columns", "text_form")}
    parts = mixture.complete(corpora, data_folder, **given)
    heads = {}
    for name, part in parts.items():
        prepare(
            out=out / name,
            label_fits=label_fits,
            keeps_store=True,
            **{**choices, **part},
        )
        heads[name] = prepare_report.head(out / name / REPORT)
        mixture.new_names(heads)  # raises before the next is decoded
    settings = {
        "version": VERSION,
        "data_folder": str(data_folder),
        "corpora": {
            name: {
                **head["settings"],
                "content": manifest_folder.content(out / name),
            }
            for name, head in heads.items()
        },
    }
    if not manifest_folder.finished(out, settings):
        manifest_folder.require_own(out)
        _mix(heads, out, settings, data_folder)


def _mix(heads, out, settings, data_folder):
    """Puts the prepared corpora together."""
    with manifest_folder.claimed(out), manifest_folder.staged(out) as stage:
        path = stage / clip_store.NAME
        with closing(clip_store.ClipStore(path)) as store:
            held_out = mixture.join(store, out, heads)
            _write(stage, store, held_out, settings, data_folder, heads)
        path.unlink()


def _fill(store, settings, data_folder, out, label_fits):
    """Keeps or drops every clip of a corpus."""
    found = readers.read(
        settings["corpus"],
        data_folder,
        settings["text_form"],
        settings["columns"],
        unpack_folder=out / "unpacked",
    )
    max_duration_s = settings["max_duration_s"]
    keep_no_speech = settings["keep_no_speech"]
    longest_s = {"train": max_duration_s * settings["slowest_speed"]}
    for utterance, keys, wrong in measured.clips(found):
        longest = longest_s.get(utterance.split, max_duration_s)
        reason = _reason(
            utterance, wrong, store, longest, label_fits, keep_no_speech
        )
        if reason:
            store.drop(utterance, reason, wrong[1] if wrong else "")
        else:
            store.keep(utterance, *keys)


def _reason(utterance, wrong, kept, longest_s, label_fits, keep_no_speech):
    """Why an utterance is left out; "" to keep it."""
    if utterance.id in kept:
        return "duplicate_id"
    if utterance.text is None or UNDECODABLE in utterance.text:
        return "missing_transcript"
    if wrong:
        return wrong[0]
    if utterance.duration == 0:
        return "empty_audio"
    if not utterance.text and not keep_no_speech:
        return "empty_text"
    if utterance.duration > longest_s:
        return "too_long"
    return "" if label_fits(utterance.text) else "label_too_long"


def _write(stage, store, held_out, settings, data_folder, heads=None):
    """The manifests and the report."""
    splits = {
        split: {**store.totals(split), "held_out": is_held_out}
        for split, is_held_out in held_out.items()
    }
    empty = prepare_report.empty_tests(splits, data_folder)
    splits = {name: splits[name] for name in splits if name not in empty}
    for name, split in splits.items():
        manifest.write(
            stage / f"{name}.csv",
            store.clips(name),
            settings.get("corpus", ""),  # of a mixture, each clip tells its own
            data_folder,
            has_sessions=split["sessions"] > 0,
        )
    shared = leakage.between(store, splits)
    prepare_report.write(
        stage / REPORT, settings, splits, store, shared, heads, empty
    )


def for_run(manifest_folder, output_folder, prepare_corpus, **limits):
    """The manifests of a run: ready ones, or of its corpus, with a report.

    Arguments
    ---------
    manifest_folder : str
        Of ready manifests; empty: the corpus is prepared.
    output_folder : str
        Of the run; the manifests go into ``manifests`` in it.
    prepare_corpus : functools.partial
        ``prepare`` with a run's settings.
    **limits
        Of the model, as ``prepare`` takes them.

    Returns
    -------
    Path
        Folder of the manifests.
    """
    if manifest_folder:
        return Path(manifest_folder)
    folder = Path(output_folder) / "manifests"
    if ranks.here()[1] > 1 and not (folder / REPORT).exists():
        _warn_of_waiting({"out": folder, **prepare_corpus.keywords, **limits})
    run_on_main(prepare_corpus, kwargs={"out": folder, **limits})
    if if_main_process():
        report = shutil.copy(folder / REPORT, output_folder)
        logger.info("%s\n%s", report, prepare_report.summary(report))
    return folder


def _warn_of_waiting(settings):
    """SpeechBrain's group of processes is given up after 7200 s."""
    if if_main_process():
        logger.warning(
            "the other processes wait for the manifests, two hours at most; "
            "for a larger corpus, stop here and run this first, in the recipe "
            "folder: %s",
            manifest_folder.command(**settings),
        )


def _positive(word):
    number = float(word)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not above 0")
    return number


def main():
    """The command line."""
    from local import dataio, model, rules, sources

    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted(readers.CORPORA)
    parser.add_argument("corpus", choices=names, nargs="?")
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument(
        "--corpora",
        type=YAML(typ="safe").load,
        default=[],
        help="several instead, such as '[{corpus: zeroth, folder: /data/z}, "
        "{corpus: kss, folder: /data/kss}]'",
    )
    parser.add_argument(
        "--data_folder",
        default=".",
        help="what relative folders of --corpora lie below",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--whisper_hub",
        default="random:large-v3",
        help="whose tokenizer counts the label tokens; random:SIZE has the "
        "true vocabulary and needs no network",
    )
    parser.add_argument("--max_duration_s", type=_positive, default=30.0)
    parser.add_argument("--slowest_speed", type=_positive, default=1.0)
    parser.add_argument("--text_form", default="spelling")
    parser.add_argument(
        "--columns",
        type=YAML(typ="safe").load,
        default={},
        help='such as "{path: file, text: sentence}"',
    )
    parser.add_argument("--drop_no_speech", action="store_true")
    parser.add_argument("--heldout_share", type=float, default=0.02)
    arguments = parser.parse_args()
    problems = [
        f"{name}={value!r}: {wrong}"
        for name, value in vars(arguments).items()
        if name in rules.RULES and name not in ("corpus", "corpora")
        if (wrong := rules.RULES[name](value))
    ]
    wrong = problems_of_corpora(arguments.corpora)
    problems += [f"corpora: {wrong}"] * bool(wrong)
    if bool(arguments.corpora) == bool(arguments.corpus):
        problems.append("give either CORPUS FOLDER or --corpora")
    if arguments.corpus and arguments.data_folder != ".":
        problems.append("--data_folder goes with --corpora; give FOLDER alone")
    if problems:
        parser.error("; ".join(problems))
    with user_errors.told("local.prepare"):
        tokenizer = sources.load_tokenizer(arguments.whisper_hub)
        prepare(
            arguments.corpus,
            arguments.data_folder if arguments.corpora else arguments.folder,
            arguments.out,
            partial(
                dataio.label_fits,
                tokenizer=tokenizer,
                max_tokens=model.MAX_TOKENS,
            ),
            max_duration_s=arguments.max_duration_s,
            slowest_speed=arguments.slowest_speed,
            text_form=arguments.text_form,
            columns=arguments.columns,
            keep_no_speech=not arguments.drop_no_speech,
            heldout_share=arguments.heldout_share,
            corpora=arguments.corpora,
        )
    print(prepare_report.summary(arguments.out / REPORT))


if __name__ == "__main__":
    main()
