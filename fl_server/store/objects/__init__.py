"""Files in an object store: its bytes, the files that the ledger counts, and the local copies of what was read.

It may use the ledger and the errors of the store, and nothing of spool or runs. Only `bucket` knows the library.
"""
