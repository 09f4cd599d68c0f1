#!/usr/bin/env python3
"""Scores models on test sets, side by side.

> python evaluate.py --model openai/whisper-large-v3 --model tuned=results/train_large_v3/1986 --manifest manifests/test.csv --data_folder /data/zeroth --out results/report
> python evaluate.py --base --model results/train_large_v3/1986 --manifest manifests/test.csv --out results/report
> torchrun --nproc_per_node=8 evaluate.py --model … --manifest … --out …

Each later model is compared with the first. What may stand for a model decides
local/trained.py, who runs it local/engines.py, what is asked for
local/evaluation_plan.py, what is counted local/metrics.py and
local/analysis.py, how it is shown local/report/.
"""

import argparse
import dataclasses
import json
import math
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from local import (
    analysis,
    audio,
    batching,
    bootstrap,
    dataio,
    engines,
    evaluation_plan,
    files,
    metrics,
    probes,
    ranks,
    text,
    trained,
    user_errors,
)
from local.report import page, tables
from tqdm import tqdm

import speechbrain as sb
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataloader import make_dataloader
from speechbrain.utils.distributed import ddp_init_group, if_main_process

COLUMNS = ["id", "wrd", "duration", "category", "spk_id"]
told = partial(
    user_errors.told, "evaluate.py", out_of_memory="lower --batch_size"
)
VERSIONS = ("torch", "transformers", "speechbrain")


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    several = partial(dict, action="append", default=[])
    a_model = "a run's output folder, a CKPT+… folder, a Hugging Face, "
    a_model += "CTranslate2 or PEFT adapter folder, a hub name or random:SIZE"
    add("--model", **several(dest="models"), metavar="[NAME=]M", help=a_model)
    before = "compare with what the first model was trained from, its weights "
    before += "in fp32, computed as the run is"
    add("--base", action="store_true", help=before)
    add(
        "--manifest",
        **several(dest="manifests"),
        metavar="CSV",
        help="a test set",
    )
    add(
        "--english",
        metavar="CSV",
        help="English speech, to see what is forgotten",
    )
    add("--out", metavar="DIR", required=True, type=Path)
    add(
        "--data_folder",
        default="",
        help="what $data_root stands for; else as prepared",
    )
    add("--batch_size", type=int, default=32)
    add("--precision", help="fp32, bf16 or fp16; else as in the model's run")
    add("--beam_size", type=int, help="1: greedy; else as in the model's run")
    add("--max_new_tokens", type=int, help="else as in the model's run")
    add("--device", help="cpu, cuda or cuda:N; else a GPU where there is one")
    add("--probes", type=int, default=30, help="clips without speech a kind")
    add("--audio", default="embed", help="in the report: embed, link or none")
    add("--resamples", type=int, default=1000, help="of the intervals")
    add("--num_workers", type=int, default=0, help="that read audio")
    return parser.parse_args(arguments)


def dataset(rows, engine):
    """A test set as an engine takes it, read as train.py reads it."""
    max_samples = int(engine.context_s * audio.SAMPLE_RATE)

    @sb.utils.data_pipeline.takes("wav", "start", "stop")
    @sb.utils.data_pipeline.provides("sig", "failed")
    def read(wav, start, stop):
        yield from dataio.read_or_silence(wav, start, stop, max_samples)

    @sb.utils.data_pipeline.takes("wrd")
    @sb.utils.data_pipeline.provides("tokens_bos", "tokens_eos")
    def tokenize(wrd):
        yield from dataio.token_ids(wrd, engine.tokenizer)

    return sb.dataio.dataset.DynamicItemDataset(
        rows,
        dynamic_items=[read, tokenize],
        output_keys=[*COLUMNS, *read.provides, *tokenize.provides],
    )


def decode(engine, name, rows, batch_size, num_workers):
    """Every clip of a test set to text; ranks share the clips.

    Returns
    -------
    records : list of Record
    loss : float or None
        Mean negative log-likelihood a token, in nats.
    seconds : float
        Of the rank that took longest, from waveforms to texts.
    """
    batches = batching.in_order(
        [row["duration"] for row in rows.values()],
        batch_size,
        engine.context_s,
        False,  # all at full context
        *ranks.here(),
    )
    loader = make_dataloader(
        dataset(rows, engine),
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=PaddedBatch,
    )
    found, nats, n_tokens, seconds = {}, 0.0, 0, 0.0
    title, hidden = f"{engine.name}, {name}", not if_main_process()
    for batch in tqdm(loader, title, disable=hidden):
        scored = engine.score(batch)
        found |= metrics.records(batch, scored.texts)
        nats, n_tokens = nats + scored.nll, n_tokens + scored.n_tokens
        seconds += scored.seconds
    parts = ranks.gather((found, nats, n_tokens, seconds))
    found, nats, n_tokens, seconds = zip(*parts)
    records = [
        dataclasses.replace(record, speaker=rows[record.id]["spk_id"])
        for record in metrics.merged(found)
    ]
    loss = sum(nats) / max(sum(n_tokens), 1)
    is_known = engine.has_loss and math.isfinite(loss)
    return records, loss if is_known else None, max(seconds)


