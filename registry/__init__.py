"""Kernel repos: build, publish, resolve, fetch, verify, lock, load, serve.

paths.py, source.py        where kernels lie; reading a kernel's source folder
static_check.py, api.py    rules for published Python; the public API, read without running it
build.py, card.py          sources -> the files of a Hub repo
manifest.py, record.py     hub_manifests/: what each version promised, which builds are ours
publish.py                 the files -> the Hub
hub.py, trust.py, load.py  Hub or cache -> verified -> loaded
local.py, importer.py      builds from sources on this machine; importing verified files
digests.py, verify.py, lock.py, describe.py
server/                    a Hub on loopback, for tests and air-gapped machines
"""

from pallas_hub.registry.load import (
    LoadedFrom,
    get_kernel,
    has_kernel,
    list_kernels,
    load_source,
    loaded_from,
)

__all__ = ["LoadedFrom", "get_kernel", "has_kernel", "list_kernels", "load_source", "loaded_from"]
