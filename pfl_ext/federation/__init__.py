"""The federation: what a method is, what a client and the server see, the round loop, checkpoints."""

from pfl_ext.options import Options, option

from .checkpoint import DamagedCheckpoint, ForeignCheckpoint
from .client import Batch, Client
from .clock import PROTOCOLS, Clock, Device, Span, Timeline, clock_of
from .distillation import Distillation
from .engine import Engine, InProcess
from .evaluation import ClientResult
from .features import Features
from .federation import Federation, Record
from .interruption import Interrupted
from .messages import Diverged, Reply, Request, Stage, Work
from .method import Method, Models, Predictor
from .model import Part, WorkingModel
from .plan import Plan
from .rounds import selected_clients
from .runtime import ClientRuntime, state_of, threads
from .server import Server
from .settings import Settings
from .side_module import SideModule
from .steps import Loss, Steps, fine_tune, local_length, mean_loss, sam
from .store import ClientStore, label_of
from .streams import seed_of, stream
from .uploads import Here, Uploads, outputs_of

__all__ = [
    "PROTOCOLS",
    "Batch",
    "Client",
    "ClientResult",
    "ClientRuntime",
    "ClientStore",
    "Clock",
    "DamagedCheckpoint",
    "Device",
    "Distillation",
    "Diverged",
    "Engine",
    "Features",
    "Federation",
    "ForeignCheckpoint",
    "Here",
    "InProcess",
    "Interrupted",
    "Loss",
    "Method",
    "Models",
    "Options",
    "Part",
    "Plan",
    "Predictor",
    "Record",
    "Reply",
    "Request",
    "Server",
    "Settings",
    "SideModule",
    "Span",
    "Stage",
    "Steps",
    "Timeline",
    "Uploads",
    "Work",
    "WorkingModel",
    "clock_of",
    "fine_tune",
    "label_of",
    "local_length",
    "mean_loss",
    "option",
    "outputs_of",
    "sam",
    "seed_of",
    "selected_clients",
    "state_of",
    "stream",
    "threads",
]
