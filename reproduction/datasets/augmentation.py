"""Random flips and shifts of training images."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from reproduction.datasets.sets import Part


class AugmentedImages(Dataset):
    """Training images that are flipped and shifted each time they are read.

    Random numbers come from torch's global CPU generator, which ``fit`` seeds and saves in its
    checkpoints, so that an interrupted run continues bit for bit.

    Args:
        part: Images ``(sample, channel, height, width)`` and their classes.
        shift: Largest shift in pixels; borders are filled with zeros.

    Example:
        >>> images = AugmentedImages(Part(torch.rand(4, 3, 8, 8), torch.arange(4)), shift=2)
        >>> [image.shape for image, _ in images.__getitems__([0, 3])]
        [torch.Size([3, 8, 8]), torch.Size([3, 8, 8])]
    """

    def __init__(self, part: Part, shift: int):
        self.part = part
        self.shift = shift

    def __len__(self) -> int:
        return len(self.part.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return samples; all of a batch are changed together."""
        inputs, targets = self.part
        rows = torch.tensor(indices, device=targets.device)
        images = flip_and_shift(inputs[rows], self.shift)
        return list(zip(images, targets[rows], strict=True))


def flip_and_shift(images: Tensor, shift: int) -> Tensor:
    """Flip images horizontally with probability 1/2, and shift them.

    Args:
        images: Images ``(batch, channel, height, width)``.
        shift: Largest shift in pixels, in both directions; zeros fill the border.

    Returns:
        Images of the same shape.
    """
    count, channels, height, width = images.shape
    # Drawn on the CPU: results do not depend on the device.
    offsets = torch.randint(2 * shift + 1, (2, count, 1))
    is_flipped = torch.rand(count, 1) < 0.5
    rows = offsets[0] + torch.arange(height)
    columns = offsets[1] + torch.arange(width)
    columns = torch.where(is_flipped, columns.flip(1), columns)
    padded = F.pad(images, (shift, shift, shift, shift))
    sample_index = torch.arange(count).view(-1, 1, 1, 1)
    channel_index = torch.arange(channels).view(1, -1, 1, 1)
    return padded[sample_index, channel_index, rows[:, None, :, None], columns[:, None, None, :]]
