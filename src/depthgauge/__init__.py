"""depthgauge: measure, certify and remove the depth of attention networks that does no useful work.

The public names are imported on first use, so that `import depthgauge` and `depthgauge --help` stay fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthgauge._version import __version__ as __version__

if TYPE_CHECKING:
    from depthgauge.certificates.certificate import Certificate as Certificate
    from depthgauge.certificates.certificate import certify as certify
    from depthgauge.checkpoints.registered_attention import register_attention as register_attention
    from depthgauge.depth.effective import Depth as Depth
    from depthgauge.depth.effective import effective_depth as effective_depth
    from depthgauge.depth.methods import collapse as collapse
    from depthgauge.errors import DepthgaugeError as DepthgaugeError
    from depthgauge.errors import InputError as InputError
    from depthgauge.fast_attention.attention import attention as attention
    from depthgauge.fast_attention.attention import attention_plan as attention_plan
    from depthgauge.ledger.registry import claims as claims
    from depthgauge.measures.profile import Profile as Profile
    from depthgauge.measures.profile import measure as measure
    from depthgauge.network.files import load_network as load_network
    from depthgauge.network.files import save_network as save_network
    from depthgauge.network.network import SelfAttentionNetwork as SelfAttentionNetwork
    from depthgauge.network.random_networks import random_network as random_network
    from depthgauge.report.write import write_report as write_report
    from depthgauge.results.gauge_options import GaugeOptions as GaugeOptions
    from depthgauge.results.monitor_options import AlarmThresholds as AlarmThresholds
    from depthgauge.results.monitor_options import MonitorOptions as MonitorOptions
    from depthgauge.results.monitor_record import Alarm as Alarm
    from depthgauge.results.monitor_record import MonitorRecord as MonitorRecord
    from depthgauge.results.monitor_record import Probe as Probe
    from depthgauge.results.monitor_record import read_log as read_log
    from depthgauge.results.shrink_options import ShrinkOptions as ShrinkOptions
    from depthgauge.results.shrink_record import PlanRecord as PlanRecord
    from depthgauge.results.shrink_record import ShrinkRecord as ShrinkRecord
    from depthgauge.separation.probability import separate as separate
    from depthgauge.training.bounded_training import TrainedModel as TrainedModel
    from depthgauge.training.bounded_training import TrainingOptions as TrainingOptions
    from depthgauge.training.bounded_training import train_bounded as train_bounded
    from depthgauge.training.monitor.actions import AlarmError as AlarmError
    from depthgauge.training.monitor.callback import MonitorCallback as MonitorCallback
    from depthgauge.training.monitor.monitor import Monitor as Monitor
    from depthgauge.training.output_bound import OutputBound as OutputBound
    from depthgauge.training.output_bound import output_bound as output_bound
    from depthgauge.workflows.gauge import GaugeResult as GaugeResult
    from depthgauge.workflows.gauge import gauge as gauge
    from depthgauge.workflows.gauge import load_result as load_result
    from depthgauge.workflows.shrink import ShrinkResult as ShrinkResult
    from depthgauge.workflows.shrink import plan_shrink as plan_shrink
    from depthgauge.workflows.shrink import shrink as shrink
    from depthgauge.workflows.sweep import sweep as sweep
    from depthgauge.workflows.sweep import sweep_status as sweep_status

_MODULES = {
    "Alarm": "depthgauge.results.monitor_record",
    "AlarmError": "depthgauge.training.monitor.actions",
    "AlarmThresholds": "depthgauge.results.monitor_options",
    "Certificate": "depthgauge.certificates.certificate",
    "Depth": "depthgauge.depth.effective",
    "DepthgaugeError": "depthgauge.errors",
    "GaugeOptions": "depthgauge.results.gauge_options",
    "GaugeResult": "depthgauge.workflows.gauge",
    "InputError": "depthgauge.errors",
    "Monitor": "depthgauge.training.monitor.monitor",
    "MonitorCallback": "depthgauge.training.monitor.callback",
    "MonitorOptions": "depthgauge.results.monitor_options",
    "MonitorRecord": "depthgauge.results.monitor_record",
    "OutputBound": "depthgauge.training.output_bound",
    "PlanRecord": "depthgauge.results.shrink_record",
    "Probe": "depthgauge.results.monitor_record",
    "Profile": "depthgauge.measures.profile",
    "SelfAttentionNetwork": "depthgauge.network.network",
    "ShrinkOptions": "depthgauge.results.shrink_options",
    "ShrinkRecord": "depthgauge.results.shrink_record",
    "ShrinkResult": "depthgauge.workflows.shrink",
    "TrainedModel": "depthgauge.training.bounded_training",
    "TrainingOptions": "depthgauge.training.bounded_training",
    "attention": "depthgauge.fast_attention.attention",
    "attention_plan": "depthgauge.fast_attention.attention",
    "certify": "depthgauge.certificates.certificate",
    "claims": "depthgauge.ledger.registry",
    "collapse": "depthgauge.depth.methods",
    "effective_depth": "depthgauge.depth.effective",
    "gauge": "depthgauge.workflows.gauge",
    "load_network": "depthgauge.network.files",
    "load_result": "depthgauge.workflows.gauge",
    "measure": "depthgauge.measures.profile",
    "output_bound": "depthgauge.training.output_bound",
    "plan_shrink": "depthgauge.workflows.shrink",
    "random_network": "depthgauge.network.random_networks",
    "read_log": "depthgauge.results.monitor_record",
    "register_attention": "depthgauge.checkpoints.registered_attention",
    "save_network": "depthgauge.network.files",
    "separate": "depthgauge.separation.probability",
    "shrink": "depthgauge.workflows.shrink",
    "sweep": "depthgauge.workflows.sweep",
    "sweep_status": "depthgauge.workflows.sweep",
    "train_bounded": "depthgauge.training.bounded_training",
    "write_report": "depthgauge.report.write",
}

__all__ = [
    "Alarm",
    "AlarmError",
    "AlarmThresholds",
    "Certificate",
    "Depth",
    "DepthgaugeError",
    "GaugeOptions",
    "GaugeResult",
    "InputError",
    "Monitor",
    "MonitorCallback",
    "MonitorOptions",
    "MonitorRecord",
    "OutputBound",
    "PlanRecord",
    "Probe",
    "Profile",
    "SelfAttentionNetwork",
    "ShrinkOptions",
    "ShrinkRecord",
    "ShrinkResult",
    "TrainedModel",
    "TrainingOptions",
    "__version__",
    "attention",
    "attention_plan",
    "certify",
    "claims",
    "collapse",
    "effective_depth",
    "gauge",
    "load_network",
    "load_result",
    "measure",
    "output_bound",
    "plan_shrink",
    "random_network",
    "read_log",
    "register_attention",
    "save_network",
    "separate",
    "shrink",
    "sweep",
    "sweep_status",
    "train_bounded",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'depthgauge' has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found  # the next access does not come here
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
