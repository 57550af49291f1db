"""The user's declaration: its schema, how it becomes typed objects, and what it must satisfy.

Holds no values (they lie in ``conf/``) and starts nothing. Past ``load`` there is no Hydra tree any more.
"""

from dejavu.config.cluster import ClusterConfig, Device, LauncherKind
from dejavu.config.fault import FaultConfig
from dejavu.config.loading import load, register_schema
from dejavu.config.paths import check_paths
from dejavu.config.planning import ProfileConfig, ProfileKind, ProfilingConfig, ShapeConfig
from dejavu.config.rehearsal import Compute
from dejavu.config.schema import (
    MODEL_KINDS,
    SHAPE_KINDS,
    BadLines,
    ComparisonConfig,
    Config,
    Dtype,
    Figure,
    MeasurementConfig,
    ModelConfig,
    RecoveryCase,
    RecoveryFigure,
    StoreConfig,
    StoreKind,
    TransportConfig,
    TransportKind,
    WorkflowName,
    WorkloadConfig,
    WorkloadKind,
)
from dejavu.config.strategy import Recovery, Scheduling, StrategyConfig, StrategyMode
from dejavu.config.validation import validate

__all__ = [
    "MODEL_KINDS",
    "SHAPE_KINDS",
    "BadLines",
    "ClusterConfig",
    "ComparisonConfig",
    "Compute",
    "Config",
    "Device",
    "Dtype",
    "FaultConfig",
    "Figure",
    "LauncherKind",
    "MeasurementConfig",
    "ModelConfig",
    "ProfileConfig",
    "ProfileKind",
    "ProfilingConfig",
    "Recovery",
    "RecoveryCase",
    "RecoveryFigure",
    "Scheduling",
    "ShapeConfig",
    "StoreConfig",
    "StoreKind",
    "StrategyConfig",
    "StrategyMode",
    "TransportConfig",
    "TransportKind",
    "WorkflowName",
    "WorkloadConfig",
    "WorkloadKind",
    "check_paths",
    "load",
    "register_schema",
    "validate",
]
