"""Fill a kernel's CARD.md template, which becomes the README.md of its repo."""

import re

from pallas_hub.registry.api import Api
from pallas_hub.registry.errors import BuildRefused
from pallas_hub.registry.source import KernelSource

_PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")

_DEFAULT = """---
library_name: kernels
license: {{ license }}
tags:
- kernel
---

# {{ name }}

```python
import pallas_hub

kernel = pallas_hub.get_kernel("{{ repo_id }}", version={{ version }})
```

## Functions

{{ functions }}

## Layers

{{ layers }}

Variants: {{ variants }}.
"""


def fill_card(source: KernelSource, api: Api, digests: dict[str, str]) -> str:
    """README.md of version `source.version`; a place that nothing fills is an error, never left in the text."""
    path = source.folder / "CARD.md"
    template = path.read_text(encoding="utf-8") if path.is_file() else _DEFAULT
    values = {
        "name": source.name,
        "kernel_name": source.name,
        "python_name": source.python_name,
        "repo_id": source.repo_id,
        "version": str(source.version),
        "license": source.license,
        "backends": ", ".join(source.backends),
        "variants": ", ".join(f"`{variant}`" for variant in source.variants),
        "functions": _list({name: text for name, text in api.names.items() if text.startswith("(")}),
        "layers": _list({name: facts["forward"] for name, facts in api.layers.items()}),
        "digests": _list({variant: f" {digest}" for variant, digest in digests.items()}),
        "upstream": source.upstream or "none",
    }

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise BuildRefused(
                f"{source.name}: CARD.md has {match[0]}, which nothing fills. Known: {', '.join(sorted(values))}."
            )
        return values[match[1]]

    return _PLACE.sub(value, template).replace("\r\n", "\n")


def _list(entries: dict[str, str]) -> str:
    return "\n".join(f"- `{name}{text}`" for name, text in sorted(entries.items())) or "none"
