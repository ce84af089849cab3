"""What an assignment is held to before and while it is worked on, and how failures are reported."""
