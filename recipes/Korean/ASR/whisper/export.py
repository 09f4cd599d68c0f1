#!/usr/bin/env python3
"""Writes a fine-tuned model for other programs.

> python export.py results/train_large_v3/1986 my_whisper --format hf
> python export.py results/train_large_v3/1986 my_whisper_ct2 --format ct2

Transformers then writes Korean without being told. faster-whisper is told so,
and to suppress no character that Korean labels hold:

> WhisperModel("my_whisper_ct2").transcribe(path, language="ko", suppress_tokens=[])

In: a run's output folder, a CKPT+… folder, a Hugging Face folder, a hub name.
Out: a folder for Transformers, or for CTranslate2 and faster-whisper.
"""

import argparse
import tempfile
from pathlib import Path

from local import exporting, trained, user_errors


def export(model, out, form, quantization):
    """Writes the folder, and compares it with the model.

    Arguments
    ---------
    model : str
        As ``trained.resolve`` takes it.
    out : Path
        Not there, or empty.
    form : str
        "hf" or "ct2".
    quantization : str
        Of CTranslate2's weights.

    Returns
    -------
    float
        Largest difference to the model, as a part of the largest value: of
        the logits, with CTranslate2 of the encoder's states.

    Raises
    ------
    FileNotFoundError, ValueError, OSError
        The model is not there, or the folder cannot be written.
    """
    if form == "ct2":
        exporting.require_ctranslate2()
    source = trained.resolve(model)
    if source.kind == "ctranslate2":
        raise ValueError(
            f"model '{model}' is CTranslate2's already, from which there is no "
            "way back; give the run or the Hugging Face folder it came from"
        )
    with exporting.replacing_folder(out) as folder:
        with tempfile.TemporaryDirectory() as random_folder:
            whisper = trained.load(source, "cpu", random_folder)
            told = exporting.provenance_of(model, source, whisper)
            if form == "ct2":
                return exporting.write_ctranslate2(
                    whisper, folder, quantization, told
                )
            return exporting.write_hugging_face(whisper, folder, told)


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="run, CKPT+…, Hugging Face folder or hub")
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument(
        "--format", choices=exporting.FORMATS, default="hf", dest="form"
    )
    parser.add_argument(
        "--quantization",
        choices=exporting.QUANTIZATIONS,
        default="float16",
        help="of CTranslate2's weights",
    )
    arguments = parser.parse_args()
    with user_errors.told("export.py"):
        difference = export(**vars(arguments))
    print(
        f"{arguments.out}  loaded again: differs from the model by "
        f"{difference:.1g} of the largest value at most"
    )


if __name__ == "__main__":
    main()
