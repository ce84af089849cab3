"""The coordinator as the web page reads it: calls, pages and watches of the Admin service, and its failures.

The only code of the web page that knows grpc, apart from access. One `Reader` serves all browsers of an identity: it
shares calls that several views make at the same time, and has one watch upstream for all of them.
"""
