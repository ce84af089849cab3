"""The edge of the coordinator: limits on connections, calls and requests, checked before a request is parsed."""
