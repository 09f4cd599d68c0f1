"""Prepares the corpus of a run on a host that shares no disk with the others.

In: the arguments of train.py; the recipe on PYTHONPATH.
Out: <output_folder>/manifests, as train.py itself would write it there.
"""

import sys
from functools import partial

from hyperpyyaml import load_hyperpyyaml
from local import audio, dataio, model, prepare, settings, sources, user_errors

import speechbrain as sb


def main():
    """As train.py begins."""
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    with user_errors.told("prepare_host.py"):
        overrides = settings.check(hparams_file, overrides, run_opts)
        with open(hparams_file, encoding="utf-8") as file:
            hparams = load_hyperpyyaml(file, overrides)
        source = hparams["whisper_hub"]
        prepare.for_run(
            None,
            hparams["output_folder"],
            hparams["prepare"],
            label_fits=partial(
                dataio.label_fits,
                tokenizer=sources.load_tokenizer(source),
                max_tokens=model.MAX_TOKENS,
            ),
            max_duration_s=sources.context_seconds(source),
            slowest_speed=audio.slowest(hparams["augment"], hparams["speeds"]),
        )


if __name__ == "__main__":
    main()
