from tinker_sync.local.running import serve as serve
