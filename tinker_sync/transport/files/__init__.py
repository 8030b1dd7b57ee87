"""Transfer of checkpoint files between this machine and the signed addresses that a server gives.

- `download` fetches a checkpoint: `file` fetches each file in parts, `archive` unpacks, `names` checks names.
- `upload` sends the files of a directory.
- `signed` makes the HTTP requests; `response_head` reads their answers and decides on another attempt.
- `download_state` keeps on disk what has arrived; `progress` reports to the user.

A download or an upload runs on one thread of its own; workers help to fetch the parts of a file. The caller
passes functions that call the service for the addresses.
"""
