"""New tokens: Korean pieces that the tokenizer of a Whisper lacks.

In: training transcripts, a source's tokenizer, how many and by which mode.
Out: merges and their ids; the tokenizer that has them; tokens a syllable.
"""

# A new token is made by a byte-level BPE merge behind the old ones, and is no
# "added token": where no new merge fires, and no old one is gone, a text is
# encoded as before, and engines that read the tokenizer's files understand it.

import copy
import hashlib
import itertools
import json
import shutil
from pathlib import Path
from typing import NamedTuple

from local import pieces, random_model, ranks, sources
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
NEW_TOKENS = ("none", "extend", "replace")
FOLDER, FILE = "tokenizer", "new_tokens.json"  # below a run's output folder


class NewTokens(NamedTuple):
    """What a vocabulary has beyond its source's.

    Attributes
    ----------
    mode : str
        "extend": ids behind all others; "replace": those of old tokens.
    merges : list of [str, str]
        The two parts of each new token, byte-level, in order of priority.
    ids : list of int
        Of the token that each merge makes.
    """

    mode: str
    merges: list
    ids: list


def learn(texts, tokenizer, mode, n_tokens, first_id, keep=()):
    """Learns Korean pieces, and finds ids for them.

    Arguments
    ---------
    texts : iterable of str
        As ``text.for_label`` gives them; read once. Distinct words are held
        in memory.
    tokenizer : transformers.WhisperTokenizer
        Stays as it is.
    mode : str
        "extend" or "replace".
    n_tokens : int
        At most; fewer where the texts yield no more, with a warning.
    first_id : int
        Rows of the embedding matrix: where ``extend`` begins.
    keep : iterable of int
        Ids that ``replace`` must not take.

    Returns
    -------
    NewTokens

    Raises
    ------
    ValueError
        The mode is unknown, the texts yield no new token, or there are fewer
        tokens to replace than asked for.
    """
    if mode not in NEW_TOKENS[1:]:
        raise ValueError(
            f"new_tokens='{mode}' is unknown; choose {', '.join(NEW_TOKENS)}"
        )
    merges = pieces.merges(texts, tokenizer, n_tokens)
    if not merges:
        raise ValueError(
            f"new_tokens='{mode}': the transcripts have no Hangul piece, used "
            f"{pieces.MIN_COUNT} times, that the tokenizer lacks; choose "
            "new_tokens=none, or give a text file with new_tokens_text"
        )
    if len(merges) < n_tokens:
        logger.warning(
            "n_new_tokens=%d: only %d occur twice", n_tokens, len(merges)
        )
    if mode == "extend":
        ids = list(range(first_id, first_id + len(merges)))
    else:
        ids = pieces.replaceable(tokenizer, len(merges), {*keep})
    return NewTokens(mode, merges, ids)


def added_to(tokenizer, new):
    """A tokenizer with new tokens; old ids stay, but for the replaced ones.

    Arguments
    ---------
    tokenizer : transformers.WhisperTokenizer
        Of the source that the tokens were learned for; stays as it is.
    new : NewTokens or None

    Returns
    -------
    transformers.WhisperTokenizer
        What it saves, Transformers loads alone; without any, the given one.

    Raises
    ------
    ValueError
        The tokens are not of this tokenizer.
    """
    from tokenizers import Tokenizer

    if new is None:
        return tokenizer
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = told["model"], told["added_tokens"]
    if new.mode == "extend":
        added += _missing_timestamps(tokenizer)
    specials = {token["content"]: token["id"] for token in added}
    ids = {*new.ids}
    gone = {t for t, i in model["vocab"].items() if i in ids}
    theirs = len(gone) == len(ids) if new.mode == "replace" else not gone
    kept = {t: i for t, i in model["vocab"].items() if t not in gone}
    made = {left + right: i for (left, right), i in zip(new.merges, new.ids)}
    theirs &= kept.keys() | made.keys() >= set(itertools.chain(*new.merges))
    if not theirs or ids & {*specials.values()}:
        raise ValueError(
            f"new_tokens='{new.mode}': the new tokens have ids or parts that "
            "are not theirs in this tokenizer; they belong to another "
            "whisper_hub"
        )
    # Specials too: others than those found here are numbered anew when read.
    model["vocab"] = {**kept, **specials, **made}
    model["merges"] = [
        pair
        for pair in model["merges"]
        if gone.isdisjoint((*pair, "".join(pair)))
    ] + new.merges
    backend = Tokenizer.from_str(json.dumps(told))
    # A copy in which this backend stands for the old one.
    changed = copy.deepcopy(
        tokenizer, {id(tokenizer.backend_tokenizer): backend}
    )
    changed.set_prefix_tokens(language="ko", task="transcribe")
    return changed


