"""The embedded digits: 1,797 handwritten digits of 8x8 pixels (UCI, CC BY 4.0; see digits.txt beside this file)."""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch

from revode.data.splits import Split, hold_out

TEST_IMAGES = 360
"""Images of the test split, a fifth of all."""

SPLIT_SEED = 0
"""The seed of the one fixed split; another seed would be another data set."""


def read_digits() -> tuple[Split, Split]:
    """The training split (1,437 images) and the test split (360), stratified and always the same.

    The source has no split of its own: scikit-learn's copy, from which these come, is UCI's test part. Counts 0..16 are
    mapped to 0..255.
    """
    with resources.files("revode.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"].astype(np.int64))
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    pixels = (images * 255 // 16).to(torch.uint8)
    return hold_out(Split(images=pixels.unsqueeze(1), labels=labels), TEST_IMAGES, SPLIT_SEED)
