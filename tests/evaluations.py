"""A made-up evaluation of two models on two test sets, as a report has it.

In: a folder for tones, and how many clips.
Out: what page.write takes; all figures are made up but fit together.
"""

import random

import numpy as np
import soundfile
from local import metrics, text
from rapidfuzz.distance import Levenshtein

BASE, TUNED = "whisper-large-v3-turbo", "fine-tuned"
SETS = "test_clean", "call_centre"
SEED = 7
BINS = [(0, 2), (2, 5), (5, 10), (10, 20)]  # seconds
SECONDS_PER_CHARACTER = 0.16
WHO = [
    "저희가",
    "고객님께서",
    "어제 친구가",
    "우리 회사는",
    "그 사람이",
    "할머니께서",
]
WHAT = ["인터넷 요금제를", "배송 주소를", "3시 회의를", "학교 앞 식당을"]
WHAT += ["비밀번호를", "2,500원짜리 커피를", "신용카드 결제를"]
DONE = ["변경하고 싶은데요.", "확인해 주시겠어요?", "아직 못 받았습니다"]
DONE += ["다시 한번 말씀해 주세요.", "좋아하는 것 같아요", "취소했다고 합니다."]
CATEGORIES = {
    SETS[0]: ["뉴스", "강연", "일상 대화"],
    SETS[1]: ["D01 금융·보험", "D02 쇼핑", "D03 통신 요금", "D04 예약"],
}
SLIPS = {"를": "을", "께": "게", "요": "여", "학": "핵", "싶": "십", "이": "의"}
SLIPS |= {
    "배": "베",
    "것": "거",
    "했": "해",
    "말": "만",
    "회": "해",
    "아": "어",
}


def heard(reference, rate, generator):
    """A hypothesis with slips, lost and doubled syllables, and spacing."""
    made = []
    for character in reference:
        luck = generator.random()
        if luck > rate:
            made.append(character)
        elif character == " " or luck < 0.25 * rate:
            continue
        elif luck < 0.4 * rate:
            made += [character, character]
        else:
            made.append(SLIPS.get(character, f"{character} "))
    return " ".join("".join(made).split())


def utterances(test_set, n, folder, rate, seed=SEED):
    """Of one model; the clips are the same for each."""
    clips, slips = random.Random(seed), random.Random(rate)
    found = []
    for number in range(n):
        spoken = " ".join(map(clips.choice, (WHO, WHAT, DONE)))
        wav = folder / f"{test_set}_{number:04d}.wav" if folder else None
        hypothesis, flags = heard(spoken, rate, slips), []
        if number % 41 == 7 and rate > 0.1:
            hypothesis, flags = "감사합니다 " * 12, ["repetition"]
        if number % 53 == 11:
            hypothesis, flags = "", ["failed"]
        one = {"id": f"{test_set}_{number:04d}", "reference": spoken}
        one |= {"hypothesis": hypothesis.strip(), "flags": flags}
        one["errors"], one["n_chars"] = _errors(one)
        one["duration"] = SECONDS_PER_CHARACTER * len(spoken)
        one["category"] = clips.choice(CATEGORIES[test_set])
        one["speaker"] = f"S{clips.randrange(30):03d}"
        one |= {"wav": str(wav) if wav else None, "start": 0.0, "stop": 1.0}
        found.append(one)
    return found


def _errors(one):
    reference, hypothesis = map(
        text.for_scoring, (one["reference"], one["hypothesis"])
    )
    return Levenshtein.distance(reference, hypothesis), len(reference)


