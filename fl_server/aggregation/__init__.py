"""Makes the next model of accepted update files: reduction, server update, bundles for clients, server evaluation.

Everything blocks and is called from worker threads. It may use `algorithms`, `fl_tasks`, checkpoints and files of
the store; it must not import the ledger, runs or rpc.
"""
