"""A data set of the Hugging Face hub, or a folder of ``datasets``.

In: a name on the hub, or a folder (LAYOUT); columns as in COLUMNS.
Out: Utterances of its splits; audio that it holds as bytes, in files.

Splits are called as in a manifest; one of another name is left out and told.
A data set without splits has them in its column `split`, or is train.

Audio that is a file already is read where it is. Bytes and arrays of samples
are written to a folder beside the manifests, once. The ID is the split and
the row, from 0. The columns `id`, `start` and `end` are read only where
`columns` names them: on the hub, an `id` is often a sentence's or a speaker's
(FLEURS), and `start` tells what a clip was cut from.
"""

import re
import shutil
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple
from urllib.parse import quote

from local import text
from local.corpora import layout, manifest, row_audio
from local.manifest import Utterance
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)

LAYOUT = """\
  dataset_dict.json or state.json   as save_to_disk writes them
  or *.parquet or *.arrow           as a clone from the hub has them
  (or a name on the hub instead: org/name, or org/name:config)"""
DATA = (".parquet", ".arrow")
SAVED = ("dataset_dict.json", "state.json", "dataset_info.json")
AUDIO = "audio"
TEXTS = ("text", "sentence", "transcription")
NAMED = ("speaker", "session", "category", "split")
ONLY_MAPPED = ("id", "start", "end")
COLUMNS = manifest.REQUIRED + NAMED + ONLY_MAPPED
CLIPS_PER_FOLDER = 1000

HUB_NAME = re.compile(r"[\w-]+/[\w.-]+(:[\w.-]+)?", re.ASCII)


class _Part(NamedTuple):
    """A split of the data set; all rows, in order, as plain values."""

    name: str  # as the data set calls it; "" if its rows tell their split
    rows: object  # a Dataset or IterableDataset
    columns: Dict[str, str]  # our names to those it has
    labels: Dict[str, object]  # our names to the ClassLabel of a column


def transcripts(folder: Path) -> List[Path]:
    """Lists the files of a folder; of a name on the hub, none.

    Arguments
    ---------
    folder : Path
        The folder that ``save_to_disk`` wrote, one of parquet or arrow files,
        or a name on the hub.

    Returns
    -------
    list of Path
        Absolute.

    Raises
    ------
    FileNotFoundError
        There are none, and it is no name on the hub either.
    ValueError
        There are several data sets in it.
    """
    place, _ = _place(folder)
    if place is None:
        return []
    return [
        path
        for path in sorted(place.rglob("*"))
        if path.name in SAVED or path.suffix in DATA
    ]


def read(
    folder: Path,
    columns: Optional[Dict[str, str]] = None,
    unpack_folder: Optional[Path] = None,
) -> Iterator[Utterance]:
    """Reads every split; a row whose text is none has the text None.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``. A name on the hub is downloaded to the cache
        of ``datasets``.
    columns : dict or None
        Names in COLUMNS to those of the data set, where they differ; `path`
        is the audio.
    unpack_folder : Path or None
        Where audio goes that the data set holds itself.

    Yields
    ------
    Utterance
        A row without audio has the path where it should lie.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    ValueError
        The data set cannot be loaded, has no split that can be used, a column
        is missing or unknown, or audio must be written and there is no
        folder for it, or one in the data set's, or too small a disk.
    OSError
        A file cannot be written.
    """
    place, config = _place(folder)
    folders = row_audio.Folders(place, _apart(place, unpack_folder))
    loaded = _loaded(place, config, folder)
    parts = _parts(loaded, columns or {}, folder)
    for part in parts:
        if not part.name:
            _check_splits(part, folder)
    if folders.unpack_folder:
        _require_space(parts, folders.unpack_folder, folder)
    for part in parts:
        for number, row in _rows(part, folder):
            yield _utterance(part, number, row, folders)


def _place(folder: Path) -> Tuple[Optional[Path], Optional[str]]:
    """The folder, None for a name on the hub; and the config, if any."""
    folder = Path(folder)
    if folder.exists():
        place = folder.absolute()
        data = (p for p in place.rglob("*") if p.suffix in DATA)
        if next(data, None) is None:
            raise layout.not_found(place, LAYOUT)
        _require_one(place)
        return place, None
    if not HUB_NAME.fullmatch(str(folder)):
        raise layout.not_found(folder.absolute(), LAYOUT)
    return None, str(folder).partition(":")[2] or None


