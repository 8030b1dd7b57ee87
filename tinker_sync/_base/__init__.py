"""What every other room may use, and what uses none of them.

clock           time as an object that tests can set, and locks that Ctrl-C leaves free
policy          what a status means at each stage of a call, in one table
secret          values that are never shown, and the masking of what might hold one
events          what happens to requests and sessions, for observers
log             loggers whose handlers cannot disturb the client
api_errors      the base of all errors (`tinker_sync.errors` is their public place)
files, jsonl    locks, files that are replaced in one step, files of JSON lines that may be cut short
error_details   what an error keeps of its request and response
lazy, left_out  names that load their module on first use, and names that are gone
numbers         counters
numpy           numpy and the types of its arrays, loaded on first use
naming          the public method that runs, and the user's line that called it
fork            what a forked child must renew
spelling        "did you mean"
displays        the hook of the displays for notebooks
"""
