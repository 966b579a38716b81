"""Named networks: a staged classifier on the engine, U-Nets, a GPT, a registry, and the zoo of the paper's tables.

    net = revode.create_model("hamiltonian-74", num_classes=10)

Every network has a ``config`` (``build(net.config)`` makes it again), ``num_layers`` as the paper counts, ``sequences()`` of
`ReversibleSequence`, ``units()`` of branches as the paper counts them, and ``features(x)``, the head's input. With
``transition="squeeze"`` the features are the last pair, and ``inverse(features)`` is the image; a U-Net has an inverse, too.
"""

from revode.networks.classifier import InvertibleClassifier as InvertibleClassifier
from revode.networks.classifier import Stage as Stage
from revode.networks.classifier import StagedClassifier as StagedClassifier
from revode.networks.classifier import build as build
from revode.networks.config import NetworkConfig as NetworkConfig
from revode.networks.cost import Description as Description
from revode.networks.cost import step_bytes as step_bytes
from revode.networks.families import FAMILIES as FAMILIES
from revode.networks.families import Family as Family
from revode.networks.families import register_family as register_family
from revode.networks.files import load as load
from revode.networks.files import load_pretrained as load_pretrained
from revode.networks.files import save as save
from revode.networks.planned import PlannedUNet as PlannedUNet
from revode.networks.refinement import Resampling as Resampling
from revode.networks.refinement import coarsen as coarsen
from revode.networks.refinement import config_at_depth as config_at_depth
from revode.networks.refinement import refine as refine
from revode.networks.transformer import GPT as GPT
from revode.networks.transformer import GPTConfig as GPTConfig
from revode.networks.transformer import on_tokens as on_tokens
from revode.networks.unet import UNet as UNet
from revode.networks.unet import UNetConfig as UNetConfig
from revode.networks.zoo import PAPER_PARAMETERS as PAPER_PARAMETERS
from revode.networks.zoo import create_model as create_model
from revode.networks.zoo import describe as describe
from revode.networks.zoo import list_models as list_models
from revode.networks.zoo import model_config as model_config
from revode.networks.zoo import register_model as register_model
from revode.networks.zoo import summarize_all as summarize_all
