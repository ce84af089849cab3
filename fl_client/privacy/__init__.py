"""The privacy account of this device's data: its secret, what all runs have spent of it, and the site's limit.

A charge is durable before the work that it is for begins. How private steps are computed belongs to `training`.
"""