def _require_one(place: Path) -> None:
    """Folders of several configurations would be read as one, clips twice."""
    if _is_saved(place):
        return
    data = [p for p in place.rglob("*") if p.suffix in DATA]
    inner = {p.relative_to(place).parts[0] for p in data if p.parent != place}
    inner = sorted(name for name in inner if not name.startswith((".", "__")))
    if len(inner) == 1:
        return _require_one(place / inner[0])
    found = [place / name for name in inner if not manifest._split(name)]
    if len(found) > 1:
        raise ValueError(
            f"data_folder={place} holds several data sets, which would be "
            f"read as one; choose {', '.join(map(str, found))}, or list those "
            "you want as corpora"
        )


def _is_saved(place: Path) -> bool:
    return any((place / name).exists() for name in SAVED[:2])


def _apart(
    place: Optional[Path], unpack_folder: Optional[Path]
) -> Optional[Path]:
    if unpack_folder is None:
        return None
    folder = Path(unpack_folder).resolve()
    if place and place.resolve() in (folder, *folder.parents):
        raise ValueError(
            f"audio would be written to {folder}, inside the corpus folder, "
            "into which nothing is written; choose another output folder"
        )
    return folder


def _loaded(place: Optional[Path], config: Optional[str], folder: Path):
    """Rows of each split, or of the only one; none is in memory."""
    try:
        import datasets
    except ImportError:
        raise ModuleNotFoundError(
            "corpus='huggingface' is read by datasets: pip install datasets"
        ) from None
    try:
        if place is None:
            name = str(folder).partition(":")[0]
            return datasets.load_dataset(name, config)
        if _is_saved(place):
            return datasets.load_from_disk(str(place), keep_in_memory=False)
        # As a stream: otherwise a second copy would fill the cache.
        return datasets.load_dataset(str(place), streaming=True)
    except Exception as error:  # of many libraries, for a network or a file
        remedy = (
            "restore or save the folder again"
            if place
            else "correct the name; without a network, load it once where "
            "there is one and set data_folder to what its save_to_disk wrote"
        )
        raise ValueError(
            f"data_folder={folder}: datasets cannot load it: {error}; {remedy}"
        ) from error


def _parts(loaded, columns: Dict[str, str], folder: Path) -> List[_Part]:
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if list(splits) == ["train"]:  # its rows may tell more
        return [_part("", splits["train"], columns, folder)]
    left_out = [name for name in splits if not manifest._split(name)]
    if len(left_out) == len(splits):
        raise ValueError(
            f"data_folder={folder}: split {', '.join(map(repr, left_out))} is "
            f"unknown; choose {manifest.SPLITS}"
        )
    if left_out:
        logger.warning(
            "data_folder=%s: split %s is left out; read is %s",
            folder,
            ", ".join(map(repr, left_out)),
            manifest.SPLITS,
        )
    return [
        _part(name, rows, columns, folder)
        for name, rows in splits.items()
        if name not in left_out
    ]


def _part(name: str, rows, columns: Dict[str, str], folder: Path) -> _Part:
    import datasets

    features = dict(rows.features or {})
    columns = _complete(columns, list(features), folder)
    audio = columns["path"]
    needed = set(columns.values())
    _check_audio(audio, features, folder)
    if row_audio.RATE in features:
        needed.add(row_audio.RATE)
    # Of the other columns, some could not be decoded, or are saved as tensors.
    rows = rows.with_format(None).select_columns(sorted(needed))
    if isinstance(features[audio], datasets.Audio):
        rows = rows.cast_column(audio, datasets.Audio(decode=False))
    labels = {
        ours: features[theirs]
        for ours, theirs in columns.items()
        if isinstance(features[theirs], datasets.ClassLabel)
    }
    return _Part(name, rows, columns, labels)


def _complete(
    columns: Dict[str, str], present: List[str], folder: Path
) -> Dict[str, str]:
    unknown = sorted(set(columns) - set(COLUMNS))
    if unknown:
        raise ValueError(
            f"columns: {', '.join(unknown)} is unknown; "
            f"choose among {', '.join(COLUMNS)}"
        )
    default = next((name for name in TEXTS if name in present), TEXTS[0])
    named = {name: name for name in NAMED if name in present}
    columns = {"path": AUDIO, "text": default, **named, **columns}
    missing = [name for name in columns.values() if name not in present]
    if missing:
        raise ValueError(
            f"data_folder={folder}: column {', '.join(missing)} is missing; "
            f"the data set has {', '.join(present) or 'none'}. Set columns to "
            "map our names to its, for example columns: {path: audio, text: "
            "sentence}"
        )
    return columns


