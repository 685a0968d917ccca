"""Clients' state, client sampling, the round loop, checkpoints."""

from .checkpoint import DamagedCheckpoint, ForeignCheckpoint
from .client import Batch, Client, classification_loss
from .clock import PROTOCOLS, Clock, Device, Span, Timeline, Work
from .federation import Federation, Interrupted, Settings, selected_clients
from .method import Method, Uploads, option
from .model import WorkingModel, joined
from .server import Server
from .store import ClientStore
from .streams import seed_of, stream
from .training import fine_tune, local_length, local_sgd, loss_and_gradients
from .turns import Buffers, Diverged

__all__ = [
    "PROTOCOLS",
    "Batch",
    "Buffers",
    "Client",
    "ClientStore",
    "Clock",
    "DamagedCheckpoint",
    "Device",
    "Diverged",
    "Federation",
    "ForeignCheckpoint",
    "Interrupted",
    "Method",
    "Server",
    "Settings",
    "Span",
    "Timeline",
    "Uploads",
    "Work",
    "WorkingModel",
    "classification_loss",
    "fine_tune",
    "joined",
    "local_length",
    "local_sgd",
    "loss_and_gradients",
    "option",
    "seed_of",
    "selected_clients",
    "stream",
]
