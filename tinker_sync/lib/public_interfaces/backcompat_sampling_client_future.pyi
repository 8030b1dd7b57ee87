from tinker_sync.lib.public_interfaces import *
