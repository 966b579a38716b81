"""Named networks: a staged classifier on the engine, a U-Net, a registry, and the zoo of the paper's tables.

    net = revode.create_model("hamiltonian-74", num_classes=10)

What other rooms may rely on:

- ``net.config``: a frozen dataclass (`NetworkConfig` or `UNetConfig`) with ``to_dict``, ``from_dict``, ``with_options``;
  ``build(config)`` makes the network again.
- ``net.num_layers``, as the paper counts.
- ``net.sequences()``: the `ReversibleSequence` of every unit with its ``name`` and ``num_blocks``; none for a ResNet.
- ``net.units()``: the branches (``fields``, ``fields_per_block``) and step size ``h`` of every unit as the paper counts them.
- ``net.stem``, ``net.stages`` (each with ``body`` and ``transition``), ``net.head``; ``net.features(x)`` is what the head
  sees; with ``transition="squeeze"`` it is the last pair, of which the head sees ``net.readout``.
- ``net.inverse(features)``, of networks with ``transition="squeeze"`` and of U-Nets.
- ``refine(net, name)``, ``coarsen(net, name)``: the network at another depth; ``Resampling`` maps momenta and averages too.
- ``describe(net)``: shapes, parameters, FLOPs and bytes kept for backward, stage by stage.
"""

from revode.networks.classifier import InvertibleClassifier as InvertibleClassifier
from revode.networks.classifier import Stage as Stage
from revode.networks.classifier import StagedClassifier as StagedClassifier
from revode.networks.classifier import build as build
from revode.networks.config import NetworkConfig as NetworkConfig
from revode.networks.cost import Description as Description
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
