"""The edge of the coordinator: connections, calls, requests and certificates, checked before a request is parsed."""
