from tinker_sync.lib import *
from tinker_sync.lib.names import _APIFuture as _APIFuture
from tinker_sync.lib.names import _TransportError as _TransportError
