"""Corpora to manifests, with a report of what was left out and why.

In: a corpus folder, which is only read.
Out: train.csv, valid.csv, test*.csv and prepare_report.json.

    python -m local.prepare CORPUS FOLDER --out DIR
"""

import argparse
import hashlib
import json
import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from ruamel.yaml import YAML
from tqdm import tqdm

from local import audio, corpora, files, manifest, prepare_report, text
from local.prepare_report import NAME as REPORT
from speechbrain.utils.distributed import if_main_process, run_on_main
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
VERSION = 2  # raise it when the same corpus would give other manifests
UNDECODABLE = "\ufffd"
N_AT_ONCE = 4096  # clips in flight: bounds memory, not speed


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
):
    """Writes the manifests of a corpus, unless they are there already.

    Every clip is decoded once, in threads, so that a broken file is found
    here and not after a week of training.

    Arguments
    ---------
    corpus : str
        A key of ``corpora.CORPORA``.
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
        For ``manifest``: our column names to those of the file.
    keep_no_speech : bool
        Keep clips with an empty text, as clips without speech.
    heldout_share : float
        Share of the distinct texts held out for a split that the corpus
        lacks; no held-out text is left in train.

    Raises
    ------
    ValueError, FileNotFoundError
        Unknown corpus, missing folder or column, manifests into the corpus
        folder itself, or no clip left.
    """
    data_folder, out = Path(data_folder).resolve(), Path(out)
    _require_apart(data_folder, out)
    settings = {
        "version": VERSION,
        "corpus": corpus,
        "data_folder": str(data_folder),
        "max_duration_s": max_duration_s,
        "slowest_speed": slowest_speed,
        "text_form": text_form,
        "columns": columns,
        "keep_no_speech": keep_no_speech,
        "heldout_share": heldout_share,
        "transcripts": _fingerprint(
            corpora.transcripts(corpus, data_folder, columns)
        ),
    }
    if _finished(out, settings):
        return
    out.mkdir(parents=True, exist_ok=True)
    found = corpora.read(corpus, data_folder, text_form, columns)
    longest_s = {"train": max_duration_s * slowest_speed}
    kept, dropped = [], []
    seen = set()
    for utterance, detail in _measured(found):
        reason = _reason(
            utterance,
            detail,
            seen,
            longest_s.get(utterance.split, max_duration_s),
            label_fits,
            keep_no_speech,
        )
        if reason:
            dropped.append((utterance, reason, detail))
        else:
            seen.add(utterance.id)
            kept.append(utterance)
    of_corpus = ["train", *(u.split for u in kept)]
    of_corpus += [u.split for u, *_ in dropped]
    splits = _split(kept, of_corpus, heldout_share)
    _require_clips(splits, dropped, data_folder)
    _remove_earlier(out, splits)
    for name, utterances in splits.items():
        manifest.write(out / f"{name}.csv", utterances, corpus, data_folder)
    report = prepare_report.content(settings, splits, of_corpus, dropped)
    with files.replacing(out / REPORT) as file:
        json.dump(report, file, ensure_ascii=False, indent=1)


def _require_apart(data_folder, out):
    """A corpus may have a train.csv of its own."""
    taken = [out.resolve(), *out.resolve().parents]
    if data_folder.is_file():  # a list may lie beside anything
        inside = data_folder.parent == taken[0]
    else:
        inside = data_folder in taken
    if inside:
        raise ValueError(
            f"the manifests would go to {out}, inside the corpus folder, into "
            "which nothing is written; choose another output folder"
        )


def _remove_earlier(out, splits):
    """Makes room for new manifests; foreign files stay where they are.

    From here on the report names the coming files, without the settings that
    would call them finished.
    """
    present = [
        path
        for pattern in ("train.csv", "valid.csv", "test*.csv")
        for path in out.glob(pattern)
    ]
    if present and not (out / REPORT).exists():
        raise ValueError(
            f"{present[0]} was not written by this preparation; choose another "
            "folder, or move the file"
        )
    earlier = _earlier_report(out).get("kept", [path.stem for path in present])
    with files.replacing(out / REPORT) as file:
        json.dump({"kept": {name: {} for name in [*earlier, *splits]}}, file)
    for name in earlier:
        (out / f"{name}.csv").unlink(missing_ok=True)


def _fingerprint(transcripts):
    """A change of any transcript file changes it; audio is not looked at."""
    digest = hashlib.sha256()
    for path in transcripts:
        status = os.stat(path)
        digest.update(
            f"{path} {status.st_size} {status.st_mtime_ns}\n".encode()
        )
    return digest.hexdigest()


