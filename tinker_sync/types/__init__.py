"""Values that go to and come from the service: frozen models without I/O and without a wire format.

Every name loads its module on first use, so scripts that touch only scalars never wait for numpy.
"""
