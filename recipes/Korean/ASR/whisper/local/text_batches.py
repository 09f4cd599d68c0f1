"""Batches of text without audio among the batches of clips.

In: lines of a text file; the share of batches that hold clips.
Out: one plan of both kinds; a dataset of both; what the decoder is given in
place of the encoder's states.
"""

from functools import partial

import numpy as np
import torch

from local import batching, dataio, ranks, text_lines
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
BYTES_PER_S = 15  # of a transcript in UTF-8: 14.6 to 14.9, 853 read clips
TEXT = 1  # sets what is drawn of the text apart from what is of the clips


class MixedBatches(batching.Batches):
    """Training batches of clips, and between them some of lines of text.

    The clips come in the batches and the order that they have without text.
    Line ``i`` is the item ``len(durations_s) + i``. A batch of text has no
    clips and a context of 0; ``epoch_s`` and ``shares`` tell of clips alone.

    As of clips, a batch of text has at most ``batch_size`` lines a rank, and
    with their padding the bytes of ``max_batch_length_s`` seconds of speech.
    An epoch draws its lines at random, none twice before each was there once.
    Of the batches of text the largest comes first, at a random place.

    Arguments
    ---------
    *arguments
        Of ``batching.Batches``.
    lines : local.text_lines.TextLines
    asr_ratio : float
        Share of the batches that hold clips, over 0; 1: all.
    **options
        Of ``batching.Batches``.
    """

    def __init__(self, *arguments, lines, asr_ratio, **options):
        self.asr_ratio, self.digest = asr_ratio, lines.digest
        self.n_bytes = lines.sizes
        super().__init__(*arguments, **options)
        if self.n_clips.all():
            told = "asr_ratio=%s leaves no batch of text beside %d of clips"
            logger.warning(told, asr_ratio, len(self))

    def _origin(self):
        lines = f"{len(self.n_bytes)} lines of SHA-1 {self.digest}"
        of_text = {"asr_ratio": self.asr_ratio, "text_file": lines}
        return {**super()._origin(), **of_text}

    def set_epoch(self, epoch):
        """Draws the plan of an epoch."""
        super().set_epoch(epoch)
        rng = np.random.default_rng([self.seed, epoch, TEXT])
        n_texts = self._n_texts(len(self.batches))
        texts = self._texts(n_texts, rng)
        n_batches = len(self.batches) + n_texts
        # The first stays that of the longest clips.
        is_text = np.zeros(n_batches, dtype=bool)
        is_text[1 + rng.permutation(n_batches - 1)[:n_texts]] = True
        n_clips, contexts = np.zeros((2, n_batches), dtype=np.int64)
        n_clips[~is_text] = self.n_clips
        contexts[~is_text] = self.contexts
        self.n_clips, self.contexts = n_clips, contexts
        clips, texts = iter(self.batches), iter(texts)
        self.batches = [next(texts if one else clips) for one in is_text]

    def _n_batches(self, epoch):
        n_batches = super()._n_batches(epoch)
        return n_batches + self._n_texts(n_batches)

    def _n_texts(self, n_batches):
        """Batches of text beside so many of clips."""
        return round(n_batches * (1 - self.asr_ratio) / self.asr_ratio)

    def _texts(self, n_texts, rng):
        """So many batches of lines of like size, in random order."""
        batches = []
        while len(batches) < n_texts:
            batches += self._some(n_texts - len(batches), rng)
        if batches:  # what does not fit into memory fails soon
            largest = np.argmax([self._padded(batch) for batch in batches])
            batches[0], batches[largest] = batches[largest], batches[0]
        return [len(self.durations_s) + batch for batch in batches]

    def _some(self, n_most, rng):
        """At most so many batches, in which no line comes twice.

        Of as many lines as so many batches can hold, or of all.
        """
        n_lines = n_most * self.n_ranks * self.batch_size
        drawn = rng.permutation(len(self.n_bytes))[:n_lines]
        drawn = drawn[np.argsort(-self.n_bytes[drawn], kind="stable")]
        batches, start = [], 0
        while start < len(drawn):
            size = self.n_ranks * self._lines(self.n_bytes[drawn[start]])
            batch = drawn[start : start + size]
            # No rank goes without: a tail of too few lines is repeated.
            batches.append(np.resize(batch, max(len(batch), self.n_ranks)))
            start += size
        return [batches[i] for i in rng.permutation(len(batches))[:n_most]]

    def _padded(self, batch):
        return len(batch) * self.n_bytes[batch].max()

    def _lines(self, n_bytes):
        """Lines of a batch and rank whose longest has so many bytes."""
        if not self.max_batch_length_s:
            return self.batch_size
        n_lines = int(self.max_batch_length_s * BYTES_PER_S / n_bytes)
        return max(1, min(self.batch_size, n_lines))


