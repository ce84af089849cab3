"""How the daemon writes its log."""
