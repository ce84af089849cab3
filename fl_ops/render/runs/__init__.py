"""Pictures of a coordinator's runs, from messages of the Admin service.

They need matplotlib, which is imported when a picture is drawn.
"""
