"""Data sets as uint8 tensors in memory: CIFAR-10, CIFAR-100, STL-10 and the embedded digits.

    data = revode.data.load("digits")
    for indices in revode.data.batches(len(data.train), 100, seed=0, epoch=0):
        batch = data.train.take(indices)
        x = revode.data.augment(batch.images, indices, data, seed=0, epoch=0)

Order and augmentation are pure functions of (seed, epoch, index): the same for any number of processes, any cut into
batches, and after a resume in mid-epoch.
"""

from revode.data.acquisition import SOURCES, check, get
from revode.data.augmentation import augment, draw, standardise
from revode.data.catalogue import INFOS, DatasetInfo, describe
from revode.data.download import DownloadError
from revode.data.layouts import data_root
from revode.data.loading import load
from revode.data.sampling import batches, evaluation_batches, num_batches
from revode.data.splits import Dataset, Split, hold_out, subset

__all__ = [
    "INFOS",
    "SOURCES",
    "Dataset",
    "DatasetInfo",
    "DownloadError",
    "Split",
    "augment",
    "batches",
    "check",
    "data_root",
    "describe",
    "draw",
    "evaluation_batches",
    "get",
    "hold_out",
    "load",
    "num_batches",
    "standardise",
    "subset",
]
