"""`Window`: a box of tensor memory, with the axes that the checkpoint gives it.

A pass may permute, merge and part axes. Both sides then have a common refined shape (see
`shardplan.planning.geometry.parts`), in which each is a strided view of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from shardplan.planning.geometry import Axes, cut, parts, permuted

from .optional import torch
from .tensors import Bytes, as_elements, box_view, copy_elements

__all__ = ["Window"]

Sizes = tuple[int, ...]


@attrs.frozen(eq=False)
class Window:
    """A box of tensor memory, with the axes that the checkpoint gives it.

    >>> window = Window(torch.arange(6).reshape(2, 3), (3, 2), Axes((2, 3), (1, 0)))
    >>> window.tensor
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """

    memory: torch.Tensor  # the box, with the axes of the state dict's tensor
    sizes: Sizes  # its sizes in the checkpoint
    # How the axes of the memory become those of the checkpoint; None if they are the same.
    axes: Axes | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Window:
        """Return a whole tensor, as it is."""
        return cls(tensor, tuple(tensor.shape))

    @property
    def tensor(self) -> torch.Tensor | None:
        """The elements as a view of the memory in `sizes`; None if strides cannot say where."""
        if self.axes is None:
            return self.memory
        try:
            return _refined(self.memory, self.sizes, self.axes).view(self.sizes)
        except RuntimeError:
            return None

    def permuted(self, order: Sequence[int]) -> Window:
        """Put the axes of the checkpoint into another order."""
        axes = permuted(self.axes, tuple(self.memory.shape), self.sizes, order)
        return Window(self.memory, tuple(self.sizes[axis] for axis in order), axes)

    def box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
        """Return a box as one view of the memory; None if there is none."""
        return None if self.tensor is None else box_view(self.tensor, offsets, sizes)

    def contents(self) -> torch.Tensor:
        """Return all elements in `sizes`: a view of the memory, or a copy if there is none."""
        if self.tensor is not None:
            return self.tensor
        copied = self.memory.new_empty(self.sizes)
        for mine, theirs in self.pairs((0,) * len(self.sizes), self.sizes, copied):
            copy_elements(theirs, mine)
        return copied

    def pairs(
        self, offsets: Sequence[int], sizes: Sequence[int], other: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of a box, and of another tensor of the box's sizes, with equal elements.

        Each pair has one shape. Surplus axes of the box are ignored.
        """
        whole = self.box(offsets, sizes)
        if whole is not None:
            yield whole, other
            return
        count = len(self.sizes)
        low, size = tuple(offsets[:count]), tuple(sizes[:count])
        for part in cut(self.axes, tuple(self.memory.shape), self.sizes, low, size):
            box = box_view(self.memory, part.box_offsets, part.box_sizes)
            mine = box if part.axes is None else _refined(box, part.chunk_sizes, part.axes)
            inner = [at - start for at, start in zip(part.chunk_offsets, low, strict=True)]
            yield mine, box_view(other, inner, part.chunk_sizes).view(mine.shape)

    def fill(
        self,
        offsets: Sequence[int],
        sizes: Sequence[int],
        data: Bytes,
        dtype: str,
        strides: Sequence[int] | None = None,
    ) -> None:
        """Fill a box from bytes that hold elements of ``dtype``, casting them."""
        if data.size:
            source = as_elements(data, dtype, sizes[: len(self.sizes)], strides, like=self.memory)
            for mine, theirs in self.pairs(offsets, sizes, source):
                copy_elements(mine, theirs)

    def fill_all(self, data: Bytes, dtype: str) -> None:
        """Fill all of it from bytes that hold elements of ``dtype``, casting them."""
        self.fill((0,) * len(self.sizes), self.sizes, data, dtype)


def _refined(memory: torch.Tensor, sizes: Sizes, axes: Axes) -> torch.Tensor:
    """Return the memory in the parts of both sides, in the order of the checkpoint."""
    both = parts(axes, tuple(memory.shape), sizes)
    return memory.view(both.split).permute(both.order)