def _missing_timestamps(tokenizer):
    """Tokens of the timestamps that an older tokenizer leaves unnamed."""
    vocab = tokenizer.get_vocab()
    begin = vocab["<|notimestamps|>"] + 1
    form = dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized", "special"), False
    )
    names = [f"<|{0.02 * n:.2f}|>" for n in range(random_model.N_TIMESTAMPS)]
    return [
        {"id": begin + n, "content": name, **form}
        for n, name in enumerate(names)
        if name not in vocab
    ]


def old_parts(tokenizer, new):
    """The old tokens that spell each new one.

    Arguments
    ---------
    tokenizer : transformers.WhisperTokenizer
        As it was before.
    new : NewTokens

    Returns
    -------
    dict
        New id to a list of old ids, two or more.
    """
    vocab, spelled = tokenizer.get_vocab(), {}
    for left, right in new.merges:
        parts = [spelled.get(part) or [vocab[part]] for part in (left, right)]
        spelled[left + right] = parts[0] + parts[1]
    return dict(zip(new.ids, spelled.values()))


def tokens_per_syllable(texts, tokenizer):
    """How many tokens a Hangul syllable takes, all of a text's counted.

    Arguments
    ---------
    texts : iterable of str
        Those without Hangul count nothing.
    tokenizer : transformers.WhisperTokenizer

    Returns
    -------
    float
        NaN where there is no Hangul.
    """
    n_tokens = n_syllables = 0
    for line in texts:
        if n := len(pieces.HANGUL.findall(line)):
            n_syllables += n
            n_tokens += len(tokenizer.encode(line, add_special_tokens=False))
    return n_tokens / n_syllables if n_syllables else float("nan")


def from_json(told):
    """New tokens as they were stored, ``NewTokens._asdict()``.

    Arguments
    ---------
    told : dict or None
        More keys than those of NewTokens do no harm.

    Returns
    -------
    NewTokens or None
        None for None.

    Raises
    ------
    ValueError
        They are damaged.
    """
    if told is None:
        return None
    try:
        new = NewTokens(*(told[field] for field in NewTokens._fields))
        made = {"".join((left, right)) for left, right in new.merges}
        whole = len(new.merges) == len(new.ids) == len({*new.ids}) == len(made)
        whole &= new.mode in NEW_TOKENS[1:] and bool(made)
        whole &= all(type(i) is int and i >= 0 for i in new.ids)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the new tokens are damaged ({error!r})") from None
    if not whole:
        raise ValueError("the new tokens are damaged: merges and ids differ")
    return new


