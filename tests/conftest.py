"""What every test has: one seed, no network for model hubs, few threads."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import hypothesis
import pytest
import torch

# Sizes are small: time is spent per call, and an example that was slow once is no failure.
hypothesis.settings.register_profile("kimi-graph", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("kimi-graph")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
