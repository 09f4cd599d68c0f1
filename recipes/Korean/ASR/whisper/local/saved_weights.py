"""Weights that were saved, beside a model: whether they are its own.

In: a checkpoint's tensors and identity, and the model's.
Out: nothing, or a ValueError that tells what differs; its new tokens.
"""

from local import vocabulary


def require_own(path, saved, own, theirs, ours):
    """Raises where weights cannot go into a model as they are.

    Arguments
    ---------
    path : str or Path
        Of the checkpoint's identity, to tell.
    saved, own : dict of str to torch.Tensor
        What was saved, and what the model trains.
    theirs, ours : dict
        ``local.model.Whisper.identity`` of either.

    Raises
    ------
    ValueError
        They are of another adaptation, other new tokens, another base or
        another size.
    """
    if saved.keys() != own.keys():
        raise ValueError(
            f"{path} holds other weights than adaptation="
            f"'{ours['adaptation']}' trains: "
            f"{sorted(saved.keys() ^ own.keys())[:3]} …"
        )
    _require_tokens(path, *(new_tokens(path, one) for one in (theirs, ours)))
    require_base(path, theirs, ours)
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape:  # copy_ would broadcast
            raise ValueError(
                f"{path} holds another size: {name} has the shape "
                f"{tuple(saved[name].shape)}, not {tuple(tensor.shape)}"
            )


def require_base(path, theirs, ours):
    """Raises ValueError where weights were trained beside another base.

    Arguments
    ---------
    path, theirs, ours
        As for ``require_own``; of ``theirs`` the ``base_sha256``, if it is
        told, of ``ours`` also the ``whisper_hub``.
    """
    base, found = theirs.get("base_sha256"), ours.get("base_sha256")
    if base and base != found:
        raise ValueError(
            f"{path} was trained beside other weights than those of "
            f"whisper_hub='{ours['whisper_hub']}' here: their SHA-256 is "
            f"{base}, not {found}; give the source it was trained from"
        )


def new_tokens(path, identity):
    """What the vocabulary of saved weights has beyond that of their base.

    Arguments
    ---------
    path : str or Path
        Of the checkpoint, to tell.
    identity : dict
        ``local.model.Whisper.identity``.

    Returns
    -------
    local.vocabulary.NewTokens or None

    Raises
    ------
    ValueError
        What tells it is damaged.
    """
    if (told := identity.get("new_tokens")) is None:
        return None
    try:
        return vocabulary.from_json(told)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _require_tokens(path, theirs, ours):
    if theirs != ours:
        raise ValueError(
            f"{path} was trained with other new tokens ({_told(theirs)}) than "
            f"those here ({_told(ours)}), and rows belong to their tokens: set "
            "new_tokens, n_new_tokens and new_tokens_text as in its run, "
            "beside that run's tokenizer folder, or choose another "
            "output_folder"
        )


def _told(new):
    return f"{len(new.ids)} by new_tokens='{new.mode}'" if new else "none"