def for_run(
    tokenizer,
    manifests,
    test_only,
    *,
    mode,
    n_tokens,
    text_file,
    whisper_hub,
    train_csv,
    valid_csv,
    output_folder,
    save_folder,
):
    """The new tokens of a run, learned at its first start; a collective call.

    They stand in ``tokenizer`` below the output folder, and are learned anew
    only when what they follow from is another.

    Arguments
    ---------
    tokenizer : transformers.WhisperTokenizer
        Of the source; stays as it is.
    manifests : Path
    test_only : bool
        Nothing is learned.
    mode, n_tokens : str, int
        One of NEW_TOKENS; at most so many.
    text_file : str
        UTF-8 lines to learn from beside the transcripts; empty: none.
    whisper_hub : str
        The source.
    train_csv, valid_csv : str
        Names of manifests: to learn from, and to report on.
    output_folder, save_folder : str
        Of the run, and of its checkpoints.

    Returns
    -------
    NewTokens or None
        None for mode "none".

    Raises
    ------
    FileNotFoundError
        A file to learn from is missing; or, in a test, the tokens are.
    ValueError
        They are damaged, cannot be learned, or checkpoints have others.
    """
    if mode == "none":
        return None
    path = Path(output_folder) / FOLDER / FILE
    asked = mode, n_tokens, text_file, whisper_hub
    both = manifests / train_csv, manifests / valid_csv
    found = []

    def read():
        if not test_only:
            _provide(path, Path(save_folder), asked, tokenizer, both)
        found.append(_stored(path))

    ranks.on_first(read)
    told = ranks.gather([*found, None])[0][0]  # hosts may share no disk
    if told is None:
        raise FileNotFoundError(
            f"{path} is not there; a start without --test_only learns the same "
            "tokens of the same data, or give the output_folder of their run"
        )
    new = from_json(told)
    said = len(new.ids), new.mode, told["report"]
    logger.info("new tokens: %d by %s; %s", *said)
    return new


def _stored(path):
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text("utf-8"))
        from_json(told)
        return {**told, "of": dict(told["of"]), "report": told["report"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove {path.parent}: the same "
            "settings and data learn the same tokens again"
        ) from None


def _provide(path, save_folder, asked, tokenizer, manifests):
    """Learns and writes a run's new tokens, unless they are there."""
    mode, n_tokens, text_file, whisper_hub = asked
    train_csv, valid_csv = manifests
    first_id = sources.load_config(whisper_hub).vocab_size
    keep = sources.suppressed(whisper_hub) or ()
    of = {
        "new_tokens": mode,
        "n_new_tokens": n_tokens,
        "train.csv and new_tokens_text": _digest(_texts(train_csv, text_file)),
        "whisper_hub": _digest(_rows(tokenizer, first_id, keep)),
    }
    there = _stored(path)
    if there and there["of"] == of:
        return
    if there and any(save_folder.glob("CKPT+*")):
        pairs = [(key, there["of"].get(key), now) for key, now in of.items()]
        changed = [f"{k} (then {a}, now {b})" for k, a, b in pairs if a != b]
        raise ValueError(
            f"{path}: the checkpoints in {save_folder} have rows for these "
            f"tokens, but {', '.join(changed)} changed; go on as before, or "
            "choose another output_folder"
        )
    texts = _texts(train_csv, text_file)
    new = learn(texts, tokenizer, mode, n_tokens, first_id, keep)
    after = added_to(tokenizer, new)
    held_out = list(pieces.transcripts(valid_csv))
    rates = (tokens_per_syllable(held_out, t) for t in (tokenizer, after))
    told = "{:.3f} -> {:.3f} tokens a syllable on {} held-out texts"
    report = told.format(*rates, len(held_out))
    _write(path, {**new._asdict(), "report": report, "of": of}, after)


def _texts(train_csv, text_file):
    yield from pieces.transcripts(train_csv)
    yield from pieces.lines(text_file)


def _rows(tokenizer, first_id, keep):
    """What of a source the new tokens and their ids follow from, as texts."""
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    told = told["model"], told["added_tokens"], first_id, sorted(keep)
    return map(json.dumps, told)


def _digest(texts):
    digest = hashlib.sha256()
    for line in texts:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _write(path, told, tokenizer):
    """Writes tokens and tokenizer; the folder is there whole or not at all."""
    temporary = path.parent.with_name(f"{FOLDER}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        words = json.dumps(told, ensure_ascii=False)
        (temporary / FILE).write_text(words, encoding="utf-8")
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(path.parent, ignore_errors=True)
        temporary.rename(path.parent)
    except Exception as error:  # a full disk has no type of its own in Rust
        raise OSError(
            f"cannot write {path.parent}: {error}; free space there or choose "
            "another output_folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
