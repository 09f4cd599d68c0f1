"""The rows of new tokens: their start, and the steps that they make."""

import copy

import pytest
import torch
from conftest import logged
from local import new_rows, optimizers, schedules
from local.vocabulary import NewTokens
from transformers import WhisperConfig, WhisperModel

END, N_ROWS, WIDTH = 40, 60, 8  # text is below END, as in Whisper
PARTS = {"extend": {60: [1, 2], 61: [3], 62: [5, 5, 39]}}
PARTS["replace"] = {10: [1, 2], 30: [3], 37: [30, 10]}


@pytest.fixture(scope="module")
def _built():
    config = WhisperConfig(
        vocab_size=N_ROWS,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_source_positions=2,
        eos_token_id=END,
        pad_token_id=END,
    )
    return WhisperModel(config)


@pytest.fixture
def model(_built):
    """Rows of text have a mean and a covariance; those above are far away."""
    model = copy.deepcopy(_built)
    generator = torch.Generator().manual_seed(1)
    skew = torch.randn(WIDTH, WIDTH, generator=generator)
    noise = torch.randn(N_ROWS, WIDTH, generator=generator)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows.copy_(noise @ skew + torch.arange(WIDTH))
        rows[END:] += 1000
    return model


def start(model, mode, how="mean", seed=0, parts=None):
    """The matrix before and after, each in a tensor of its own."""
    parts = parts or PARTS[mode]
    before = model.get_input_embeddings().weight.detach().clone()
    new = NewTokens(mode, [["a", "b"]] * len(parts), list(parts))
    new_rows.start(model, new, parts, how, seed)
    return before, model.get_input_embeddings().weight.detach().clone()


# The start


@pytest.mark.parametrize("how", new_rows.STARTS)
@pytest.mark.parametrize("mode", PARTS)
def test_the_other_rows_stay_to_the_bit(model, mode, how):
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    before, after = start(model, mode, how)
    n_rows = {"extend": 63, "replace": 60}[mode]
    assert model.get_input_embeddings() is embedding
    assert embedding.weight is weight and weight.requires_grad
    assert after.shape == (n_rows, WIDTH) and embedding.padding_idx == END
    assert model.config.vocab_size == embedding.num_embeddings == n_rows
    old = [i for i in range(N_ROWS) if i not in PARTS[mode]]
    assert torch.equal(after[old], before[old])
    changed = [i for i in PARTS[mode] if i < N_ROWS]
    assert not torch.isclose(after[changed], before[changed]).all(1).any()


@pytest.mark.parametrize("mode", PARTS)
def test_the_mean_of_the_parts(model, mode):
    """Parts are as they were, even where they are replaced themselves."""
    before, after = start(model, mode)
    for i, parts in PARTS[mode].items():
        torch.testing.assert_close(after[i], before[parts].mean(0))


def test_a_draw_has_the_mean_and_covariance_of_text(model):
    many = {N_ROWS + n: [1] for n in range(20000)}
    before, after = start(model, "extend", "normal", parts=many)
    drawn, text = after[N_ROWS:], before[:END]
    scale = text.std(0).max()
    assert (drawn.mean(0) - text.mean(0)).abs().max() < 0.05 * scale
    found, wanted = torch.cov(drawn.T), torch.cov(text.T)
    assert (found - wanted).abs().max() < 0.05 * scale**2


def test_a_draw_follows_from_the_seed_alone(model):
    drawn = []
    for seed, state in ((3, 0), (3, 1), (4, 1)):
        torch.manual_seed(state)
        told = torch.get_rng_state()
        drawn.append(start(copy.deepcopy(model), "extend", "normal", seed)[1])
        assert torch.equal(torch.get_rng_state(), told)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.isclose(drawn[0][N_ROWS:], drawn[2][N_ROWS:]).any()


@pytest.mark.parametrize(
    "n_kinds, width_of_draw", [(1, 0), (3, 2), (WIDTH, WIDTH - 1)]
)
def test_rows_that_span_no_whole_space(model, n_kinds, width_of_draw):
    """A tiny or an untrained model: no covariance of full rank."""
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows[:END] = rows[:n_kinds].repeat(END, 1)[:END]
    many = {N_ROWS + n: [1] for n in range(99)}
    before, after = start(model, "extend", "normal", parts=many)
    drawn = after[N_ROWS:] - before[:END].mean(0)
    assert torch.linalg.matrix_rank(drawn, atol=0.5) == width_of_draw
    assert drawn.isfinite().all()


def test_norms_are_logged(model, monkeypatch):
    found = logged(monkeypatch, new_rows.logger, "info")
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows.copy_(torch.eye(N_ROWS, WIDTH))
        rows[7] *= 3
    start(model, "extend", parts={60: [0], 61: [0, 7], 62: [7]})
    assert found == [
        "embedding norms before any training: 60 old rows 0.167 (0 to 3), "
        "3 new rows 1.86 (1 to 3)"
    ]


