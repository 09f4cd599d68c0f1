"""Text between the clips: its share, its batches, what is learned of it."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import logged
from hypothesis import (
    given,
    settings,
    strategies as st,
)
from local import batching, dataio, loss, ranks, text_batches, text_lines
from local.text_batches import BYTES_PER_S, MixedBatches, WithText, unheard

import speechbrain as sb
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.utils.checkpoints import Checkpointer

CONTEXT_S = 30.0


def of_sizes(n_lines, seed=0, longest=400, digest="one"):
    """What a plan asks of TextLines."""
    sizes = np.random.default_rng(seed).integers(1, longest + 1, n_lines)
    return SimpleNamespace(sizes=sizes.astype(np.int32), digest=digest)


def plans(
    n_clips=300,
    lines=None,
    asr_ratio=0.6,
    batch_size=8,
    max_batch_length_s=40,
    encoder_context="true_length",
    n_ranks=1,
    epoch=1,
    seed=7,
    weights=None,
):
    """The plans of all ranks, and that of the first without text."""
    durations_s = np.random.default_rng(1).uniform(0.5, 20, n_clips).round(3)
    rest = batch_size, max_batch_length_s, encoder_context, CONTEXT_S, seed
    lines = lines or of_sizes(2000)
    mixed = [
        MixedBatches(
            durations_s,
            *(*rest, rank, n_ranks),
            weights=weights,
            lines=lines,
            asr_ratio=asr_ratio,
        )
        for rank in range(n_ranks)
    ]
    alone = batching.Batches(durations_s, *rest, 0, n_ranks, weights)
    for one in (*mixed, alone):
        one.set_epoch(epoch)
    return mixed, alone


def texts(plan):
    """Batches of text over all ranks, of line numbers."""
    n_clips = len(plan.durations_s)
    pairs = zip(plan.batches, plan.contexts)
    return [batch - n_clips for batch, context in pairs if context == 0]


@st.composite
def chosen(draw):
    integers, choice = st.integers, st.sampled_from
    return {
        "n_clips": draw(integers(1, 200)),
        "lines": of_sizes(draw(integers(1, 300)), draw(integers(0, 9))),
        "asr_ratio": draw(choice([0.05, 0.3, 0.5, 0.77, 0.999, 1.0])),
        "batch_size": draw(integers(1, 9)),
        "max_batch_length_s": draw(choice([0, 3, 31, 100])),
        "encoder_context": draw(choice(["true_length", "mixed"])),
        "n_ranks": draw(integers(1, 8)),
        "epoch": draw(integers(0, 3)),
    }


# The plan


@given(chosen())
@settings(max_examples=40, deadline=None)
def test_clips_come_as_without_text_and_text_as_often_as_asked(arguments):
    (plan, *_), alone = plans(**arguments)
    is_clips = plan.contexts > 0
    clips = [b for b, one in zip(plan.batches, is_clips) if one]
    assert is_clips[0] and len(clips) == len(alone)
    assert all(map(np.array_equal, clips, alone.batches))
    assert (plan.contexts[is_clips] == alone.contexts).all()
    assert plan.n_clips[is_clips].tolist() == list(map(len, clips))
    assert not plan.n_clips[~is_clips].any()
    assert plan.shares == alone.shares
    assert (plan.epoch_s == alone.epoch_s).all()
    n_texts, ratio = len(plan) - len(alone), arguments["asr_ratio"]
    assert n_texts == len(texts(plan))
    # Within half a batch of text.
    assert abs(n_texts - len(alone) * (1 - ratio) / ratio) <= 0.5


@given(chosen())
@settings(max_examples=40, deadline=None)
def test_ranks_share_a_batch_of_text_and_keep_its_size(arguments):
    mixed, _ = plans(**arguments)
    sizes, budget_s = arguments["lines"].sizes, arguments["max_batch_length_s"]
    for n, parts in enumerate(zip(*mixed)):
        lengths = list(map(len, parts))
        assert min(lengths) >= 1 and max(lengths) - min(lengths) <= 1
        assert max(lengths) <= arguments["batch_size"]
        everything = np.sort(np.concatenate(parts))
        assert (everything == np.sort(mixed[0].batches[n])).all()
        is_text = everything >= arguments["n_clips"]
        assert (is_text == (mixed[-1].contexts[n] == 0)).all()
        if is_text.any() and budget_s and max(lengths) > 1:
            longest = sizes[everything - arguments["n_clips"]].max()
            assert max(lengths) * longest <= budget_s * BYTES_PER_S


@given(chosen())
@settings(max_examples=40, deadline=None)
def test_no_line_comes_again_before_the_others(arguments):
    # Of ranks, a tail may be repeated, so that none goes without.
    (plan,), _ = plans(**{**arguments, "n_ranks": 1})
    found = np.concatenate([[], *texts(plan)]).astype(int)
    counts = np.bincount(found, minlength=len(arguments["lines"].sizes))
    assert counts.max() - counts.min() <= 1


def test_batches_of_text_are_full_and_padded_little():
    lines = of_sizes(20_000)
    (plan,), _ = plans(2000, lines, 0.5)
    batches = texts(plan)
    longest = np.array([lines.sizes[batch].max() for batch in batches])
    wanted = np.minimum(8, 40 * BYTES_PER_S // longest)
    sizes = np.array(list(map(len, batches)))
    assert (sizes == wanted).mean() > 0.98  # the last one may be a tail
    padded = (sizes * longest).sum()
    own = lines.sizes[np.concatenate(batches)].sum()
    assert 0 < 1 - own / padded < 0.02
    # A draw of lines, not of the longest or the shortest.
    assert abs(lines.sizes[np.concatenate(batches)].mean() - 200) < 10
    # The largest first, then in no order.
    assert (sizes * longest).argmax() == 0
    assert abs(np.corrcoef(np.arange(len(batches)), longest)[0, 1]) < 0.2


def test_text_lies_anywhere_between_the_clips():
    (plan,), _ = plans(3000, asr_ratio=0.5)
    places = np.flatnonzero(plan.contexts == 0) / len(plan)
    assert abs(places.mean() - 0.5) < 0.05 and places[0] < 0.05
    runs = np.diff(np.flatnonzero(np.diff(plan.contexts == 0)))
    assert 1 < runs.mean() < 3 and runs.max() > 3  # no fixed beat


def test_an_epoch_draws_its_own_lines_again_the_same():
    def of(epoch, seed=7):
        (plan,), _ = plans(epoch=epoch, seed=seed)
        return plan

    one = of(1)
    assert all(map(np.array_equal, one.batches, of(1).batches))
    one.set_epoch(2)
    one.set_epoch(1)
    assert all(map(np.array_equal, one.batches, of(1).batches))
    found = [set(np.concatenate(texts(of(*e)))) for e in ((1,), (2,), (1, 8))]
    for first, second in ((0, 1), (0, 2)):
        assert len(found[first] & found[second]) < len(found[first]) * 0.5


@pytest.mark.parametrize("weights", [None, [0.5, 1.7] * 150])
@pytest.mark.parametrize("encoder_context", ["true_length", "mixed"])
def test_the_steps_of_a_run_count_text(weights, encoder_context):
    (plan,), _ = plans(encoder_context=encoder_context, weights=weights)
    n_steps = 0
    for epoch in (1, 2, 3):
        plan.set_epoch(epoch)
        n_steps += -(-len(plan) // 4)
    assert plan.n_steps(3, 4) == n_steps


# Resuming


def test_a_run_goes_on_within_an_epoch_of_the_same_text_alone(tmp_path):
    def of(digest="one", asr_ratio=0.6):
        (plan,), _ = plans(
            lines=of_sizes(500, digest=digest), asr_ratio=asr_ratio
        )
        return plan

    file = tmp_path / "batches.ckpt"
    of().save(file)
    of().load(file, end_of_epoch=False)
    _, alone = plans()
    others = {
        "text_file=500 lines of SHA-1 one, this run has 500 lines of SHA-1 two": of(
            "two"
        ),
        "asr_ratio=0.6, this run has 0.5": of(asr_ratio=0.5),
        "asr_ratio=0.6, this run has None": alone,
    }
    for told, plan in others.items():
        plan.load(file, end_of_epoch=True)
        with pytest.raises(ValueError, match=told):
            plan.load(file, end_of_epoch=False)
    alone.save(file)
    with pytest.raises(ValueError, match="asr_ratio=None, this run has 0.6"):
        of().load(file, end_of_epoch=False)


# Items


CLIPS = {
    str(n): {"wrd": "가나", "duration": 1.0 + n, "category": "a"}
    for n in range(3)
}


def clips(tokenizer):
    """A dataset as the training's."""

    @sb.utils.data_pipeline.takes("wrd")
    @sb.utils.data_pipeline.provides(
        "sig", "failed", "tokens_bos", "tokens_eos"
    )
    def read(label):
        yield torch.ones(160)
        yield False
        yield from dataio.token_ids(label, tokenizer)

    keys = ["id", "wrd", "duration", "category", *read.provides]
    return sb.dataio.dataset.DynamicItemDataset(CLIPS, [read], keys)


