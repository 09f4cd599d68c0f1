"""Korean pieces that a tokenizer lacks, and foreign ones that it can spare.

In: texts, of manifests and of text files of any size; a tokenizer.
Out: BPE merges that make the pieces; ids of foreign tokens.
"""

import csv
import io
import itertools
import json
import re
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

from local import text
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
MIN_COUNT = 2  # a merge that fires less often leaves its row untrained
MAX_BYTES = 2**26  # of a file; of a larger one, every second, third … line
LONGEST_LINE = 2**16  # bytes; a longer one is read in parts
LONGEST_WORD = 64  # characters
N_WORDS = 500_000  # the most frequent; 35 MB of text: 40 s, 0.5 GB
N_SPARE = 4000  # pieces beyond those asked for: Whisper has many already
HANGUL = re.compile("[가-힣]")
PIECE = re.compile(" ?[가-힣]+")
FOREIGN = frozenset(  # scripts in no Korean, English or Hanja text
    "ARABIC ARMENIAN BENGALI CYRILLIC DEVANAGARI ETHIOPIC GEORGIAN GUJARATI "
    "GURMUKHI HEBREW HIRAGANA KANNADA KATAKANA KHMER LAO MALAYALAM MYANMAR "
    "SINHALA TAMIL TELUGU THAI TIBETAN".split()
)


def transcripts(path):
    """Labels of a manifest, one by one.

    Arguments
    ---------
    path : Path
        A manifest CSV.

    Yields
    ------
    str

    Raises
    ------
    FileNotFoundError
        There is no such file.
    """
    with open(existing(path), encoding="utf-8-sig", newline="") as file:
        for row in _evenly(csv.DictReader(file), path):
            yield text.for_label(row.get("wrd") or "")


def lines(path):
    """Lines of a text file, one by one; bad ones are counted and skipped.

    Arguments
    ---------
    path : str
        UTF-8; empty: no lines.

    Yields
    ------
    str
        NFC, as ``text.for_label`` gives it.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        At its end: no line had Hangul.
    """
    if not path:
        return
    n_bad = n_hangul = 0
    with open(existing(path), "rb") as file:
        parts = iter(lambda: file.readline(LONGEST_LINE), b"")
        for part in _evenly(parts, Path(path)):
            # A long line is cut at a byte, which may be within a letter.
            cut = len(part) == LONGEST_LINE and not part.endswith(b"\n")
            try:
                line = part.decode("utf-8-sig", "ignore" if cut else "strict")
            except UnicodeDecodeError:
                n_bad += 1
                continue
            line = text.for_label(line)
            n_hangul += bool(HANGUL.search(line))
            yield line
    if n_bad:
        logger.warning("%s: %d lines are not UTF-8", path, n_bad)
    if not n_hangul:
        raise ValueError(
            f"new_tokens_text='{path}' has no line with Hangul ({n_bad} lines "
            "are not UTF-8); give plain UTF-8 text, or leave it empty"
        )


def existing(path):
    """A file's path; FileNotFoundError where there is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path} is not there; new tokens are learned from train.csv and "
            "new_tokens_text, and reported on valid.csv"
        )
    return Path(path)


def _evenly(items, path):
    """All items of a file; of a large one every second, third … alone."""
    step = 1 + path.stat().st_size // MAX_BYTES
    return itertools.islice(items, 0, None, step)


def merges(texts, tokenizer, n_most):
    """BPE merges that make pieces of Hangul which a tokenizer lacks.

    SentencePiece proposes pieces; those that the tokenizer writes with several
    tokens become merges. Of these the ones stay that fire most often on the
    texts, and at least ``MIN_COUNT`` times.

    Arguments
    ---------
    texts : iterable of str
        Read once; their distinct words are held in memory, and of these the
        ``N_WORDS`` most frequent are learned from.
    tokenizer : transformers.WhisperTokenizer
    n_most : int

    Returns
    -------
    list of [str, str]
        In order of priority; a part stands before what is made of it.
    """
    words = _words(texts, tokenizer.backend_tokenizer.pre_tokenizer)
    # More than asked for, to choose from.
    n_tried = 2 * n_most + N_SPARE
    found = _making(_pieces(words, n_most), tokenizer, n_tried)
    found = _most_used(found, words, tokenizer, n_most)
    return [list(pair) for pair in found]


def _words(texts, pre_tokenizer):
    """What the tokenizer parts texts into, of that with Hangul: counts."""
    spaced, words = Counter(), Counter()
    for line in texts:
        first, *rest = line.split() or [""]
        spaced[first] += 1
        spaced.update(f" {word}" for word in rest)
    for word, n in spaced.items():
        if HANGUL.search(word) and len(word) <= LONGEST_WORD:
            for _, (start, stop) in pre_tokenizer.pre_tokenize_str(word):
                if HANGUL.search(word[start:stop]):
                    words[word[start:stop]] += n
    return dict(words.most_common(N_WORDS))


def _pieces(words, n_tokens):
    """Pieces of Hangul, maybe behind a space, in SentencePiece's order."""
    import sentencepiece

    counts = {word: n for word, n in words.items() if PIECE.fullmatch(word)}
    if not counts:
        return []
    n_characters = len(set().union(*counts))
    n_control = 3  # <unk>, <s>, </s>
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{n}" for word, n in counts.items()),
        input_format="tsv",
        model_writer=model,
        model_type="bpe",
        vocab_size=n_control + n_characters + 2 * n_tokens + N_SPARE,
        hard_vocab_limit=False,  # a small corpus has fewer
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,  # words have their spaces
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    learned = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(n_control, learned.get_piece_size())
    pieces = (learned.id_to_piece(i).replace("▁", " ") for i in ids)
    return [piece for piece in pieces if PIECE.fullmatch(piece)]


