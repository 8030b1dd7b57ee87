"""One round trip to a server: connections, credentials, verdicts and retries. Knows no runtime."""