@pytest.mark.parametrize(
    "mode, how, parts, message",
    [
        ("extend", "zeros", None, "new_rows='zeros': choose mean, normal"),
        ("extend", "mean", {61: [1]}, "ids 61 to 61, where the model has 60"),
        ("extend", "mean", {9: [1], 60: [2]}, "belong to another whisper_hub"),
        ("extend", "mean", {60: [1], 62: [2]}, "belong to another"),
        ("replace", "mean", {9: [1], 60: [2]}, "belong to another"),
    ],
)
def test_what_has_no_place(model, mode, how, parts, message):
    with pytest.raises(ValueError, match=message):
        start(model, mode, how, parts=parts)
    assert len(model.get_input_embeddings().weight) == N_ROWS


# Their own rate

IDS = [2, 5, 63]
LR, DECAY = 1e-2, 0.5
N_STEPS = 5


def trained(optimizer, lr, multiplier=1, skipped=(), scaler=None, group=1):
    """(64, 64) weights after some steps, by gradients that are always the
    same; beside them another parameter."""
    generator = torch.Generator().manual_seed(5)
    weight, other = (
        torch.nn.Parameter(torch.randn(64, 64, generator=generator))
        for _ in range(2)
    )
    chosen = optimizers.build([other, weight], optimizer, lr, DECAY)
    schedules.separate(chosen, weight, group)
    new_rows.own_rate(chosen, weight, IDS, multiplier)
    for step in range(N_STEPS):
        for p in (weight, other):
            p.grad = torch.randn(p.shape, generator=generator)
        schedules.Schedule("linear", lr, 2).set(chosen, step + 1, N_STEPS)
        if scaler:
            grad = weight.grad * (torch.nan if step in skipped else 1)
            weight.grad = scaler.scale(grad)
            other.grad = scaler.scale(other.grad)
            scaler.step(chosen)
            scaler.update()
        else:
            chosen.found_inf = torch.tensor(float(step in skipped))
            chosen.step()
    return weight.detach(), other.detach()


@pytest.mark.parametrize("multiplier", [0.0, 0.3, 1, 10.0])
@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_a_step_is_that_of_another_rate(optimizer, multiplier):
    wanted, other = trained(optimizer, LR)
    wanted[IDS] = trained(optimizer, LR * multiplier)[0][IDS]
    found, beside = trained(optimizer, LR, multiplier)
    torch.testing.assert_close(found, wanted)
    rest = [i for i in range(64) if i not in IDS]
    assert torch.equal(found[rest], wanted[rest])
    assert torch.equal(beside, other)


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_without_a_rate_rows_stay_to_the_bit(optimizer):
    first = trained(optimizer, 0.0)[0]
    found = trained(optimizer, LR, 0.0)[0]
    assert torch.equal(found[IDS], first[IDS])
    assert not torch.isclose(found[3], first[3]).any()


def test_it_is_on_top_of_the_rate_of_the_group():
    wanted = trained("adamw", LR * 6)[0][IDS]
    torch.testing.assert_close(trained("adamw", LR, 3, group=2)[0][IDS], wanted)


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_a_step_that_is_skipped(optimizer):
    """By found_inf: as if it had not been, with the rate of the next one."""
    found = trained(optimizer, LR, 3, skipped=[1, 2])[0]
    wanted = trained(optimizer, LR * 3, skipped=[1, 2])[0]
    torch.testing.assert_close(found[IDS], wanted[IDS])
    assert found.isfinite().all()
    assert not torch.isclose(found[3], wanted[3]).all()


def test_scaled_gradients():
    """The fused AdamW takes them as they are, and skips by itself."""

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024)

    options = {"skipped": [2], "scaler": scaler()}
    found = trained("adamw", LR, 3, **options)[0]
    options = {"skipped": [2], "scaler": scaler()}
    wanted = trained("adamw", LR * 3, **options)[0]
    torch.testing.assert_close(found[IDS], wanted[IDS])
    assert found.isfinite().all()
    assert not torch.isclose(found, trained("adamw", LR, 3)[0]).all()


def test_a_parent_that_calls_the_hooks_too():
    """torch has each class call them whose objects were ever made."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    bitsandbytes.optim.AdamW8bit([torch.nn.Parameter(torch.zeros(3))])
    found = trained("adamw_8bit", LR, 3)[0][IDS]
    wanted = trained("adamw_8bit", LR * 3)[0][IDS]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("ids, multiplier", [([], 3.0), (IDS, 1.0), (IDS, 1)])
def test_nothing_is_registered_where_nothing_is_asked(ids, multiplier):
    weight = torch.nn.Parameter(torch.zeros(64, 2))
    optimizer = optimizers.build([weight], "adamw", LR, DECAY)
    new_rows.own_rate(optimizer, weight, ids, multiplier)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
