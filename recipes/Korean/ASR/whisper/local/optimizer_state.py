"""The state of an optimizer in a checkpoint, without pickled code.

In: an optimizer; the path of its JSON, tensors go beside it as safetensors.
Out: the same state, exact to the bit; an error where it is of another one.
"""

import itertools
from pathlib import Path

import torch

from local import files
from speechbrain.utils.distributed import main_process_only

SETTINGS = ("weight_decay", "lr_multiplier")  # a run's own go before saved ones


@main_process_only
def save(optimizer, path):
    """Writes an optimizer's state; shapes stand for its parameters."""
    state = optimizer.state_dict()
    pairs = zip(state["param_groups"], _shapes(optimizer))
    saved = {
        "optimizer": type(optimizer).__name__,
        "groups": [{**group, "params": shapes} for group, shapes in pairs],
        "state": {str(key): one for key, one in state["state"].items()},
    }
    files.save_state(saved, Path(path))


def load(optimizer, path, end_of_epoch):
    """Reads what ``save`` wrote, exact to the bit.

    Raises
    ------
    ValueError
        The files are damaged, or of another optimizer; tells what differs.
    """
    del end_of_epoch
    saved = files.load_state(Path(path))
    different = _difference(saved, optimizer)
    if different and not _difference(_trained(saved), optimizer):
        saved, different = _trained(saved), ""
    if different:
        raise ValueError(
            f"{path} is of another optimizer: {different}. Go on with the "
            "settings it was saved with, or choose another output_folder"
        )
    state = {int(key): one for key, one in saved["state"].items()}
    own = optimizer.state_dict()["param_groups"]
    groups = [_like(mine, one) for mine, one in zip(own, saved["groups"])]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for n, parameter in enumerate(parameters(optimizer)):
        for name, tensor in state.get(n, {}).items():
            if isinstance(tensor, torch.Tensor):  # cast by the stock method
                own = optimizer.state[parameter]
                own[name] = tensor.to(own[name].device)


def parameters(optimizer):
    """All that an optimizer trains, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _trained(saved):
    """Without what has no state: frozen parameters stood in groups once."""
    held, numbers = saved["state"], itertools.count()
    groups, state = [], []
    for group in saved["groups"]:
        pairs = [(str(next(numbers)), shape) for shape in group["params"]]
        pairs = [(key, shape) for key, shape in pairs if key in held]
        groups.append({**group, "params": [shape for _, shape in pairs]})
        state += [held[key] for key, _ in pairs]
    state = {str(n): one for n, one in enumerate(state)}
    return {**saved, "groups": groups, "state": state}


def _shapes(optimizer):
    """Of the parameters of each group."""
    groups = [group["params"] for group in optimizer.param_groups]
    return [[list(p.shape) for p in group] for group in groups]


def _difference(saved, optimizer):
    """What a saved optimizer is, and this one is not; "" if nothing."""
    kinds = saved.get("optimizer"), type(optimizer).__name__
    if kinds[0] != kinds[1]:
        return "it is {}, this run has {}".format(*kinds)
    both = [group["params"] for group in saved["groups"]], _shapes(optimizer)
    sizes = [[len(group) for group in groups] for groups in both]
    if sizes[0] != sizes[1]:
        return "its groups have {} parameters, this run's {}".format(*sizes)
    for n, groups in enumerate(zip(*both)):
        for m, shapes in enumerate(zip(*groups)):
            if shapes[0] != shapes[1]:
                text = "parameter {} of group {} has the shape {}, here {}"
                return text.format(m, n, *shapes)
    return ""


def _like(own, saved):
    """A saved group with an own one's parameters, settings and tuples."""
    settings = {k: own[k] for k in SETTINGS if k in own and k in saved}
    group = {**saved, **settings, "params": own["params"]}
    tuples = [k for k in group if isinstance(own.get(k), tuple)]
    return {**group, **{k: tuple(group[k]) for k in tuples}}
