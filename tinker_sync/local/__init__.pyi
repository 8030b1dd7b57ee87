from tinker_sync.local.launch.serving import serve as serve