def _alphabet():
    """Byte to the character that stands for it in a vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def _speller(tokenizer):
    """A function: a word to its tokens, by the tokenizer's own merges."""
    alphabet, model = _alphabet(), tokenizer.backend_tokenizer.model

    def spell(word):
        written = "".join(alphabet[byte] for byte in word.encode())
        return [token.value for token in model.tokenize(written)]

    return spell


def _join(tokens, ranks_of):
    """Applies new merges to a word's tokens in place, as BPE does.

    Lower ranks go first, of the same rank the leftmost. Returns the ranks of
    the merges that fired.
    """
    fired = []
    while True:
        pairs = enumerate(zip(tokens, tokens[1:]))
        found = [(ranks_of[p], i) for i, p in pairs if p in ranks_of]
        if not found:
            return fired
        rank, i = min(found)
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
        fired.append(rank)


def _making(pieces, tokenizer, n_most):
    """Merges that make each piece one token: first each of its syllables."""
    spell, known = _speller(tokenizer), set(tokenizer.get_vocab())
    ranks_of = {}
    for piece in pieces:
        begin = 1 + piece.startswith(" ")
        for part in (piece[:begin], *piece[begin:], piece):
            tokens = spell(part)
            _join(tokens, ranks_of)
            while len(tokens) > 1 and tokens[0] + tokens[1] not in known:
                # A known token is left to the merges that make it: a second
                # way to it would change texts without any new token.
                known.add(tokens[0] + tokens[1])
                ranks_of[tokens[0], tokens[1]] = len(ranks_of)
                _join(tokens, ranks_of)
        if len(ranks_of) >= n_most:
            break
    return list(ranks_of)


def _most_used(found, words, tokenizer, n_most):
    """The merges that fire most often on the words, in their order.

    A part fires at least as often as what is made of it and stands before it,
    so that none stays without its parts.
    """
    spell = _speller(tokenizer)
    spelled = [(spell(word), n) for word, n in words.items()]
    while True:  # with fewer merges the others fire otherwise
        ranks_of = {pair: rank for rank, pair in enumerate(found)}
        fired = Counter()
        for tokens, n in spelled:
            for rank in _join(list(tokens), ranks_of):
                fired[rank] += n
        # A stable sort: the first of those that fire as often.
        best = sorted(range(len(found)), key=lambda rank: -fired[rank])
        kept = {rank for rank in best[:n_most] if fired[rank] >= MIN_COUNT}
        if len(kept) == len(found):
            return found
        found = [pair for rank, pair in enumerate(found) if rank in kept]


def replaceable(tokenizer, n_tokens, keep):
    """Ids of foreign tokens, the rarest ones; ascending.

    A token goes only with all that is made of it.

    Arguments
    ---------
    tokenizer : transformers.WhisperTokenizer
    n_tokens : int
    keep : set of int
        Ids to leave alone.

    Returns
    -------
    list of int

    Raises
    ------
    ValueError
        There are fewer.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    made_of = defaultdict(set)
    for left, right in model["merges"]:
        made_of[left].add(left + right)
        made_of[right].add(left + right)
    byte_of = {character: byte for byte, character in _alphabet().items()}
    end, taken = tokenizer.eos_token_id, {}
    for token, i in sorted(model["vocab"].items(), key=lambda item: -item[1]):
        free = i < end and i not in keep and _foreign(token, byte_of)
        if free and made_of[token] <= taken.keys():
            taken[token] = i
    if len(taken) < n_tokens:
        raise ValueError(
            f"n_new_tokens={n_tokens}: new_tokens='replace' finds {len(taken)} "
            "tokens of foreign scripts to replace; choose at most so many, or "
            "new_tokens=extend"
        )
    return sorted(list(taken.values())[:n_tokens])


def _foreign(token, byte_of):
    """Whether a token is letters of foreign scripts alone."""
    if token[1:].isascii():  # most are Latin, maybe behind a space
        return False
    try:
        letters = bytes(byte_of[c] for c in token).decode().lstrip(" ")
    except (KeyError, UnicodeDecodeError):  # a special one; part of a letter
        return False
    scripts = {unicodedata.name(c, "?").split()[0] for c in letters}
    are_letters = all(unicodedata.category(c)[0] in "LM" for c in letters)
    return bool(letters) and are_letters and scripts <= FOREIGN
