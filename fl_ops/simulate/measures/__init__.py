"""What a simulation measures of its models beyond evaluations: training accuracy of each client, and sharpness.

Nothing here changes a model, a cohort or a byte count: a run with measures has the bits of one without. The numbers
stand apart from a round's metrics, so that no stop rule reads them.
"""