@pytest.fixture
def both(tmp_path, tokenizer):
    """Three clips and 40 lines."""
    path = tmp_path / "text.txt"
    written = [f"줄 {n}{' 더' * (n % 7)}\n" for n in range(40)]
    path.write_text("".join(written), encoding="utf-8")
    lines = text_lines.TextLines(path, 0, 0, lambda label: True)
    return WithText(clips(tokenizer), lines, tokenizer)


def test_a_line_is_as_a_clip_without_sound(both, tokenizer):
    assert len(both) == 43 and both.data is both.clips.data
    assert both[2]["id"] == "2" and both[2]["duration"] == 3.0
    line = both[3]
    assert line.keys() == both[2].keys() and not line["sig"].any()
    assert (line["id"], line["wrd"], line["duration"]) == ("line-0", "줄 0", 0)
    assert line["failed"] is False
    ids = [*line["tokens_bos"].tolist(), line["tokens_eos"][-1].item()]
    prefix = tokenizer.prefix_tokens
    assert ids == [*prefix, *dataio.encode("줄 0", tokenizer), 50257]
    prefix = tokenizer.convert_ids_to_tokens(prefix)
    assert prefix[1:] == ["<|ko|>", "<|transcribe|>", "<|notimestamps|>"]
    assert line["tokens_eos"].tolist() == ids[4:]
    assert both[42]["wrd"].startswith("줄 39")


