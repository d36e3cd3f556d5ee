"""What SGLang's loader of kernel configs asks about the device."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest.package import torch
else:
    import torch


def is_hip() -> bool:
    """Whether the GPUs are AMD's."""
    return False


def get_device_name(device_id: int = 0) -> str | None:
    """The GPU's name; none where there is no GPU."""
    return torch.cuda.get_device_name(device_id) if torch.cuda.is_available() else None
