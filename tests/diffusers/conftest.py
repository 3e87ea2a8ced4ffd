"""Kernels from this source tree behind the public names, and a table of backends as after importing Diffusers."""

import importlib

import pytest
import torch

from pallas_hub.layers import diffusers_backend, use_loader


def load(repo_id, version=None):
    return importlib.import_module(repo_id.split("/")[1].replace("-", "_"))


@pytest.fixture
def loads():
    """Repo ids, in the order they are loaded."""
    return []


@pytest.fixture(autouse=True)
def fresh_backend(monkeypatch, loads):
    """Nothing is loaded for "pallas" yet, and the backend that all models share is torch's own, before and after."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    def loader(repo_id, version):
        loads.append(repo_id)
        return load(repo_id)

    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)
    monkeypatch.setattr(diffusers_backend, "_KERNELS", {})
    diffusers_backend.register()
    with use_loader(loader):
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Threads that wait for each other cost more than these small products take, tenfold on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def quiet():
    """Diffusers warns at every call of set_attention_backend that it is experimental."""
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.fixture
def ran():
    """The ops of the flash-attention kernel that ran, as (op, path); while somebody watches, every call is an op."""
    with load("pallas-hub/flash-attention")._bridge.record_paths() as ran:
        yield ran
