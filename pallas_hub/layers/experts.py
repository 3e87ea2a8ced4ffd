"""Experts of a Mixture-of-Experts model: switched through Transformers' own setting, but for one model at a time.

Transformers keeps the choice in the config, and experts read it at every call. A config may be shared: by two models
built from one object, and by layers that must be left alone. So the modules of a kernelized model get a copy of their
config, on which Transformers' setter is called; layers that are left alone keep the old one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pallas_hub.layers import state
from pallas_hub.layers.interface import kernel_behind
from pallas_hub.layers.loading import Kernel
from pallas_hub.layers.norms import FLOATS
from pallas_hub.layers.quantized_experts import QuantizedExperts

_SETTING = "_experts_implementation_internal"
LAYER = "experts_forward"
_PROBED: dict[tuple, str | None] = {}


def is_experts(module: Any) -> bool:
    """True for modules whose class Transformers' experts decorator has prepared, quantised or not."""
    if isinstance(module, QuantizedExperts):
        return True
    return is_experts_class(type(module)) and hasattr(module, "config") and hasattr(module, "is_transposed")


def is_experts_class(cls: type[nn.Module]) -> bool:
    return _table_of(cls) is not None


def recognise(module: Any) -> str | None:
    """Why the kernel may not stand in for these experts, or None if it may."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if isinstance(module, QuantizedExperts):
        return (
            f"its weights are quantised ({module.quantization_format}), and run the kernel that quantize_experts chose"
        )
    if type(_table_of(type(module))) is not type(ALL_EXPERTS_FUNCTIONS):
        return "its experts use a table of their own (quantised weights)"
    if _is_expert_parallel(module):
        return (
            "its experts are spread over processes; kernelize leaves them alone, "
            'model.set_experts_implementation("pallas") does not'
        )
    if not state.has_class_forward(module):
        return "its forward was already replaced on the instance"
    if module._modules.get("parametrizations") is not None:
        return "its weights are parametrized"
    for name in weight_names(module):
        reason = _unfit_weight(module, name)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _is_expert_parallel(module: Any) -> bool:
    """True if Transformers has put exchange between processes around the class's forward, which it still calls."""
    return getattr(module, "_is_expert_parallel", False)


def weight_names(module: Any) -> list[str]:
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if module.has_bias else names


def _unfit_weight(module: Any, name: str) -> str | None:
    weight = module._parameters.get(name)
    if weight is None:
        held = getattr(module, name, None)
        return f"is a {type(held).__name__}, not a parameter" if held is not None else "is missing"
    if type(weight) is not nn.Parameter:
        return f"is a {type(weight).__name__}, not a plain parameter"
    if type(weight.data) is not torch.Tensor:
        return f"holds a {type(weight.data).__name__}, which the kernel has no rule for"
    if weight.dtype not in FLOATS:
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"is {dtype}, packed or quantised; the kernel takes float32, bfloat16 and float16"
    if weight.device.type == "meta":
        return "is on the meta device; load the model first"
    return None


def _table_of(cls: Any) -> object | None:
    """The table of functions that the decorated forward of the class looks into."""
    forward = cls.forward
    if not hasattr(forward, "__wrapped__") or forward.__closure__ is None:
        return None
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    return cells["experts_interface"].cell_contents if "experts_interface" in cells else None


def kernel_by_setting(module: Any) -> Kernel | None:
    """The kernel that these experts run without kernelize: by their config, or since their weights are quantised."""
    if isinstance(module, QuantizedExperts):
        return module.kernel
    if not is_experts(module) or not (state.has_class_forward(module) or _is_expert_parallel(module)):
        return None
    return kernel_behind(getattr(module.config, "_experts_implementation", None))


def original_forward(module: Any, implementation: str | None) -> Callable:
    """The function that Transformers runs under the setting `implementation`; eager where that is a kernel of ours."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    eager = type(module).forward.__wrapped__
    if implementation in (None, "eager") or kernel_behind(implementation) is not None:
        return eager
    return ALL_EXPERTS_FUNCTIONS.get_interface(implementation, eager)


def example_inputs(module: Any, tokens: int, device: Any = None) -> tuple[torch.Tensor, ...]:
    """Random hidden states and a routing for them, of the layer's own sizes and dtype."""
    weight = module._parameters["down_proj"]
    experts, rows, columns = weight.shape
    hidden = columns if module.is_transposed else rows
    top_k = min(int(getattr(module.config, "num_experts_per_tok", None) or 2), experts)
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.device("cpu"):
        hidden_states = torch.randn(tokens, hidden, generator=generator)
        scores, index = torch.rand(tokens, experts, generator=generator).topk(top_k)
    weights = scores / scores.sum(-1, keepdim=True)
    device = weight.device if device is None else device
    return (
        hidden_states.to(device, weight.dtype),
        index.to(device),
        weights.to(device, weight.dtype),
    )


def tolerance(module: Any) -> float:
    """Of the largest difference over the largest value.

    Three roundings to the weights' dtype on the way (both projections and the weighting), seen at the largest of many
    values; and float32 sums as long as the larger side of a weight, whose error grows with the root of their length.
    """
    weight = module._parameters["down_proj"]
    longest = max(weight.shape[1:])
    return 8 * torch.finfo(weight.dtype).eps + 4 * torch.finfo(torch.float32).eps * longest**0.5


