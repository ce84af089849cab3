"""From an empty machine to a trained model of one's own: minutes and commands here, and by Flower's quickstart.

A way is the list of commands that the documentation has. It is walked by a shell in an empty folder.
"""