def test_a_changed_file_fails_lines_and_stops_nothing(both, monkeypatch):
    warned = logged(monkeypatch, text_batches.logger, "warning")
    both.lines.path.write_bytes(b"")
    items = [both[3 + n] for n in range(3)]
    assert [(one["failed"], one["wrd"]) for one in items] == [(True, "")] * 3
    assert len(warned) == 1 and "was changed" in warned[0]
    both.lines.path.unlink()
    both.lines = pickle.loads(pickle.dumps(both.lines))  # as to a worker
    assert both[3]["failed"]


def loader(both, checkpoints, epoch=1):
    durations = [row["duration"] for row in both.data.values()]
    plan = MixedBatches(
        durations,
        *(2, 0, "true_length", CONTEXT_S, 3),
        lines=both.lines,
        asr_ratio=0.2,
    )
    keys = ["sig", "tokens_bos", "tokens_eos", "states"]
    one = SaveableDataLoader(
        both,
        batch_sampler=plan,
        collate_fn=lambda items: PaddedBatch(items, device_prep_keys=keys),
    )
    plan.set_epoch(epoch)
    return one, plan, Checkpointer(checkpoints, {"loader": one, "plan": plan})


def test_batches_pass_a_loader_and_resume_exactly(both, tmp_path):
    one, plan, checkpointer = loader(both, tmp_path)
    found = []
    for n, batch in enumerate(one):
        batch = batch.to("cpu")
        is_text = plan.contexts[n] == 0
        assert batch.failed.dtype == torch.bool and not batch.failed.any()
        assert (batch.sig.data.shape[1] == 1) == is_text
        assert all(i.startswith("line-") == is_text for i in batch.id)
        found.append((batch.id, batch.tokens_eos.data))
        if n == 4:
            checkpointer.save_checkpoint(end_of_epoch=False)
    assert len(found) == len(plan) == 10
    rest, _, checkpointer = loader(both, tmp_path)
    checkpointer.recover_if_possible()
    again = [(batch.id, batch.tokens_eos.data) for batch in rest]
    assert [ids for ids, _ in again] == [ids for ids, _ in found[5:]]
    for (_, theirs), (_, own) in zip(again, found[5:]):
        assert torch.equal(theirs, own)


# What is learned


def batch_of(tokenizer, *labels):
    pairs = [dataio.token_ids(label, tokenizer) for label in labels]
    return PaddedBatch([{"bos": bos, "eos": eos} for bos, eos in pairs])


def nll_of(whisper, batch):
    """As the training's step; the module may be wrapped."""
    whole = getattr(whisper, "module", whisper)
    targets, lens = batch.eos
    mask = loss.lengths_to_mask(lens, targets.shape[1])
    bos = batch.bos.data
    heard = unheard(whole, len(bos), "cpu")
    _, logits = whisper(bos, targets.shape[1], **heard)
    return loss.nll_sum(logits, targets, mask)


