"""A Diffusers pipeline is no module; its components are. Here they become the children of one."""

from __future__ import annotations

from typing import Any

from torch import nn


class Pipeline(nn.Module):
    """Paths of layers begin with the component's name, as in pipe.transformer; a call runs the pipeline."""

    pipe: Any

    def __init__(self, pipe: Any, components: dict[str, Any]):
        super().__init__()
        self.__dict__["pipe"] = pipe
        for name, component in components.items():
            if isinstance(component, nn.Module):
                self.add_module(name, component)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.pipe(*args, **kwargs)


def as_module(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        raise TypeError(
            f"kernelize: model must be a torch.nn.Module or a Diffusers pipeline; got a {type(model).__name__}."
        )
    return Pipeline(model, components)


def name_of(model: nn.Module) -> str:
    return type(model.pipe if isinstance(model, Pipeline) else model).__name__
