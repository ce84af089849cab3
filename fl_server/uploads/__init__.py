"""Updates from the wire to the ledger: messages, part files, verdicts and receipts.

It may use runs, admission and store. It must not import rpc: the service above passes messages in and receipts out.
"""
