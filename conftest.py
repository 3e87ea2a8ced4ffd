"""Set the environment before torch and JAX are first imported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# torch would load torch_tpu on import, which looks for TPU hardware.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# No test may reach a real Hub: the server of this project is used, or none.
os.environ.setdefault("HF_ENDPOINT", "http://127.0.0.1:9")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
