"""The web page of a coordinator: its runs, rounds, clients and events, read only and live.

It is a process of its own and reads everything through the coordinator's Admin service, with the identity of the person
who looks. Enters here: what shows something in a browser. It changes nothing, and decides nothing about runs.
"""