def probe(module: Any, kernel: Kernel) -> str | None:
    """Run kernel and original on the CPU on four experts of the layer; None, or in what they differ.

    Once per class and setting: it guards against experts that compute something else under the usual names, such as
    a gate of their own.
    """
    own = module.__dict__.get("_apply_gate")  # of this instance, which says nothing about others
    key = (type(module), kernel.module, getattr(module, "act_fn", None).__class__, own, _flags(module))
    if key not in _PROBED:
        _PROBED[key] = _difference(_few_experts(module), kernel)
    return _PROBED[key]


def _flags(module: Any) -> tuple:
    names = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
    weight = module._parameters["down_proj"]
    return (*(getattr(module, name, None) for name in names), weight.dtype, tuple(weight.shape[1:]))


def _few_experts(module: Any) -> Any:
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    few = min(4, module._parameters["down_proj"].shape[0])
    # An empty layer has weights of zero, or whatever the memory held: such experts would agree with anything.
    generator = torch.Generator(device="cpu").manual_seed(1)
    with torch.device("cpu"):
        twin.__dict__["_parameters"] = {
            name: None
            if weight is None
            else (torch.randn(few, *weight.shape[1:], generator=generator) * weight.shape[-1] ** -0.5).to(weight.dtype)
            for name, weight in module._parameters.items()
        }
    twin.__dict__["num_experts"] = few
    return twin


def _difference(twin: Any, kernel: Kernel) -> str | None:
    inputs = example_inputs(twin, tokens=5)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            wanted = type(twin).forward.__wrapped__(twin, *inputs).float()
            came = kernel.module.experts_forward(twin, *inputs).float()
    except Exception as error:
        first = str(error).split("\n", 1)[0][:160]
        return f"the kernel cannot run it: {type(error).__name__}: {first}"
    if came.shape != wanted.shape:
        return f"the kernel's result has shape {tuple(came.shape)}, the original's {tuple(wanted.shape)}"
    error = ((came - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()
    if not error <= 4 * tolerance(twin):  # also when it is NaN
        return f"it computes something else than the kernel: relative error {error:.1e}"
    return None


def switch(model: nn.Module, chosen: list[Any], others: list[nn.Module], kernel: Kernel, name: str) -> None:
    """Let the experts in `chosen` run the implementation `name`; those in `others` keep what they have."""
    copies: dict[int, object] = {}  # id of a config -> its copy, shared by deepcopy for configs within configs
    for experts in chosen:
        copy.deepcopy(experts.config, copies)
    roots = _outermost_models(model, chosen)
    for root in roots:
        copy.deepcopy(root.config, copies)
    kept = set(map(id, others))
    for module in model.modules():
        if id(module) not in kept:
            _exchange_configs(module, copies)
    for root in roots:
        root.set_experts_implementation(name)
    for experts in chosen:
        # Transformers' setter passes over models whose source it cannot read.
        setattr(experts.config, _SETTING, name)
        record = experts.__dict__[state.RECORD]
        record.kernel, record.layer, record.implementation = kernel, LAYER, name


def _outermost_models(model: nn.Module, chosen: list[Any]) -> list[Any]:
    from transformers import PreTrainedModel

    found: list[Any] = []
    inside: set[int] = set()
    wanted = set(map(id, chosen))
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            parts = set(map(id, module.modules()))
            inside |= parts
            if parts & wanted:
                found.append(module)
    return found


def _exchange_configs(module: Any, copies: dict[int, object]) -> None:
    from transformers import PreTrainedConfig

    for name, value in list(module.__dict__.items()):
        if isinstance(value, PreTrainedConfig) and id(value) in copies:
            state.exchange_value(module, name, copies[id(value)])


def restore_configs(modules: list[nn.Module]) -> None:
    """Put the old configs back; where the user has changed the copy meanwhile, keep it and undo the setting only."""
    as_before: dict[int, bool] = {}
    for module in modules:
        record = state.record_of(module)
        if record is None:
            continue
        for name, old in record.old_values.items():
            now = module.__dict__.get(name)
            if now is not record.new_values[name]:
                continue  # somebody has put another config there
            if id(now) not in as_before:
                scratch = copy.deepcopy(now)
                _copy_setting(old, scratch)
                as_before[id(now)] = _same(scratch, old)
            if as_before[id(now)]:
                module.__dict__[name] = old
            else:
                _copy_setting(old, now)


def _same(one: Any, other: Any) -> bool:
    """Whether two configs hold the same. Their own == reads every field, which some configs refuse."""
    if not hasattr(one, "sub_configs") or type(one) is not type(other):
        return bool(one == other)
    left, right = vars(one), vars(other)
    return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)


def _copy_setting(old: object, now: object) -> None:
    for setting in (_SETTING, "_attn_implementation_internal"):
        if hasattr(old, setting):
            setattr(now, setting, getattr(old, setting))
    for key in getattr(old, "sub_configs", ()):
        inner_old, inner_now = getattr(old, key, None), getattr(now, key, None)
        if inner_old is not None and inner_now is not None:
            _copy_setting(inner_old, inner_now)
