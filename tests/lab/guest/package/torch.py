"""As much of PyTorch as SGLang's loader of kernel configs asks for.

It has no installed distribution, so `transformers` takes it for absent, as it should.
"""

import os

__version__ = "2.9.1+cu130"
NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
"""As the nvidia-smi stand-in says."""


class dtype:  # noqa: N801 - PyTorch's name
    """A type of numbers; there is one object of each."""

    def __init__(self, name: str) -> None:
        """Names it."""
        self._name = name

    def __repr__(self) -> str:
        return f"torch.{self._name}"


bfloat16 = dtype("bfloat16")
float16 = half = dtype("float16")
float32 = float = dtype("float32")  # noqa: A001 - PyTorch's name


class cuda:  # noqa: N801 - PyTorch's name
    """The GPUs."""

    @staticmethod
    def is_available() -> bool:
        """Whether one is to be seen."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")

    @staticmethod
    def get_device_name(device: int | None = None) -> str:
        """All have the same."""
        del device
        return NAME
