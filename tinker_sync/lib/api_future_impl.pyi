from tinker_sync.lib import *
from tinker_sync.lib.other_names import _APIFuture as _APIFuture
from tinker_sync.lib.other_names import _TransportError as _TransportError
