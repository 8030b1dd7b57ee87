from tinker_sync.testing import faults as faults
from tinker_sync.testing.calls import RecordedCall as RecordedCall
from tinker_sync.testing.faults import Fault as Fault
from tinker_sync.testing.plan import FaultPlan as FaultPlan
from tinker_sync.testing.server import LocalServer as LocalServer
from tinker_sync.testing.tapes import record as record
from tinker_sync.testing.tapes import replay as replay
