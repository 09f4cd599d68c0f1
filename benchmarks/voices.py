#!/usr/bin/env python3
"""A corpus to adapt to: the quickstart's sentences by voices unknown to it.

In: a folder to write into, a number of sentences, a seed.
Out: as local.synthesize writes it, without a test set.

> python benchmarks/voices.py results/other_voices

Other voices of espeak-ng than the quickstart's speak faster and in other
pitches, so that a model of that corpus has something to learn.
"""

import argparse
import dataclasses
import random
import sys
from pathlib import Path
from unittest import mock

RECIPE = Path(__file__).resolve().parents[1] / "recipes/Korean/ASR/whisper"
sys.path.insert(0, str(RECIPE))
from local import synthesize  # noqa: E402

# As there, none of them breathes.
VOICES = (
    "anika adam belinda edward2 ian klatt3 m8 michel paul shelby zac".split()
)
RATES = 230, 300  # words per minute; the quickstart's are 160 to 200
PITCHES = 0, 100  # 35 to 65 there
N_SENTENCES = 600
SEED = 7


def plan(n_sentences, seed):
    """As ``synthesize.plan``; what is a test there is validation here.

    Returns
    -------
    list of synthesize.Clip
    """
    planned = synthesize.plan(n_sentences, seed)
    rng = random.Random(seed)
    return [
        dataclasses.replace(
            clip,
            id=f"other_{index:05d}",
            speaker=VOICES[index % len(VOICES)],
            split="train" if clip.split == "train" else "valid",
            rate=rng.randint(*RATES),
            pitch=rng.randint(*PITCHES),
        )
        for index, clip in enumerate(planned)
    ]


def write(out, n_sentences, seed):
    """Builds the corpus, unless it stands there already."""
    clips = plan(n_sentences, seed)
    with mock.patch.object(synthesize, "plan", lambda *_: clips):
        synthesize.synthesize(out, n_sentences, seed)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--n_sentences", type=int, default=N_SENTENCES)
    parser.add_argument("--seed", type=int, default=SEED)
    write(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
