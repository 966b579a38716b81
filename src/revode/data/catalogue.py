"""What is known about each data set before a single image is read: shape, classes, statistics, augmentation."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
_STL10_CLASSES = "airplane bird car cat deer dog horse monkey ship truck".split()
_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
""".split()


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The facts of a data set that need no file.

    Attributes:
        name: The name on the command line.
        class_names: One name per class, in the order of the labels.
        channels: Channels of an image.
        image_size: Height and width of an image.
        mean: Mean of each channel over the training split, pixels scaled to [0, 1].
        std: Standard deviation of each channel, likewise.
        pad: Width of the zero border from which augmentation draws its crops.
        flip: Whether augmentation mirrors images; a mirrored digit is another sign, so the digits are not flipped.
    """

    name: str
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    flip: bool

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)


INFOS = {
    info.name: info
    for info in (
        DatasetInfo(
            name="digits",
            class_names=tuple("0123456789"),
            channels=1,
            image_size=8,
            mean=(0.30425,),
            std=(0.37594,),
            pad=1,
            flip=False,
        ),
        DatasetInfo(
            name="cifar10",
            class_names=tuple(_CIFAR10_CLASSES),
            channels=3,
            image_size=32,
            mean=(0.49140, 0.48216, 0.44653),
            std=(0.24703, 0.24349, 0.26159),
            pad=4,
            flip=True,
        ),
        DatasetInfo(
            name="cifar100",
            class_names=tuple(_CIFAR100_CLASSES),
            channels=3,
            image_size=32,
            mean=(0.50708, 0.48655, 0.44092),
            std=(0.26733, 0.25644, 0.27615),
            pad=4,
            flip=True,
        ),
        DatasetInfo(
            name="stl10",
            class_names=tuple(_STL10_CLASSES),
            channels=3,
            image_size=96,
            mean=(0.44671, 0.43981, 0.40665),
            std=(0.26034, 0.25658, 0.27127),
            pad=12,
            flip=True,
        ),
    )
}
"""Name -> facts. Means and deviations are those of the training split, rounded to five digits."""


def describe(name: str) -> DatasetInfo:
    """The facts of the data set called `name`; an unknown name lists the choices and the nearest one."""
    if name in INFOS:
        return INFOS[name]
    near = difflib.get_close_matches(name, INFOS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(INFOS)}{hint}")
