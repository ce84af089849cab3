"""A small certificate authority: certificates and keys (`ca`), and the folder that keeps them (`pki`).

Only standard cryptography enters here, no network and no terminal output. Loading it takes as long as the rest of
`fl`, so other packages import it where they need it.
"""
