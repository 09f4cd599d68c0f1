"""A frozen base in bf16, int8 or int4: how it is loaded, and who can run it.

In: a base precision, a device.
Out: options of Transformers' loading; layers that follow autocast.
"""

import copy
import functools
import logging

import torch
import torch.nn.functional as F

BASE_PRECISIONS = ("fp32", "bf16", "int8", "int4")
QUANTIZED = ("int8", "int4")
MULTIPLYING = (torch.nn.Linear, torch.nn.Conv1d)  # what bf16 is for
# It says at every matrix that it multiplies in fp16.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
LEAST_CAPABILITY = {"int8": (7, 5), "int4": (6, 0)}  # of CUDA, by bitsandbytes


def problem(base_precision, device):
    """What keeps a machine from running a base; None where nothing does.

    Arguments
    ---------
    base_precision : str
        One of ``BASE_PRECISIONS``.
    device : str or None
        "cpu", "cuda", "cuda:N" or another of PyTorch's; None: not known.

    Returns
    -------
    str or None
        What would work instead.
    """
    if base_precision not in QUANTIZED or device is None:
        return None
    if lacking := no_bitsandbytes():
        return lacking
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        return f"not on {kind}; choose bf16 or fp32, or device=cuda or cpu"
    if kind == "cpu":
        return None
    least = LEAST_CAPABILITY[base_precision]
    try:
        found = torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):  # a plan for another machine
        return None
    if found >= least:
        return None
    able = [n for n, c in LEAST_CAPABILITY.items() if found >= c]
    return (
        "this GPU has the compute capability {}.{}, it takes {}.{}; choose {}"
    ).format(*found, *least, " or ".join([*able, "bf16", "fp32"]))


def no_bitsandbytes():
    """What to say where bitsandbytes cannot be used; None where it can."""
    try:  # not only looked for: a build may not fit the machine
        import bitsandbytes  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        told = f"bitsandbytes cannot be used ({error})"
        return f"{told}: pip install bitsandbytes"
    return None


def loading_options(base_precision, device):
    """What ``from_pretrained`` takes for a base.

    int8 is LLM.int8() (Dettmers et al. 2022,
    https://arxiv.org/abs/2208.07339), int4 the NF4 of QLoRA with double
    quantisation (https://arxiv.org/abs/2305.14314), of all linear layers.

    Arguments
    ---------
    base_precision : str
    device : str
        Where a quantised base is loaded to.

    Returns
    -------
    dict
        Empty where nothing is quantised.
    """
    if base_precision not in QUANTIZED:
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_8bit=base_precision == "int8",
        load_in_4bit=base_precision == "int4",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=[],
    )
    return {"quantization_config": config, "device_map": {"": device}}


def prepare(model, base_precision):
    """Makes a loaded base ready for training beside it.

    Linear layers are in the base precision, in bf16 convolutions too; all else
    is fp32, as in full fine-tuning, and so is a quantised layer's bias.

    Arguments
    ---------
    model : transformers.WhisperModel
        Changed in place.
    base_precision : str
    """
    for layer in model.modules():
        is_low = base_precision == "bf16" and isinstance(layer, MULTIPLYING)
        dtype = torch.bfloat16 if is_low else torch.float32
        for parameter in layer.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    if base_precision in QUANTIZED:
        for layer in _quantized_layers(model):
            layer.register_forward_pre_hook(_as_autocast)
            # Gradient checkpointing leaves a forward by an exception.
            layer.register_forward_hook(_restore_bias, always_call=True)
            if base_precision == "int8":
                layer.register_forward_hook(_forget_input)


def _quantized_layers(model):
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.compute_type_is_set = True  # by the hook, at each call
            # A validation would pack the weights anew, for a product that
            # has no gradient.
            layer.support_avx512bf16_for_cpu = False
            if layer.in_features % layer.weight.blocksize:
                layer.__class__ = _linear4bit_of_any_width()
            yield layer
        elif isinstance(layer, Linear8bitLt):
            yield layer


def _as_autocast(layer, inputs):
    """Has a layer compute in what torch.nn.Linear does under autocast."""
    x, *others = inputs
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    layer.compute_dtype = x.dtype  # int4's
    layer.fp32_bias = None if layer.bias is None else layer.bias.data
    return x, *others


def _restore_bias(layer, inputs, output):
    """Undoes that bitsandbytes casts it in place to what is computed in."""
    del inputs, output
    if layer.bias is not None:
        layer.bias.data = layer.fp32_bias
    layer.fp32_bias = None


def _forget_input(layer, inputs, output):
    """Drops what bitsandbytes keeps for a gradient that the matrix has not.

    It would stay past checkpointing and the backward pass.
    """
    del layer, inputs
    node = output.grad_fn
    if node is not None:
        node.A = None  # on a CPU
        node.tensors = (None, None, None)  # on a GPU


@functools.cache
def _linear4bit_of_any_width():
    """The class; bitsandbytes takes seconds to import, and may be missing."""
    from bitsandbytes import functional, nn

    class AnyWidth(nn.Linear4bit):
        """On a CPU, bitsandbytes 0.50 begins a block of weights at each row.

        It quantised them without regard to rows, which is the same where 64
        divides the width, as in OpenAI's models; elsewhere scales go astray.
        """

        def forward(self, x):
            if x.device.type != "cpu":
                return super().forward(x)
            state = copy.copy(self.weight.quant_state)
            shape, state.shape = state.shape, (1, state.shape.numel())
            matrix = functional.dequantize_4bit(self.weight.data, state)
            matrix = matrix.view(shape).to(x.dtype)
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, matrix, bias)

    return AnyWidth
