"""Data sets as uint8 tensors in memory: CIFAR-10, CIFAR-100, STL-10 and the embedded digits.

    data = revode_lab.data.load("digits")
    for indices in revode_lab.data.batches(len(data.train), 100, seed=0, epoch=0):
        batch = data.train.take(indices)
        x = revode_lab.data.augment(batch.images, indices, data, seed=0, epoch=0)

Order and augmentation are pure functions of (seed, epoch, index): the same for any number of processes, any cut into
batches, and after a resume in mid-epoch.
"""

from revode_lab.data.batches import augment, batches, draw, evaluation_batches, num_batches, resample, standardise
from revode_lab.data.catalogue import INFOS, DatasetInfo, data_root, describe, full_name, own_images
from revode_lab.data.fetch import SOURCES, DownloadError, check, get
from revode_lab.data.sets import Dataset, Split, hold_out, load, subset

__all__ = [
    "INFOS", "SOURCES", "Dataset", "DatasetInfo", "DownloadError", "Split", "augment", "batches", "check", "data_root",
    "describe", "draw", "evaluation_batches", "full_name", "get", "hold_out", "load", "num_batches", "own_images",
    "resample", "standardise", "subset",
]  # fmt: skip
