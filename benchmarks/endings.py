"""A decoder that ends each text where the clip's own label ends.

In: a Hugging Face folder with random weights, clips.
Out: a folder of the same model, whose texts are as long as the labels.

Random weights alone write the same number of tokens for every clip, which
would hide what it costs to go on with clips that have ended.
"""

import torch
from transformers import (
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

ENDS = 0  # the dimension of the decoder that only the end token reads
SCALE = 2.0  # of a position there
LOUD = 10.0  # the end token's weight: above all others, or below
N_PREFIX = 4


@torch.no_grad()
def write(source, clips, folder):
    """Writes the model.

    In the dimension ENDS stands the position, less the text's length, which
    the first cross-attention tells of the clip's mean encoder state. Above
    zero it is time to end.

    Arguments
    ---------
    source, folder : str
    clips : list of clips.Clip
        Fewer than the model is wide, so that the lengths can be fitted.
    """
    model = WhisperForConditionalGeneration.from_pretrained(source)
    tokenizer = WhisperTokenizer.from_pretrained(source)
    extractor = WhisperFeatureExtractor.from_pretrained(source)
    decoder = model.model.decoder
    _silence(decoder)
    positions = torch.arange(len(decoder.embed_positions.weight))
    decoder.embed_positions.weight[:, ENDS] = SCALE * positions
    end = decoder.embed_tokens.weight[tokenizer.eos_token_id]
    end.zero_()
    end[ENDS] = LOUD
    first = decoder.layers[0].encoder_attn
    first.q_proj.weight.zero_()  # every frame weighs alike
    first.q_proj.bias.zero_()
    values = [
        first.v_proj(model.model.encoder(_mel(clip, extractor))[0].mean(1))
        for clip in clips
    ]
    ends_at = [N_PREFIX - 1 + n_tokens(clip, tokenizer) - 0.5 for clip in clips]
    weight, bias = _fit(torch.cat(values), -SCALE * torch.tensor(ends_at))
    first.out_proj.weight[ENDS], first.out_proj.bias[ENDS] = weight, bias
    for part in (model, tokenizer, extractor):
        part.save_pretrained(folder)


def n_tokens(clip, tokenizer):
    """Tokens of a clip's label, without prefix and end."""
    return len(tokenizer.encode(clip.text, add_special_tokens=False))


def _silence(decoder):
    """Nothing but what ``write`` puts there reaches the dimension ENDS."""
    decoder.embed_tokens.weight[:, ENDS] = 0
    for layer in decoder.layers:
        for part in (
            layer.self_attn.out_proj,
            layer.encoder_attn.out_proj,
            layer.fc2,
        ):
            part.weight[ENDS], part.bias[ENDS] = 0, 0


def _mel(clip, extractor):
    return extractor(
        clip.samples, sampling_rate=16000, return_tensors="pt"
    ).input_features


def _fit(values, wanted):
    """Least squares in fp64: a weight and a bias."""
    values = torch.nn.functional.pad(values.double(), (0, 1), value=1.0)
    found = torch.linalg.lstsq(values, wanted[:, None].double(), driver="gelsd")
    return found.solution[:-1, 0].float(), found.solution[-1, 0].float()
