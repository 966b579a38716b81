"""Named networks: a staged classifier on the engine, a registry, and the zoo of the paper's tables."""

from revode.networks.classifier import InvertibleClassifier as InvertibleClassifier
from revode.networks.classifier import StagedClassifier as StagedClassifier
from revode.networks.classifier import build as build
from revode.networks.config import NetworkConfig as NetworkConfig
from revode.networks.config import OdeConfig as OdeConfig
from revode.networks.config import ResNetConfig as ResNetConfig
from revode.networks.config import ReversibleConfig as ReversibleConfig
from revode.networks.config import RevNetConfig as RevNetConfig
from revode.networks.registry import create_model as create_model
from revode.networks.registry import list_models as list_models
from revode.networks.registry import model_config as model_config
from revode.networks.registry import register_family as register_family
from revode.networks.registry import register_model as register_model