class WithText(torch.utils.data.Dataset):
    """Training clips, and behind them lines of text without audio.

    Arguments
    ---------
    clips : speechbrain.dataio.dataset.DynamicItemDataset
    lines : local.text_lines.TextLines
    tokenizer : transformers.WhisperTokenizer

    Attributes
    ----------
    data : dict
        ID to row, of the clips.
    """

    def __init__(self, clips, lines, tokenizer):
        self.clips, self.lines, self.tokenizer = clips, lines, tokenizer
        self.data = clips.data
        self.has_warned = False

    def __len__(self):
        return len(self.clips) + len(self.lines)

    def __getitem__(self, index):
        """A clip, or what there is of it in a line: no sound."""
        number = index - len(self.clips)
        if number < 0:
            return self.clips[index]
        label, failed = self._read(number)
        tokens_bos, tokens_eos = dataio.token_ids(label, self.tokenizer)
        return {
            "id": f"line-{number}",
            "wrd": label,
            "duration": 0.0,
            "category": "",
            "sig": torch.zeros(1),
            "failed": failed,
            "tokens_bos": tokens_bos,
            "tokens_eos": tokens_eos,
        }

    def _read(self, number):
        """Text of a line, and whether it failed, which stops no run."""
        try:
            return self.lines[number], False
        except (OSError, ValueError) as error:
            if not self.has_warned:  # of a file that changed, all may fail
                logger.warning("line failed, others may, too: %s", error)
            self.has_warned = True
            return "", True


def unheard(whisper, n_lines, device):
    """What the decoder is given where there is no audio.

    One encoder state of zeros for each line: attention to one state weighs
    it 1, so that a cross-attention yields the bias of its value projection,
    put through its output projection, whatever the text.

    Arguments
    ---------
    whisper : local.model.Whisper
    n_lines : int
    device : str or torch.device

    Returns
    -------
    dict
        ``encoder_states`` for ``Whisper.forward``, (n_lines, 1, width). What
        is trained of the encoder has a gradient of zeros in them: DDP waits
        for that of each trained parameter.
    """
    states = torch.zeros(
        n_lines, 1, whisper.model.config.d_model, device=device
    )
    parameters = whisper.model.encoder.parameters()
    trained = [p for p in parameters if p.requires_grad]
    if trained:
        states = (
            states + 0 * torch.stack([p.flatten()[0] for p in trained]).sum()
        )
    return {"encoder_states": states}


def with_text(
    splits, weights, tokenizer, fits, *, text_file, asr_ratio, max_lines, seed
):
    """Training clips, and the lines of a text file where they are asked for.

    Arguments
    ---------
    splits : dict
        Name to DynamicItemDataset: "train", and those whose texts are held
        out of the lines.
    weights : sequence of float or None
        Of ``batching.Batches``.
    tokenizer : transformers.WhisperTokenizer
    fits : callable
        Of ``text_lines.TextLines``, as ``max_lines`` and ``seed``.
    text_file : str
        Read where ``asr_ratio`` is below 1.
    asr_ratio : float

    Returns
    -------
    dataset : torch.utils.data.Dataset
    batches_of : callable
        What plans their batches, from the other arguments of ``Batches``.
    """
    clips = splits["train"]
    if asr_ratio == 1:
        return clips, partial(batching.Batches, weights=weights)
    others = [one.data for name, one in splits.items() if name != "train"]
    held_out = {row["wrd"] for rows in others for row in rows.values()}
    lines = text_lines.TextLines(text_file, max_lines, seed, fits, held_out)
    ranks.require_same("the SHA-1 of text_file's lines", lines.digest)
    batches_of = partial(
        MixedBatches, weights=weights, lines=lines, asr_ratio=asr_ratio
    )
    return WithText(clips, lines, tokenizer), batches_of