def test_the_loss_is_that_of_transformers_with_one_state_of_zeros(
    build, tokenizer
):
    whisper = build().eval()
    labels = ["안녕하세요 여러분", "네", "12월 3일"]
    found, n_tokens = nll_of(whisper, batch_of(tokenizer, *labels))
    wanted, n_wanted = 0.0, 0
    for label in labels:
        ids, _ = dataio.labels(dataio.encode(label, tokenizer), tokenizer)
        ids = torch.tensor([ids])
        zeros = torch.zeros(1, 1, whisper.model.config.d_model)
        output = whisper.model(
            encoder_outputs=(zeros,), decoder_input_ids=ids[:, :-1]
        )
        embedding = whisper.model.decoder.embed_tokens.weight
        logits = output.last_hidden_state @ embedding.T
        own = F.cross_entropy(logits[0, 3:], ids[0, 4:], reduction="sum")
        wanted, n_wanted = wanted + own.item(), n_wanted + len(ids[0]) - 4
    assert n_tokens == n_wanted
    assert found.item() == pytest.approx(wanted, rel=1e-5)


def test_a_cross_attention_of_no_audio_is_the_same_for_every_text(build):
    whisper = build().eval()
    attention = whisper.model.decoder.layers[0].encoder_attn
    states = unheard(whisper, 2, "cpu")["encoder_states"]
    assert states.shape == (2, 1, whisper.model.config.d_model)
    assert not states.any()
    hidden = torch.randn(2, 5, states.shape[-1])
    output = attention(hidden, key_value_states=states)[0]
    wanted = attention.out_proj(attention.v_proj.bias)
    torch.testing.assert_close(output, wanted.expand_as(output))


# What is trained, by a part of its name: all; no encoder; as adapters.
@pytest.mark.parametrize("part", ["", "decoder.", "q_proj"])
def test_every_trained_parameter_has_a_gradient(build, tokenizer, part):
    """DDP waits for each, in its next step at the latest."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        whisper = build().train()
        for name, parameter in whisper.model.named_parameters():
            if part not in name:
                parameter.requires_grad_(False)
        wrapped = ranks.wrap(whisper, "cpu")
        for _ in range(2):
            nll, _ = nll_of(wrapped, batch_of(tokenizer, "안녕", "네 네"))
            nll.backward()
        named = whisper.model.named_parameters()
        trained = {k: p.grad for k, p in named if p.requires_grad}
        assert all(grad is not None for grad in trained.values())
        encoder = [k for k in trained if k.startswith("encoder.")]
        assert bool(encoder) == (part != "decoder.")
        assert not any(trained[name].any() for name in encoder)
        learns = [k for k in trained if k not in encoder and "self_attn" in k]
        assert any(trained[name].any() for name in learns)
        assert all(grad.isfinite().all() for grad in trained.values())
    finally:
        dist.destroy_process_group()


def test_a_ratio_that_leaves_no_text_is_told(both, caplog):
    of_clips = [1.0] * 6, 2, 0, "full", CONTEXT_S, 3
    MixedBatches(*of_clips, lines=both.lines, asr_ratio=0.5)
    assert not caplog.text
    MixedBatches(*of_clips, lines=both.lines, asr_ratio=0.95)
    assert "asr_ratio=0.95 leaves no batch of text beside 3" in caplog.text


def test_at_a_ratio_of_one_nothing_is_read(both, tokenizer):
    dataset, batches_of = text_batches.with_text(
        {"train": both.clips},
        None,
        tokenizer,
        None,
        text_file="none.txt",
        asr_ratio=1.0,
        max_lines=0,
        seed=0,
    )
    assert dataset is both.clips
    assert type(batches_of([1.0], 1, 0, "full", 30, 0)) is batching.Batches


def test_texts_that_are_scored_are_no_lines(both, tokenizer):
    scored = SimpleNamespace(
        data={"a": {"wrd": "줄 0"}, "b": {"wrd": "줄, 14!"}}
    )
    dataset, _ = text_batches.with_text(
        {"train": both.clips, "valid": scored, "test": scored},
        None,
        tokenizer,
        lambda label: True,
        text_file=both.lines.path,
        asr_ratio=0.5,
        max_lines=0,
        seed=0,
    )
    written = {dataset.lines[n] for n in range(len(dataset.lines))}
    assert "줄 7" in written and not {"줄 0", "줄 14"} & written
    assert dataset.lines.counts["held_out"] == 2
