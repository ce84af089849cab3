"""The parsers of received bytes, by where the bytes come from."""
