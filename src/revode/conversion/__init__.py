"""Residual blocks of a user's model made reversible."""

from revode.conversion.blocks import blocks_of as blocks_of
from revode.conversion.blocks import lists_like_the_longest as lists_like_the_longest
from revode.conversion.models import conversions_in as conversions_in
from revode.conversion.models import convert as convert
from revode.conversion.models import revert as revert
