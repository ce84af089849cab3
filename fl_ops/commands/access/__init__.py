"""The command `fl web`: a web page of a coordinator, served here or by the coordinator itself.

What the page shows and who gets in is in `fl_web`; here are the command's options and the identity of its caller.
"""
