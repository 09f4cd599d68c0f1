"""The rows of new tokens: how they start, and at what rate they learn.

In: a model and the old tokens that spell each new one; an optimizer.
Out: an embedding matrix that has them; steps of another size for them.
"""

import torch

from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
STARTS = ("mean", "normal")
JITTER = 1e-6  # of the mean variance, where old rows span no whole space
LEAST_JITTER = 1e-12  # where they are all the same


def start(model, new, parts, how, seed):
    """Gives a row to each new token, in place; the other rows stay.

    By "mean" a row is the mean of the rows of the old tokens that spell it.
    By "normal" it is drawn from the normal with the mean and the covariance
    of the old text tokens' rows
    (https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Transformers'
    ``mean_resizing`` takes 1e-9 of that covariance, so that all rows start at
    the mean; hence they are drawn here. Input and output embedding are one
    matrix, before and after.

    Arguments
    ---------
    model : transformers.WhisperModel
        In fp32. Under "extend" its matrix grows to the largest id.
    new : local.vocabulary.NewTokens
    parts : dict of int to list of int
        New id to the old ids that spell it, as ``vocabulary.old_parts``.
    how : str
        One of ``STARTS``.
    seed : int
        Of the draw; the same on every rank. The global state of the random
        numbers is not touched.

    Raises
    ------
    ValueError
        There is no such start, or the model has no place for the ids.
    """
    if how not in STARTS:
        raise ValueError(f"new_rows={how!r}: choose {', '.join(STARTS)}")
    ids = sorted(parts)
    old = model.get_input_embeddings().weight.detach().clone()
    _require_place(new.mode, ids, len(old))
    if how == "mean":
        rows = torch.stack([old[parts[i]].mean(0) for i in ids])
    else:
        rows = _drawn(old[: model.config.eos_token_id], len(ids), seed)
    if new.mode == "extend":
        with torch.random.fork_rng(devices=[]):  # it fills rows by itself
            model.resize_token_embeddings(ids[-1] + 1, mean_resizing=False)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[ids] = rows.to(embedding)
    _log_norms(embedding.detach(), ids, len(old))


def own_rate(optimizer, weight, ids, multiplier):
    """Makes the steps of some rows larger or smaller, by a factor.

    What a step of AdamW changes, its weight decay included, is in proportion
    to the rate: so this is a rate of their own, on top of their group's. A
    step that is skipped changes nothing here either.

    Arguments
    ---------
    optimizer : torch.optim.Optimizer
        One of ``local.optimizers``.
    weight : torch.nn.Parameter
        (rows, width), on the device where it is trained.
    ids : list of int
        The rows. Without any nothing is done, as with a factor of 1.
    multiplier : float
        0: these rows stay to the bit.
    """
    if not ids or multiplier == 1:
        return
    rows, kept = torch.tensor(ids, device=weight.device), []

    def before(*_):
        kept[:] = [weight.detach()[rows]]

    def after(*_):
        # A class and its parent may both call it within one step.
        for old in kept:
            change = weight.detach()[rows] - old
            weight.detach()[rows] = old.add(change, alpha=multiplier)
        kept.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _require_place(mode, ids, n_rows):
    behind = list(range(n_rows, n_rows + len(ids)))
    fits = ids == behind if mode == "extend" else ids[-1] < n_rows
    if not fits:
        raise ValueError(
            f"new_tokens='{mode}': the new tokens have the ids {ids[0]} to "
            f"{ids[-1]}, where the model has {n_rows} rows; they belong to "
            "another whisper_hub"
        )


def _drawn(old, n, seed):
    """(n, width) from a normal with the mean and covariance of old rows.

    ``torch.distributions.MultivariateNormal`` does the same, but takes no
    generator, and no covariance that is not positive definite.
    """
    old = old.double().cpu()
    covariance = torch.cov(old.T)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed:  # fewer rows than dimensions, or all alike
        jitter = JITTER * covariance.diagonal().mean()
        covariance.diagonal().add_(jitter.clamp(min=LEAST_JITTER))
        factor = torch.linalg.cholesky(covariance)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(
        n, old.shape[1], generator=generator, dtype=torch.float64
    )
    return old.mean(0) + noise @ factor.T


def _log_norms(embedding, ids, n_old):
    norms = embedding.norm(dim=1)
    is_new = torch.zeros_like(norms, dtype=torch.bool)
    is_new[ids] = True
    old, new = norms[:n_old][~is_new[:n_old]], norms[is_new]
    told = _told(old, "old"), _told(new, "new")
    logger.info("embedding norms before any training: %s, %s", *told)


def _told(norms, name):
    mean, least, most = norms.mean(), norms.min(), norms.max()
    return f"{len(norms):,} {name} rows {mean:.3g} ({least:.3g} to {most:.3g})"
