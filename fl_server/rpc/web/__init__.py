"""The socket for the process that serves the web page, and its logins.

On it the Admin service answers the methods that read, for the sessions of browsers. Nothing else may call it: only the
owner of the state directory can open the socket.
"""
