"""The policy of the device's site: which coordinators, tasks, methods and amounts of work the device accepts.

The policy file belongs to the site. No message of a coordinator can change it. Rules judge what a coordinator requests;
they know nothing of connections, training or storage. The package may import gates, settings, errors and the methods.
"""