def _check_audio(column: str, features: Dict[str, object], folder: Path):
    """Samples without a rate would be heard at a wrong one."""
    import datasets

    feature = features[column]
    if isinstance(feature, dict):
        sound = "bytes" in feature or "path" in feature
        sound = sound or {"array", row_audio.RATE} <= set(feature)
    elif isinstance(feature, datasets.Value):
        sound = feature.dtype.endswith(("string", "binary"))
    else:
        sound = (
            isinstance(feature, datasets.Audio) or row_audio.RATE in features
        )
    if not sound:
        raise ValueError(
            f"data_folder={folder}: column {column} holds {feature}; audio is "
            "an Audio column, paths, bytes, {array, sampling_rate}, or arrays "
            "beside a column sampling_rate. Set columns: {path: ...} to such "
            "a column"
        )


def _check_splits(part: _Part, folder: Path) -> None:
    column = part.columns.get("split")
    if column is None:
        return
    rows = part.rows.select_columns([column])
    values = {_cells(part, row, ["split"])["split"] for row in rows}
    unknown = sorted(v for v in values if v and not manifest._split(v))
    if unknown:
        raise ValueError(
            f"data_folder={folder}: split {', '.join(map(repr, unknown))} in "
            f"column {column} is unknown; choose {manifest.SPLITS}"
        )


def _require_space(parts: List[_Part], target: Path, folder: Path) -> None:
    """A disk that fills up would tell so after hours."""
    n_bytes = sum(map(_n_bytes, parts))
    there = next(p for p in (target, *target.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if n_bytes > free:  # what is there already is not written again
        n_bytes -= sum(p.stat().st_size for p in target.rglob("*.*"))
    if n_bytes > free:
        raise ValueError(
            f"data_folder={folder}: its audio takes about {n_bytes / 1e9:.1f} "
            f"GB as files in {target}, where {free / 1e9:.1f} GB are free; "
            "free space there or choose another output folder"
        )


def _n_bytes(part: _Part) -> int:
    """Of the files in a split's rows; 0 where the data set does not tell."""
    import datasets

    name, rows = part.columns["path"], part.rows
    feature = rows.features[name]
    if isinstance(feature, dict):
        holds_files = "bytes" in feature
    elif isinstance(feature, datasets.Value):
        holds_files = feature.dtype.endswith("binary")
    else:
        holds_files = isinstance(feature, datasets.Audio)
    if not holds_files:  # samples become FLAC, of a size that nobody knows
        return 0
    if isinstance(rows, datasets.Dataset):
        share = len(rows) / max(1, rows.data.num_rows)
        return round(share * rows.data.column(name).nbytes)
    told = (rows.info.splits or {}).get(part.name or "train")
    return told.num_bytes or 0 if told else 0


def _rows(part: _Part, folder: Path) -> Iterator[Tuple[int, dict]]:
    number = -1
    try:
        for number, row in enumerate(part.rows):
            yield number, row
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"data_folder={folder}: split {part.name or 'train'} cannot be "
            f"read beyond row {number}: {error}; download or save it again"
        ) from error


def _cells(
    part: _Part, row: dict, names: Iterable[str]
) -> Dict[str, Optional[str]]:
    """Texts of a row by our names; a class by its name, not its number."""
    cells = {}
    for name in names:
        value = row[part.columns[name]]
        if name in part.labels and value is not None:
            value = part.labels[name].int2str(value) if value >= 0 else None
        cells[name] = manifest._cell(value)
    return cells


def _utterance(
    part: _Part, number: int, row: dict, folders: row_audio.Folders
) -> Utterance:
    cells = _cells(part, row, part.columns.keys() - {"path"})
    split = manifest._split(part.name or cells.get("split") or "train")
    shown = quote(part.name or split, safe="")  # it becomes a file's name
    name = f"{shown}-{number:07d}"
    where = f"{shown}-{number // CLIPS_PER_FOLDER:04d}/{name}"
    cell, rate = row[part.columns["path"]], row.get(row_audio.RATE)
    raw = cells["text"]
    start, stop = manifest._cut(cells.get("start"), cells.get("end"))
    return Utterance(
        id=cells.get("id") or name,
        wav=row_audio.wav(cell, rate, where, folders),
        text=None if raw is None else text.for_label(raw),
        split=split,
        speaker=cells.get("speaker") or cells.get("session") or "",
        session=cells.get("session") or "",
        category=cells.get("category") or "",
        start=start,
        stop=stop,
    )
