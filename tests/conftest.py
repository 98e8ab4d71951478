"""What every test runs under: no network, and one thread, since the models are tiny."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M as a TransformerBridge, shared by the tests that only read it."""
    import ropelens as rl

    return rl.load("smollm2-135m")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