def score(records, rows, loss, seconds, n_resamples):
    """All that is counted of one model's texts on one test set."""
    heard_s = sum(r.duration for r in records if not r.failed)
    return {
        "scores": metrics.score(records, loss),
        "analysis": analysis.analyse(records, n_resamples),
        "real_time_factor": seconds / heard_s if heard_s else None,
        "utterances": [utterance(r, rows[r.id]) for r in records],
    }


def utterance(record, row):
    """What the report shows of one clip."""
    return {
        **metrics.record_row(record),
        "n_chars": len(text.for_scoring(record.reference)),
        "speaker": record.speaker,
        **{key: row[key] for key in ("wav", "start", "stop")},
        "flags": analysis.flags(record),
    }


def evaluate(plan, options):
    """Decodes and scores; on the main process, what the report takes."""
    results, probed, records, computed_in, bases = [], [], {}, {}, {}
    for source in plan.sources:
        with told():
            engine = engines.load(
                source,
                plan.device,
                **plan.decoding,
                work_folder=options.out / "random_whisper",
                batch_size=options.batch_size,
            )
        computed_in[source.name] = engine.precision
        bases[source.name] = engine.base
        for name, rows in plan.sets.items():
            with engine.hearing("en" if name == plan.english else "ko"):
                found, loss, seconds = decode(
                    engine, name, rows, options.batch_size, options.num_workers
                )
            if if_main_process():
                records[source.name, name] = found
                result = score(found, rows, loss, seconds, options.resamples)
                folder = options.out / "scores" / source.name
                metrics.write_scores(folder, name, found, result["scores"])
                names = {"model": source.name, "test_set": name}
                results.append({**names, **result})
        if options.probes and if_main_process():
            probed += probes.run(engine, options.probes)
        del engine  # two need not fit into one memory
    return {
        "settings": settings(plan, options, computed_in, bases),
        "results": results,
        "paired": list(compared(plan, records, options.resamples)),
        "probes": probed,
        "runs": [
            {"model": source.name, "curves": path and str(path)}
            for source in plan.sources
            for path in [trained.curves(source)]
        ],
    }


def compared(plan, records, n_resamples):
    """The first model with each later one, on each test set."""
    first, *others = [source.name for source in plan.sources]
    for name in plan.sets if records else ():
        for other in others:
            pair = records[first, name], records[other, name]
            yield {
                "test_set": name,
                "model_a": first,
                "model_b": other,
                "n_utterances": len(pair[0]),
                **bootstrap.paired(*pair, n_resamples),
            }


def settings(plan, options, computed_in, bases):
    """What the scores hang on, for the report."""
    gpu = plan.device.startswith("cuda")
    return {
        **plan.decoding,
        **{
            f"precision of {name}": precision
            for name, precision in computed_in.items()
            if precision != plan.decoding["precision"]
        },
        **{f"base of {name}": base for name, base in bases.items() if base},
        "batch_size": options.batch_size,
        "text_policy": text.POLICY,
        "resamples": options.resamples,
        "heard as English": plan.english or "none",
        "data_folder": options.data_folder,
        "device": torch.cuda.get_device_name(plan.device) if gpu else "CPU",
        "processes": ranks.here()[1],
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in VERSIONS},
    }


def write(folder, evaluation, clips):
    """The files for people and for programs; foreign ones stay."""
    table = tables.markdown(evaluation)
    with files.replacing(folder / "evaluation.json") as file:
        json.dump(evaluation, file, ensure_ascii=False, indent=1)
    tables.write_csv(folder / "scores.csv", evaluation)
    with files.replacing(folder / "scores.md") as file:
        file.write(table)
    page.write(folder / "report.html", evaluation, clips)
    print(f"\n{table}")
    for name in ("report.html", "scores.csv", "scores.md", "evaluation.json"):
        print(f"{name:16}{folder / name}")


def main():
    """Arguments, models, test sets, scores, report."""
    options = parse()
    with told():
        plan = evaluation_plan.make(**vars(options))
        is_gpu = plan.device.startswith("cuda")
        ddp_init_group({"distributed_backend": "nccl" if is_gpu else "gloo"})
        if if_main_process():
            held = files.lock(options.out)  # noqa: F841
    with told(kinds=OSError):
        evaluation = evaluate(plan, options)
        if if_main_process():
            write(options.out, evaluation, options.audio)


if __name__ == "__main__":
    main()
