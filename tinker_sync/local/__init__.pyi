from tinker_sync.local.process.serving import serve as serve