def tones(folder, names):
    """Half a second to each, of its own height."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds = np.arange(8000) / 16000
    for number, name in enumerate(names):
        tone = 0.2 * np.sin(2 * np.pi * (200 + 3 * number) * seconds)
        soundfile.write(folder / name, tone, 16000)


def _group(name, rows):
    n = sum(row["n_chars"] for row in rows)
    rate = 100 * sum(row["errors"] for row in rows) / max(n, 1)
    width = 90 / max(n, 1) ** 0.5
    group = {"name": name, "CER": rate, "WER": 2.1 * rate}
    group |= {"low": max(rate - width, 0), "high": rate + width}
    group |= {"n_utterances": len(rows), "n_reference_chars": n}
    return group | {"hours": sum(row["duration"] for row in rows) / 3600}


def _by(rows, key):
    names = sorted({key(row) for row in rows})
    return [_group(n, [r for r in rows if key(r) == n]) for n in names]


def _bin(row):
    return next(f"{a}-{b} s" for a, b in BINS if row["duration"] < b)


def result(model, test_set, rows, factor):
    """Its scores are true; the width of their intervals is not."""
    records = [
        metrics.Record(
            id=row["id"],
            reference=row["reference"],
            hypothesis=row["hypothesis"],
            duration=row["duration"],
            failed="failed" in row["flags"],
        )
        for row in rows
    ]
    scores = metrics.score(records) | {"text_policy": "korean-1"}
    looped = [row["id"] for row in rows if "repetition" in row["flags"]]
    counts = {"hits": 9000, "substitutions": 410}
    counts |= {"deletions": 212, "insertions": 1130}
    pairs = [["를", "을", 41], ["께", "게", 22], [" ", "", 17]]
    names = "CER", "CER_no_space", "WER", "sWER"
    analysis = {
        "intervals": {n: [scores[n] * 0.93, scores[n] * 1.06] for n in names},
        "edits": {"characters": counts, "words": counts},
        "by_category": _by(rows, lambda row: row["category"]),
        "by_duration": sorted(
            _by(rows, _bin), key=lambda g: int(g["name"].split("-")[0])
        ),
        "by_speaker": _by(rows, lambda row: row["speaker"]),
        "confusions": {
            "syllables": pairs,
            "words": [["요금제를", "요금제을", 9], ["한번", "한 번", 8]],
            "inserted": [["", "감사합니다", 36], ["", " ", 12]],
            "deleted": [["요", "", 14], [" ", "", 11]],
        },
        "repetition": {"rate": 100 * len(looped) / len(rows), "ids": looped},
        "hallucination": {"rate": 0.0, "ids": []},
        "failed": [r["id"] for r in rows if "failed" in r["flags"]],
        "numbers": {
            "n_mixed": 5,
            "utterances": 4,
            "ids": [],
            "CER_merged": scores["CER"] - 0.2,
            "WER_merged": scores["WER"] - 0.3,
        },
    }
    named = {"model": model, "test_set": test_set, "scores": scores}
    named |= {"analysis": analysis, "utterances": rows}
    return named | {"real_time_factor": factor}


def evaluation(folder=None, n=75, curves=None):
    """Two models, two sets of ``n`` clips; audio under ``folder``, if any."""
    results = []
    for test_set in SETS:
        for model, rate, factor in (BASE, 0.16, 0.041), (TUNED, 0.05, 0.039):
            rows = utterances(test_set, n, folder, rate)
            results.append(result(model, test_set, rows, factor))
    if folder:
        tones(folder, [f"{t}_{i:04d}.wav" for t in SETS for i in range(n)])
    moved = {"difference": -8.31, "low": -9.4, "high": -7.2}
    still = {"difference": 0.12, "low": -0.4, "high": 0.66}
    pair = {"model_a": BASE, "model_b": TUNED}
    better, unclear = {"probability_better": 1.0}, {"probability_better": 0.4}
    texts = [["감사합니다.", 11], ["시청해 주셔서 감사합니다.", 6]]
    probe = {"n_clips": 30, "with_text": 56.7, "texts": texts}
    clean = {"n_clips": 30, "with_text": 0.0, "texts": []}
    return {
        "settings": {
            "precision": "bf16",
            "beam_size": 1,
            "max_new_tokens": 444,
            "text_policy": "korean-1",
            "device": "NVIDIA H100 80GB HBM3",
            "versions": {"torch": "2.11.0", "transformers": "5.23.0"},
            "date": "2026-11-21",
        },
        "results": results,
        "paired": [
            {"test_set": SETS[0], **pair, "CER": moved | better},
            {"test_set": SETS[1], **pair, "CER": still | unclear},
        ],
        "probes": [
            {"model": BASE, "kind": "silence", **probe},
            {"model": TUNED, "kind": "noise", **clean},
        ],
        "runs": [
            {"model": BASE, "curves": None},
            {"model": TUNED, "curves": curves},
        ],
    }
