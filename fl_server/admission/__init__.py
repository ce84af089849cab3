"""The checks that an update must pass before it counts: header, layout, size, digest, finite values, norms, buffers.

It works on headers and files, without asyncio and without knowing runs. It may use aggregation, clients and store; it
must not import runs, uploads or rpc.
"""
