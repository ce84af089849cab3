"""The clients of a coordinator: registration, sessions, presence, who may be drawn, and what each client may use.

It keeps client records in the ledger and reports changes through `FleetListener`. It knows neither runs nor grpc.
"""
