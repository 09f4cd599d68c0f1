#!/usr/bin/env python3
"""Writes a fine-tuned model for other programs.

> python export.py results/train_large_v3/1986 my_whisper --format hf
> python export.py results/train_large_v3/1986 my_whisper_ct2 --format ct2
> python export.py results/train_large_v3/1986 my_adapter --format adapter

Adapters of a LoRA run are merged into their base in fp32, whatever it was in
training; beside a base in fewer bits they have learned its rounding too, so that
the merged model differs from the trained one, and it is told by how much. With
--format adapter they stay apart, for PEFT.

Transformers then writes Korean without being told. faster-whisper is told so,
and to suppress no character that Korean labels hold:

> WhisperModel("my_whisper_ct2").transcribe(path, language="ko", suppress_tokens=[])

In: a run's output folder, a CKPT+… folder, a Hugging Face or PEFT adapter
folder, a hub name.
Out: a folder for Transformers, for CTranslate2 and faster-whisper, or for PEFT.
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
        "hf", "ct2" or "adapter".
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
    source = trained.resolve(model)
    if source.kind == "ctranslate2":
        raise ValueError(
            f"model '{model}' is CTranslate2's already, from which there is no "
            "way back; give the run or the Hugging Face folder it came from"
        )
    if form == "adapter":
        exporting.require_adapter(source)
    if form == "ct2":
        exporting.require_ctranslate2(source)
    with exporting.replacing_folder(out) as folder:
        with tempfile.TemporaryDirectory() as random_folder:
            whisper = trained.load(source, "cpu", random_folder, "fp32")
            if whisper.lora and form != "adapter":
                exporting.merge(whisper, source, random_folder)
            told = exporting.provenance_of(model, source, whisper)
            if form == "adapter":
                return exporting.write_adapter(whisper, folder, source, told)
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
        f"{arguments.out}  loaded again: differs from what was written by "
        f"{difference:.1g} of the largest value at most"
    )


if __name__ == "__main__":
    main()
