"""Who may see the page, and what a request may be: logins, cookies, headers and limits.

It wraps the application from outside. The application gets only requests with a Reader of their browser's identity, and
knows nothing of sessions.
"""
