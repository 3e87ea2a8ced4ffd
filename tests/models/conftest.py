"""One built model at a time, shared by all tests of it; kernels from this source tree behind the public names."""

import pytest
import torch
from built_models import NOT_BUILT, build
from default_kernels import load
from moe_models import cases

from pallas_hub.layers import interface, use_loader


@pytest.fixture(scope="module", autouse=True)
def kernels_from_source():
    """ "pallas" and kernelize() run what is in kernels/, as a new build of it would."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    with pytest.MonkeyPatch.context() as patch, use_loader(load):
        patch.setattr(interface, "_DEFAULT", [])
        patch.delitem(ALL_EXPERTS_FUNCTIONS._global_mapping, interface.NAME, raising=False)
        interface.register()
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other cost more than these small products take, tenfold on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=cases(), ids=str)
def built(request, kernels_from_source, one_thread):
    if str(request.param) in NOT_BUILT:
        pytest.skip(f"cannot be built: {NOT_BUILT[str(request.param)]}")
    return build(request.param)
