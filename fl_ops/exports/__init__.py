"""Other forms of an exported model: whole with frozen parameters that no checkpoint has, an adapter, the trained part.

They need the model of the task, which is built here. The checkpoint's file names the frozen parameters by their digest.
"""
