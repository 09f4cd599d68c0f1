"""Log-mels: of a waveform, or of a whole corpus, from shards on disk.

In: samples at 16 kHz; or a folder of shards, and what the model hears by.
Out: log-mels, 100 frames a second; rows, mels and token ids of a split.

    python -m local.features MANIFEST_FOLDER --out DIR --whisper_hub HUB
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

from local import manifest
from speechbrain.utils.data_pipeline import GeneratorDynamicItem
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)

# `datasets` is imported where shards are read: it costs a second, which runs
# without shards need not wait.

VERSION = 1  # of the files and of what is stored; another one is refused
N_FFT = 400  # samples of a window, 25 ms
HOP = 160  # samples from one frame to the next, 10 ms
N_SILENT = 3  # frames, at most, that begin behind a stored clip's end
TOLD = "features.json"  # in each chunk: what it was made of, what is left out
COLUMNS = ("id", "duration", "wrd", "spk_id", "category", "corpus")
N_SHOWN = 5  # chunks or IDs named in an error


def log_mel(samples, filters):
    """Log-mel features as OpenAI computes them for one clip.

    The floor lies 8 (80 dB) under the loudest cell of the same clip.

    Arguments
    ---------
    samples : torch.Tensor
        (batch, samples), 16 kHz.
    filters : torch.Tensor
        (mels, frequencies)

    Returns
    -------
    torch.Tensor
        (batch, mels, frames), 100 frames a second, fp32.
    """
    with torch.autocast(samples.device.type, enabled=False):
        window = torch.hann_window(N_FFT, device=samples.device)
        stft = torch.stft(
            samples.float(), N_FFT, HOP, window=window, return_complex=True
        )
        power = stft[..., :-1].abs() ** 2
        log_spec = (filters @ power).clamp(min=1e-10).log10()
        loudest = log_spec.amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(log_spec, loudest - 8.0) + 4.0) / 4.0


def filters(extractor):
    """The mel filters of a feature extractor, (mels, frequencies), fp32."""
    return torch.as_tensor(extractor.mel_filters.T, dtype=torch.float32)


def n_frames(n_samples):
    """Frames until a window lies wholly behind a clip of so many samples."""
    return -(-(n_samples + N_FFT // 2) // HOP) + 1


def of_clip(samples, filters, max_samples):
    """The log-mel of a clip, as short as it can stand for any longer one.

    Silence follows the clip until the last frame hears nothing else. That
    frame repeated gives the log-mel of the clip with any length of silence
    behind it, but for a length of 1 to 41 samples: there the last window is
    reflected at the end, and may touch the clip.

    Arguments
    ---------
    samples : torch.Tensor
        (n_samples,), not longer than the context.
    filters : torch.Tensor
        (mels, frequencies)
    max_samples : int
        The model's context, beyond which no frame is computed.

    Returns
    -------
    torch.Tensor
        (mels, frames), fp32.
    """
    n_samples = min(n_frames(len(samples)) * HOP, max_samples)
    padded = F.pad(samples, (0, n_samples - len(samples)))
    return log_mel(padded[None], filters)[0]


def repeat_last(mels, relative_lengths):
    """Pads the mels of a batch with silence, where a collation puts zeros.

    Arguments
    ---------
    mels : torch.Tensor
        (batch, frames, mels) of ``PaddedBatch``.
    relative_lengths : torch.Tensor
        (batch,), on the same device: nobody waits for it.

    Returns
    -------
    torch.Tensor
        (batch, frames, mels): each clip's own last frame behind its end.
    """
    n_most = mels.shape[1]
    last = (relative_lengths * n_most).round().long() - 1
    frames = torch.arange(n_most, device=mels.device)
    frames = torch.minimum(frames, last[:, None])  # (batch, frames)
    return mels.gather(1, frames[..., None].expand_as(mels))


def heard(signals, relative_lengths):
    """What ``Whisper.forward`` takes of a batch, by name.

    Arguments
    ---------
    signals : torch.Tensor
        (batch, samples), 16 kHz; or (batch, frames, mels) from shards.
    relative_lengths : torch.Tensor
        (batch,)

    Returns
    -------
    dict
        ``wav`` or ``mel``.
    """
    if signals.dim() == 2:
        return {"wav": signals}
    return {"mel": repeat_last(signals, relative_lengths)}


def at_length(mels, n_samples):
    """Mels for the encoder, cut or continued with their last frame.

    Arguments
    ---------
    mels : torch.Tensor
        (batch, frames, mels), padded as by ``repeat_last``.
    n_samples : int
        Length of the waveforms that they stand for.

    Returns
    -------
    torch.Tensor
        (batch, mels, n_samples // 160), fp32.
    """
    wanted = n_samples // HOP
    mels = mels[:, :wanted].transpose(1, 2).float()
    return F.pad(mels, (0, wanted - mels.shape[2]), mode="replicate")


def least_samples(n_frames):
    """Samples that a mel needs, of which the silent frames may be cut."""
    return max(n_frames - N_SILENT, 1) * HOP


def identity(tokenizer, extractor):
    """What of a model shards hang on; models that share it share shards.

    Arguments
    ---------
    tokenizer, extractor
        As ``sources.load_tokenizer`` and ``sources.load_extractor`` give them.

    Returns
    -------
    dict
        Plain values by name.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    ids = [vocabulary, tokenizer.prefix_tokens, tokenizer.eos_token_id]
    return {
        "version": VERSION,
        "n_mels": extractor.feature_size,
        "context_samples": extractor.n_samples,
        "tokenizer": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
    }


class Shards:
    """One split of a folder of shards; stays on the disk, memory mapped.

    May be copied into the workers of a data loader, by fork or by pickle:
    they open the same files.

    Attributes
    ----------
    rows : dict
        ID to row, for a ``DynamicItemDataset``: the columns of a manifest
        that say something about the clip, and its ``index``.
    read, tokenize : GeneratorDynamicItem
        From the ``index`` to ``sig``, a mel in the place of samples, and
        ``failed``; to ``tokens_bos`` and ``tokens_eos``.
    """

    def __init__(self, dataset, n_prefix):
        self.rows = _rows(dataset)
        self.n_prefix = n_prefix
        self._mels = _only(dataset, "input_features")
        self._labels = _only(dataset, "labels")
        takes = ["index"]
        self.read = GeneratorDynamicItem(takes, self._read, ["sig", "failed"])
        self.tokenize = GeneratorDynamicItem(
            takes, self._tokenize, ["tokens_bos", "tokens_eos"]
        )

    def mel(self, index):
        """The log-mel of a clip: (frames, mels), fp16."""
        values = _values(self._mels, "input_features", index)
        n_mels = len(values)
        # Flat, as it lies in the file: a list of lists would take 1 ms.
        values = values.flatten().to_numpy().reshape(n_mels, -1)
        return torch.from_numpy(values.T.copy())

    def _read(self, index):
        yield self.mel(index)
        yield False  # what failed was left out when the shards were made

    def token_ids(self, index):
        """Decoder input and target, as ``dataio.token_ids`` gives them."""
        ids = _values(self._labels, "labels", index).to_numpy()
        ids = torch.tensor(ids, dtype=torch.int64)
        return ids[:-1], ids[self.n_prefix :]

    def _tokenize(self, index):
        yield from self.token_ids(index)


def _rows(dataset):
    columns = dataset.select_columns(list(COLUMNS)).with_format("arrow")[:]
    columns = columns.to_pydict()
    ids = columns.pop("id")
    names = (*columns, "index")
    cells = zip(*columns.values(), range(len(ids)))
    return {key: dict(zip(names, row)) for key, row in zip(ids, cells)}


def _only(dataset, column):
    return dataset.select_columns([column]).with_format("arrow")


def _values(dataset, column, index):
    """The Arrow array in one cell of a column of lists, without a copy."""
    return dataset[index][column].chunk(0).flatten()


def load(folder, split, csv_path, data_root, tokenizer, extractor):
    """Opens a split that ``python -m local.features`` has made.

    Arguments
    ---------
    folder : str or Path
        Of the shards.
    split : str
        "train" or "valid".
    csv_path : Path
        The run's own manifest of this split.
    data_root : str
        What ``$data_root`` stands for therein.
    tokenizer, extractor
        Of the model that will read them.

    Returns
    -------
    Shards

    Raises
    ------
    FileNotFoundError
        There is no chunk of this split.
    ValueError
        Chunks are missing, damaged, or made for another model; lists them. Or
        they hold clips or labels that are not the manifest's.
    """
    paths = sorted((Path(folder) / split).glob("chunk_*"))
    if not paths:
        raise FileNotFoundError(
            f"features_folder='{folder}' has no {split}/chunk_00000; make it "
            "by python -m local.features, or leave features_folder empty"
        )
    with ThreadPoolExecutor() as pool:
        opened = list(pool.map(_opened, paths))
    wanted = identity(tokenizer, extractor)
    problems = [found for found in opened if isinstance(found, str)]
    sound = [found for found in opened if not isinstance(found, str)]
    sound.sort(key=lambda chunk: chunk[0]["chunk"])
    problems += _other_models([told for told, _ in sound], wanted)
    problems += _gaps([told for told, _ in sound])
    full = [dataset for _, dataset in sound if dataset is not None]
    if not (problems or full):
        problems = ["no clip is left, see features_report.json"]
    if not problems:
        shards = Shards(_joined(full), len(tokenizer.prefix_tokens))
        n_twice = sum(map(len, full)) - len(shards.rows)
        if n_twice == 0:
            _require_same(shards.rows, manifest.read(csv_path, data_root))
            return shards
        problems = [f"{n_twice} IDs stand twice"]
    lines = "".join(f"\n  - {problem}" for problem in problems)
    raise ValueError(
        f"the shards in {Path(folder) / split} cannot be used; remove what is "
        "wrong and run the same python -m local.features again, which makes "
        f"what is missing:{lines}"
    )


def _require_same(rows, of_manifest):
    """A run must not train on what its own manifests hold out."""
    other = [
        key
        for key, row in rows.items()
        if key not in of_manifest or of_manifest[key]["wrd"] != row["wrd"]
    ]
    if other:
        raise ValueError(
            f"features_folder: {len(other)} clips or labels are not those of "
            f"the run's manifests, such as {', '.join(other[:N_SHOWN])}; set manifest_folder to the folder "
            "they were made from, or make them again from this run's manifests"
        )
    n_lacking = len(of_manifest) - len(rows)
    if n_lacking:
        logger.warning(
            "features_folder: %d clips of the run's manifests are not in it; "
            "its features_report.json tells why",
            n_lacking,
        )


def told(path):
    """What a chunk tells about itself; None where it is no finished one."""
    try:
        return json.loads((path / TOLD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _opened(path):
    """What a chunk tells, and its data; or what is wrong with it."""
    from datasets import load_from_disk

    try:
        about = told(path)
        if about["clips"] == 0:  # `datasets` cannot read back an empty one
            return about, None
        dataset = load_from_disk(str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:  # and Arrow's
        return f"{path.name} is damaged: {error}"
    if len(dataset) != about["clips"]:
        return (
            f"{path.name} holds {len(dataset)} clips, made were "
            f"{about['clips']}"
        )
    return about, dataset


def _joined(datasets):
    from datasets import concatenate_datasets

    return concatenate_datasets(datasets)


def _other_models(chunks, wanted):
    return [
        f"chunk {about['chunk']} was made with {name}={value}, this model has "
        f"{wanted.get(name)}"
        for about in chunks
        for name, value in about["made_by"].items()
        if value != wanted.get(name)
    ][:N_SHOWN]


def _gaps(chunks):
    """Chunks that are missing, stand twice, or belong to another set."""
    indices = [about["chunk"] for about in chunks]
    counts = sorted({about["n_chunks"] for about in chunks})
    if len(counts) > 1:
        return [f"sets of {counts} chunks are mixed; keep one of them"]
    missing = sorted(set(range(*counts)) - set(indices)) if counts else []
    if missing:
        names = ", ".join(map(str, missing[:N_SHOWN]))
        return [f"{len(missing)} of {counts[0]} chunks are missing: {names}"]
    twice = sorted({i for i in indices if indices.count(i) > 1})
    return [f"chunks {twice[:N_SHOWN]} stand twice"] if twice else []


if __name__ == "__main__":
    from local import feature_shards

    feature_shards.main()
