"""Values as text and pictures for the templates: numbers with units, times, states, sparklines.

Every value that is shown has its unit, and a hover text where the short form leaves something out. The templates escape
all texts; nothing here makes markup but `spark`, which is made of numbers alone.
"""
