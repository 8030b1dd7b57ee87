from tinker_sync.types import *
