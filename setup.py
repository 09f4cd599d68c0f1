"""Package metadata; the recipe is a folder that is run, not imported."""

from pathlib import Path

from setuptools import setup

RECIPE = Path("recipes/Korean/ASR/whisper")
extra = (RECIPE / "extra_requirements.txt").read_text().split()

setup(
    name="whisper-korean",
    version="0.1.0",
    description="Fine-tunes Whisper for Korean, as a SpeechBrain recipe",
    python_requires=">=3.11",
    packages=[],  # a global package called `local` would help nobody
    install_requires=["speechbrain>=1.1", "torch>=2.11", *extra],
    extras_require={
        "bench": ["accelerate"],
        "bitsandbytes": ["bitsandbytes>=0.50"],
        "ctranslate2": ["faster-whisper>=1.1"],
        "quickstart": ["espeakng-loader>=0.2.4", "scipy"],
        "test": [
            "bitsandbytes>=0.50",
            "espeakng-loader>=0.2.4",
            "faster-whisper>=1.1",
            "hypothesis",
            "pytest",
            "pytest-xdist",
            "ruff",
            "scipy",
            "tensorboard",
        ],
        "tensorboard": ["tensorboard"],
    },
)
