"""The shape of the group ``cluster``: the machines and their workers. See ``schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Device(Enum):
    """Where a stage computes."""

    cpu = "cpu"
    cuda = "cuda"


class LauncherKind(Enum):
    """Who starts workers: this run, as processes of this machine; or somebody else, and they join."""

    process = "process"
    none = "none"
    ray = "ray"
    """This run, on the nodes of a Ray cluster that runs already."""


@dataclass(kw_only=True)
class ClusterConfig:
    """The machines and their workers."""

    name: str = "dejavu"
    host: str = "127.0.0.1"
    """IPv4 address, host name, or interface, that the controller and the workers that it starts publish; UCX listens on
    every interface."""
    launcher: LauncherKind = LauncherKind.process
    ray_address: str = "auto"
    """Of the Ray cluster; ``auto``: this node's, or the environment's RAY_ADDRESS."""
    secret: str | None = field(default=None, repr=False)
    """What a worker that is started elsewhere proves itself with; None: the environment's DEJAVU_CLUSTER_SECRET, or one
    that only the workers of this run know."""
    num_workers: int | None = None
    """None: as many as the strategy needs."""
    threads_per_worker: int = 1
    device: Device = Device.cpu
    device_memory_gb: float | None = None
    """Memory of one device, which a worker has, in GB (10^9 bytes); None: no limit is checked."""
    host_memory_gb: float | None = None
    """Memory of one worker's host for KV that is swapped, in GB (10^9 bytes); None: no limit is checked."""
    lease_ttl_s: int = 5
    """A worker that is frozen for longer counts as dead."""
    start_timeout_s: float = 300.0
    """Until every worker must be ready."""
    num_machines: int | None = None
    """Machines to plan for, all alike; None: ``num_workers``, or one for each worker of the strategy."""
    devices_per_machine: int = 1
    """A machine's devices hold a stage together; ``device_memory_gb`` is each one's."""
    link_gbps: float | None = None
    """Between two machines, in Gbit/s; None: unknown, and a plan takes it for fast enough."""
    pcie_gbps: float | None = None
    """Between the host and the devices of a machine, in Gbit/s; None: what the measured profile says, if it does;
    where it is unknown, the planner does not swap of its own accord."""
    price_per_hour: float | None = None
    """Of one machine; None: unknown."""
