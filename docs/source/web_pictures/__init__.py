"""Pictures of the web page, taken with a browser from a real federation."""
