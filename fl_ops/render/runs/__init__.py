"""What is shown of runs: rounds, evaluations, health, schedules, costs of a target, waits, pictures.

It gets messages of the Admin service. Pictures need matplotlib, which is imported when one is drawn. The tables of
several messages are in `fl_ops.render.tables`, which imports this package; live views do not belong here.
"""
