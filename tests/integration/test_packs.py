"""Clips of one session, trained as one long clip."""

import csv

import pytest
from outputs import scores


@pytest.fixture(scope="module")
def calls(corpus, tmp_path_factory):
    """The corpus as calls of five cuts each, of which four make a pack."""
    folder = tmp_path_factory.mktemp("calls")
    with open(corpus / "manifest.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, dialect="excel-tab"))
    for n, row in enumerate(rows):
        row["path"] = corpus / row["path"]
        row |= {"session": f"call {n // 5}", "start": 0.0, "end": 1.1}
    with open(folder / "manifest.tsv", "w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, rows[0], dialect="excel-tab")
        writer.writeheader()
        writer.writerows(rows)
    return folder


def n_clips(identifier):
    """Of a pack: "a-1+3" begins with a-1, and has 3 more."""
    return 1 + int(identifier.partition("+")[2] or 0)


@pytest.mark.parametrize("packing", ["text", "timestamps"])
def test_packs_train(packing, calls, here, tmp_path):
    settings = {"encoder_context": "true_length", "batch_size": 34}
    settings |= {"max_batch_length": 0, "number_of_epochs": 2}
    settings |= {"packing": packing, "score_before_training": True}
    brain = here(tmp_path, data_folder=calls, **settings)
    (_, first), (_, second) = brain.seen
    assert sorted(first) == sorted(second)
    assert sorted(map(n_clips, first)) == [1] * 6 + [4] * 7  # 34 clips
    # 4.4 s, on the grid of 0.32 s; a clip alone would take 1.28 s
    assert [samples for _, _, samples in brain.encoded] == [14 * 5120] * 2
    # Half of the packs are told the times, each text between two of them.
    no_timestamps = brain.tokenizer.prefix_tokens[-1]  # before <|0.00|>
    n_times = (brain.tokens > no_timestamps).sum(1).tolist()
    allowed = [(0, 2 * n_clips(identifier)) for identifier in second]
    assert all(n in either for n, either in zip(n_times, allowed))
    n_timed = sum(map(bool, n_times))
    assert 0 < n_timed < 13 if packing == "timestamps" else n_timed == 0
    untouched = scores(tmp_path, "test.untouched")["loss"]
    assert scores(tmp_path)["loss"] < untouched
