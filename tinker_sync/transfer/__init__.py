"""Files on their way between this machine and the addresses a server gives for them."""