def _earlier_report(out):
    """The report of an earlier preparation; empty if there is none."""
    try:
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _finished(out, settings):
    """Whether an earlier preparation with the same settings is complete."""
    report = _earlier_report(out)
    names = report.get("kept", {})
    same = report.get("settings") == json.loads(json.dumps(settings))
    return same and all((out / f"{name}.csv").is_file() for name in names)


def _measured(utterances):
    """(Utterance with text and duration, what is wrong with its audio)."""
    utterances = iter(utterances)
    bar = tqdm(desc="preparing", unit=" clips", dynamic_ncols=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool, bar:
        while some := list(islice(utterances, N_AT_ONCE)):
            for result in pool.map(_measure, some):
                bar.update()
                yield result


def _measure(utterance):
    label = utterance.text
    if label is not None:
        utterance = replace(utterance, text=text.for_label(label))
    try:
        duration = audio.duration(
            utterance.wav, utterance.start, utterance.stop
        )
    except FileNotFoundError as error:
        return utterance, ("missing_audio", str(error))
    except (OSError, ValueError) as error:
        return utterance, ("unreadable_audio", str(error))
    return replace(utterance, duration=duration), None


def _reason(utterance, detail, seen, longest_s, label_fits, keep_no_speech):
    """Why an utterance is left out; "" to keep it."""
    if utterance.id in seen:
        return "duplicate_id"
    if utterance.text is None or UNDECODABLE in utterance.text:
        return "missing_transcript"
    if detail:
        return detail[0]
    if utterance.duration == 0:
        return "empty_audio"
    if not utterance.text and not keep_no_speech:
        return "empty_text"
    if utterance.duration > longest_s:
        return "too_long"
    return "" if label_fits(utterance.text) else "label_too_long"


def _split(utterances, of_corpus, heldout_share):
    """Split name to utterances; holds out what the corpus lacks.

    A split of the corpus that has no clip left stays, and stays empty: a test
    on clips of train would pass for the test of the corpus.
    """
    splits = {name: [] for name in of_corpus}
    for utterance in utterances:
        splits[utterance.split].append(utterance)
    missing = [] if "valid" in splits else ["valid"]
    if not any(name.startswith("test") for name in splits):
        missing.append("test")
    for name in missing:
        _hold_out(splits, name, heldout_share)
    return splits


def _hold_out(splits, name, share):
    """Moves every reading of some texts from train to a new split.

    By text, since corpora such as Zeroth have each sentence read by many: a
    random clip's sentence would be known from training. Texts are ordered by
    a hash, so that the choice hangs on nothing but the text.
    """
    texts = {utterance.text for utterance in splits["train"]}
    ordered = sorted(texts, key=lambda t: hashlib.sha1(t.encode()).digest())
    chosen = set(ordered[: max(1, round(share * len(ordered)))])
    splits[name] = [u for u in splits["train"] if u.text in chosen]
    splits["train"] = [u for u in splits["train"] if u.text not in chosen]


def _require_clips(splits, dropped, data_folder):
    if any(splits.values()):
        return
    reasons = Counter(reason for _, reason, _ in dropped)
    raise ValueError(
        f"{data_folder}: no clip is left of {len(dropped)}; dropped: "
        + (", ".join(f"{n} {r}" for r, n in reasons.items()) or "none found")
    )


def for_run(manifest_folder, output_folder, prepare_corpus, **limits):
    """The manifests of a run: ready ones, or of its corpus, with a report.

    Arguments
    ---------
    manifest_folder : str
        Of ready manifests; empty: the corpus is prepared.
    output_folder : str
        Of the run; the manifests go into ``manifests`` in it.
    prepare_corpus : callable
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
    run_on_main(prepare_corpus, kwargs={"out": folder, **limits})
    if if_main_process():
        report = folder / REPORT
        shutil.copy(report, output_folder)
        logger.info("%s\n%s", report, prepare_report.summary(report))
    return folder


def _positive(word):
    number = float(word)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not above 0")
    return number


def main():
    """The command line."""
    from local import dataio, model, rules

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", choices=sorted(corpora.CORPORA))
    parser.add_argument("folder", type=Path)
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
        if name in rules.RULES and (wrong := rules.RULES[name](value))
    ]
    if problems:
        parser.error("; ".join(problems))
    tokenizer = model.load_tokenizer(arguments.whisper_hub)
    prepare(
        arguments.corpus,
        arguments.folder,
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
    )
    print(prepare_report.summary(arguments.out / REPORT))


if __name__ == "__main__":
    main()
