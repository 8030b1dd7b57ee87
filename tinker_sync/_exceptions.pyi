from tinker_sync.errors import *
