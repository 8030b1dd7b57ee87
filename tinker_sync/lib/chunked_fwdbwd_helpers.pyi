from tinker_sync.lib import *
